// Calls that read rows, select and attend.
#include <cmath>
#include <cstring>

#include "kernels/base/dtype.h"
#include "tests/fuzz/handlers/calls.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;

constexpr float kTolerance = 1e-2f;
constexpr uint32_t kPq = 1;  // subspaces of the index that is asked for, 0 = flat

struct Part {
  v1::RowPart part;
  uint32_t begin, end;
};
constexpr Part kParts[] = {{v1::ROW_PART_UNSPECIFIED, 0, kRowElements},
                           {v1::ROW_PART_ROW, 0, kRowElements},
                           {v1::ROW_PART_KEY, 0, kKeyElements},
                           {v1::ROW_PART_VALUE, kKeyElements, kRowElements}};

float KeyElement(const Tenant& tenant, size_t layer, uint32_t content, uint32_t i) {
  return kernels::F16ToF32(tenant.rows.row(layer, content)[i]);
}

// A query of small numbers; the second head's are those of the first one, turned around.
std::vector<float> QueryOf(uint8_t seed) {
  std::vector<float> query(kQueryHeadCount * kKeyElements);
  for (size_t i = 0; i < query.size(); ++i) {
    query[i] = static_cast<float>((i * 7 + seed) % 13) / 6.0f - 1.0f;
  }
  return query;
}

// Sets the query to `numbers`, [tokens, kQueryHeadCount, kKeyElements], at the last stored token.
void SetQuery(const Sequence& one, size_t layer, const std::vector<float>& numbers,
              v1::Query* query) {
  query->set_sequence_id(one.id);
  query->set_layer(kStoredLayers[layer]);
  query->set_query_position(one.content.empty() ? 0 : one.content.size() - 1);
  v1::Tensor* tensor = query->mutable_queries();
  tensor->set_dtype(v1::DTYPE_FLOAT32);
  tensor->add_shape(numbers.size() / (kQueryHeadCount * kKeyElements));
  tensor->add_shape(kQueryHeadCount);
  tensor->add_shape(kKeyElements);
  tensor->set_inline_data(numbers.data(), numbers.size() * sizeof(float));
}

double LogitOf(const Tenant& tenant, size_t layer, uint32_t content, const float* query) {
  double dot = 0;
  for (uint32_t i = 0; i < kKeyElements; ++i) {
    dot += static_cast<double>(query[i]) * KeyElement(tenant, layer, content, i);
  }
  return dot / std::sqrt(kKeyElements);
}

// What is asked of an index: it must be built, unless it is flat.
struct AskedIndex {
  v1::IndexSpec spec;
  bool is_flat = true;
  bool is_built = true;
};

AskedIndex ChooseIndex(const Sequence& one, uint8_t kind) {
  const uint32_t subspaces = kind % 4 < 2 ? 0 : kind % 4 - kPq;
  if (subspaces == 0) return {.spec = service::Flat()};
  AskedIndex asked{.spec = service::Pq(subspaces, 4), .is_flat = false, .is_built = false};
  for (const kvstore::IndexDescriptor& index : one.indexes) {
    asked.is_built = asked.is_built || index.subspace_count == subspaces;
  }
  return asked;
}

StatusCode ExpectedOf(const Sequence& one, const AskedIndex& asked) {
  const StatusCode code = ExpectedOf(one);
  if (code == StatusCode::kOk && !asked.is_built) return StatusCode::kFailedPrecondition;
  return code;
}

// The positions ascend among the stored ones; under a flat index none that is left out scores more.
void CheckSelected(const Tenant& tenant, const Sequence& one, size_t layer, bool is_flat,
                   uint32_t count, const std::vector<float>& query, const v1::Selected& selected) {
  if (selected.count() != count || selected.positions_size() != static_cast<int>(count)) {
    Found("another count of tokens is selected");
  }
  std::vector<bool> is_selected(one.content.size());
  uint64_t least = 0;
  for (const uint32_t position : selected.positions()) {
    if (position < least || position >= one.content.size()) Found("positions that do not ascend");
    is_selected[position] = true;
    least = position + 1;
  }
  if (!is_flat) return;
  double worst = std::numeric_limits<double>::infinity();
  double best = -worst;
  for (size_t i = 0; i < one.content.size(); ++i) {
    double logit = 0;
    for (uint32_t head = 0; head < kQueryHeadCount; ++head) {
      logit += LogitOf(tenant, layer, one.content[i], &query[head * kKeyElements]);
    }
    (is_selected[i] ? worst : best) =
        is_selected[i] ? std::min(worst, logit) : std::max(best, logit);
  }
  if (best > worst + static_cast<double>(kTolerance)) Found("a better token is left out");
}

v1::Selection SelectionOf(const v1::IndexSpec& index, uint32_t count) {
  v1::Selection selection = service::TokenCountSelection(index, 0, 0, count);
  selection.set_group_rule(v1::GROUP_RULE_MEAN_LOGIT);
  return selection;
}

bool Readable(const Sequence* one) {
  return one != nullptr && !one->is_loose && !one->is_live && !one->content.empty();
}

std::vector<float> FloatsOf(const v1::Tensor& tensor) {
  std::vector<float> floats(tensor.inline_data().size() / sizeof(float));
  std::memcpy(floats.data(), tensor.inline_data().data(), floats.size() * sizeof(float));
  return floats;
}

// The attention over one token is its value, for every head.
void AttendOneToken(World& world, Tenant& tenant, const Sequence& one, uint8_t kind, Bytes& bytes) {
  const size_t layer = kind % kLayerCount;
  const auto position = static_cast<uint32_t>(one.content.size() * kind / 256);
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  SetQuery(one, layer, QueryOf(kind), item->mutable_query());
  item->mutable_positions()->set_count(1);
  item->mutable_positions()->add_positions(position);
  v1::AttendResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, ExpectedOf(one))) return;
  const std::vector<float> output = FloatsOf(response.items(0).output());
  if (output.size() != kQueryHeadCount * kValueElements) Found("an output of another size");
  const Row& row = tenant.rows.row(layer, one.content[position]);
  for (size_t i = 0; i < output.size(); ++i) {
    const float value = kernels::F16ToF32(row[kKeyElements + i % kValueElements]);
    if (!(std::abs(output[i] - value) <= kTolerance))
      Found("the attention is not the token's value");
  }
}

// Compares the attention of one query head over the tokens that it sees with its definition.
void CheckAttention(const Tenant& tenant, size_t layer, std::span<const uint32_t> seen,
                    const float* query, const float* output, float lse) {
  double sum = 0;
  std::vector<double> values(kValueElements);
  for (const uint32_t content : seen) {
    const double weight = std::exp(LogitOf(tenant, layer, content, query));
    const Row& row = tenant.rows.row(layer, content);
    sum += weight;
    for (uint32_t i = 0; i < kValueElements; ++i) {
      values[i] += weight * static_cast<double>(kernels::F16ToF32(row[kKeyElements + i]));
    }
  }
  const double tolerance = static_cast<double>(kTolerance);
  const double logarithm = static_cast<double>(lse);
  const bool is_lse = sum > 0 ? std::abs(logarithm - std::log(sum)) <= tolerance
                              : std::isinf(logarithm) && logarithm < 0;
  if (!is_lse) Found("another log-sum-exp of a range");
  for (uint32_t i = 0; i < kValueElements; ++i) {
    const double expected = sum > 0 ? values[i] / sum : 0;
    if (!(std::abs(static_cast<double>(output[i]) - expected) <= tolerance)) {
      Found("another attention over a range");
    }
  }
}

}  // namespace

void FetchBlocks(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (!Readable(one)) return;
  const uint8_t kind = bytes.Byte();
  const Part& part = kParts[kind % 4];
  const size_t layer = kind / 4 % kLayerCount;
  const uint64_t stored = one->content.size();
  v1::FetchBlocksRequest request;
  request.set_sequence_id(one->id);
  request.set_layer(kStoredLayers[layer]);
  request.set_part(part.part);
  bool is_stored = true;
  for (uint8_t i = 0; i <= kind / 8 % 2; ++i) {
    const uint64_t begin = stored * bytes.Byte() / 256;
    const uint64_t end = begin + 1 + bytes.Byte();
    is_stored = is_stored && end <= stored;
    request.add_ranges()->set_begin(begin);
    request.mutable_ranges(i)->set_end(kind < 128 ? std::min(end, stored) : end);
  }
  is_stored = is_stored || kind < 128;
  v1::FetchBlocksResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  StatusCode expected = ExpectedOf(*one);
  if (expected == StatusCode::kOk && !is_stored) expected = StatusCode::kOutOfRange;
  if (!world.Expect(tenant, result, request, expected)) return;
  for (int i = 0; i < request.ranges_size(); ++i) {
    const v1::TokenRange& range = request.ranges(i);
    const auto content =
        std::span(one->content).subspan(range.begin(), range.end() - range.begin());
    const std::string rows = ElementsOf(tenant.rows, layer, content, part.begin, part.end);
    if (response.blocks(i).inline_data() != rows) Found("FetchBlocks returns other rows");
  }
}

void FetchTokens(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (!Readable(one)) return;
  const uint8_t kind = bytes.Byte();
  const Part& part = kParts[kind % 4];
  const size_t layer = kind / 4 % kLayerCount;
  v1::FetchTokensRequest request;
  request.set_sequence_id(one->id);
  request.set_layer(kStoredLayers[layer]);
  request.set_part(part.part);
  request.set_count(1 + kind / 8 % 4);
  Content content;
  bool is_stored = true;
  for (uint32_t i = 0; i < request.count(); ++i) {
    const uint8_t place = bytes.Byte();
    const size_t stored = one->content.size();
    const size_t position = place == 255 ? stored : stored * place / 255;
    request.add_positions(static_cast<uint32_t>(position));
    is_stored = is_stored && position < stored;
    if (is_stored) content.push_back(one->content[position]);
  }
  v1::FetchTokensResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  StatusCode expected = ExpectedOf(*one);
  if (expected == StatusCode::kOk && !is_stored) expected = StatusCode::kOutOfRange;
  if (!world.Expect(tenant, result, request, expected)) return;
  if (response.rows().inline_data() !=
      ElementsOf(tenant.rows, layer, content, part.begin, part.end)) {
    Found("FetchTokens returns other rows");
  }
}

void TopK(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (!Readable(one)) return;
  const uint8_t kind = bytes.Byte();
  const size_t layer = kind / 4 % kLayerCount;
  const AskedIndex asked = ChooseIndex(*one, kind);
  const uint32_t count =
      std::min<uint32_t>(1 + kind / 8, static_cast<uint32_t>(one->content.size()));
  const std::vector<float> query = QueryOf(kind);
  v1::TopKRequest request;
  v1::TopKItem* item = request.add_items();
  SetQuery(*one, layer, query, item->mutable_query());
  *item->mutable_selection() = SelectionOf(asked.spec, count);
  v1::TopKResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, ExpectedOf(*one, asked))) return;
  CheckSelected(tenant, *one, layer, asked.is_flat, count, query, response.items(0));
}

void Attend(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (!Readable(one)) return;
  const uint8_t kind = bytes.Byte();
  if (kind % 2 == 1) return AttendOneToken(world, tenant, *one, kind, bytes);
  const size_t layer = kind / 4 % kLayerCount;
  const AskedIndex asked = ChooseIndex(*one, kind);
  const uint32_t count =
      std::min<uint32_t>(1 + kind / 8, static_cast<uint32_t>(one->content.size()));
  const std::vector<float> query = QueryOf(kind);
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  item->set_want_positions(true);
  SetQuery(*one, layer, query, item->mutable_query());
  *item->mutable_selection() = SelectionOf(asked.spec, count);
  v1::AttendResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, ExpectedOf(*one, asked))) return;
  const v1::Attention& attention = response.items(0);
  CheckSelected(tenant, *one, layer, asked.is_flat, count, query, attention.selected());
  for (const float number : FloatsOf(attention.output())) {
    if (!std::isfinite(number)) Found("an output that is no number");
  }
}

void AttendRange(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (!Readable(one)) return;
  const uint8_t kind = bytes.Byte();
  const size_t layer = kind / 4 % kLayerCount;
  const uint32_t length = 1 + kind / 8 % 3;  // query tokens
  const uint64_t stored = one->content.size();
  const uint64_t begin = stored * bytes.Byte() / 256;
  const uint64_t wanted = begin + bytes.Byte();
  const uint64_t end = kind < 224 ? std::min(wanted, stored) : wanted;
  std::vector<float> query;
  for (uint32_t token = 0; token < length; ++token) {
    const std::vector<float> numbers = QueryOf(static_cast<uint8_t>(kind + token));
    query.insert(query.end(), numbers.begin(), numbers.end());
  }
  v1::AttendRangeRequest request;
  v1::AttendRangeItem* item = request.add_items();
  SetQuery(*one, layer, query, item->mutable_query());
  const uint64_t position = stored * (kind % 4) / 4;  // of the first query token
  item->mutable_query()->set_query_position(position);
  item->mutable_tokens()->set_begin(begin);
  item->mutable_tokens()->set_end(end);
  v1::AttendRangeResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  StatusCode expected = ExpectedOf(*one);
  if (expected == StatusCode::kOk && end > stored) expected = StatusCode::kOutOfRange;
  if (!world.Expect(tenant, result, request, expected)) return;
  const v1::Attention& attention = response.items(0);
  const std::vector<float> output = FloatsOf(attention.output());
  const uint32_t rows = length * kQueryHeadCount;
  if (output.size() != size_t{rows} * kValueElements ||
      attention.lse_size() != static_cast<int>(rows)) {
    Found("an attention over a range of another size");
  }
  for (uint32_t i = 0; i < rows; ++i) {
    const uint64_t seen_end = std::min(end, position + i / kQueryHeadCount + 1);
    const uint64_t seen = seen_end > begin ? seen_end - begin : 0;
    CheckAttention(tenant, layer, std::span(one->content).subspan(begin, seen),
                   &query[i * kKeyElements], &output[i * kValueElements],
                   attention.lse(static_cast<int>(i)));
  }
}

void Score(World& world, Tenant& tenant, Bytes& bytes) {
  const Sequence* one = Choose(tenant, bytes);
  if (!Readable(one)) return;
  const uint8_t kind = bytes.Byte();
  const size_t layer = kind / 4 % kLayerCount;
  const AskedIndex asked = ChooseIndex(*one, kind);
  const std::vector<float> query = QueryOf(kind);
  const uint64_t end = std::min<uint64_t>(one->content.size(), 1 + kind / 8);
  v1::ScoreRequest request;
  v1::ScoreItem* item = request.add_items();
  SetQuery(*one, layer, query, item->mutable_query());
  *item->mutable_index() = asked.spec;
  item->mutable_tokens()->set_end(end);
  v1::ScoreResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  if (!world.Expect(tenant, result, request, ExpectedOf(*one, asked))) return;
  const std::vector<float> logits = FloatsOf(response.items(0).logits());
  if (logits.size() != kQueryHeadCount * end) Found("another count of logits");
  for (size_t i = 0; asked.is_flat && i < logits.size(); ++i) {
    const double logit =
        LogitOf(tenant, layer, one->content[i % end], &query[i / end * kKeyElements]);
    if (!(std::abs(static_cast<double>(logits[i]) - logit) <= static_cast<double>(kTolerance))) {
      Found("a logit is wrong");
    }
  }
}

}  // namespace pqcached::fuzz
