// Calls that write rows: inline, in streams, and from staging that changes meanwhile.
#include <cstring>

#include "tests/fuzz/handlers/calls.h"
#include "tests/fuzz/target.h"

namespace pqcached::fuzz {
namespace {

using absl::StatusCode;

constexpr uint8_t kCounts[] = {1, 2, 3, 5, 40, 1, 128, 129};

// New tokens of a sequence, and their names when they are named.
struct Fresh {
  uint64_t first = 0;  // their first position
  Content content;
  std::vector<uint32_t> ids;  // of tokens that had no name

  uint64_t end() const { return first + content.size(); }
};

// Tokens that have names already get the content of their names.
Fresh ChooseTokens(const Sequence& one, Bytes& bytes) {
  const uint8_t kind = bytes.Byte();
  Fresh fresh{.first = one.content.size(), .content = {}, .ids = {}};
  const size_t count = std::min<size_t>(kCounts[kind % 8], World::kMaxTokens - fresh.first);
  const bool names = kind / 8 % 2 == 1;
  uint32_t content = one.content.empty() ? 0 : one.content.back();
  for (size_t i = 0; i < count; ++i) {
    const size_t position = fresh.first + i;
    if (position < one.ids.size()) {
      content = ContentAfter(content, one.ids[position]);
    } else if (names && one.ids.size() + fresh.ids.size() == position) {
      fresh.ids.push_back(kind / 16);
      content = ContentAfter(content, fresh.ids.back());
    } else {
      content = (content * 5 + kind) % kContents;
    }
    fresh.content.push_back(content);
  }
  return fresh;
}

void Store(Sequence& one, const Fresh& fresh, uint64_t token_count) {
  one.content.insert(one.content.end(), fresh.content.begin(), fresh.content.end());
  one.ids.insert(one.ids.end(), fresh.ids.begin(), fresh.ids.end());
  if (token_count != one.content.size()) Found("another count of tokens was stored");
}

// Wider numbers take longer.
bool UsesFloats(const Fresh& fresh, int choice) {
  return choice % 2 == 1 && fresh.content.size() < 128;
}

bool Writable(const Sequence* one) {
  return one != nullptr && !one->is_loose && one->content.size() < World::kMaxTokens;
}

// Moves the tensors into the staging slot, such that the last one ends where the slot does.
void Stage(Tenant& tenant, std::span<v1::LayerRows* const> layers) {
  ++tenant.generation;
  uint64_t end = World::kSlotBytes;
  for (v1::LayerRows* rows : layers) {
    for (v1::Tensor* tensor : {rows->mutable_values(), rows->mutable_keys()}) {
      const std::string data = tensor->inline_data();
      end -= data.size();
      std::memcpy(tenant.staging.data() + end, data.data(), data.size());
      v1::StagingReference* place = tensor->mutable_staging();
      place->set_offset_bytes(end);
      place->set_size_bytes(data.size());
      place->set_generation(tenant.generation);
    }
  }
}

v1::CommitRequest CommitOf(Tenant& tenant, const Sequence& one, const Fresh& fresh,
                           bool as_floats) {
  v1::CommitRequest request;
  request.set_sequence_id(one.id);
  request.set_first_position(fresh.first);
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    SetRows(tenant.rows, layer, fresh.content, as_floats, request.add_rows());
  }
  Stage(tenant, std::vector<v1::LayerRows*>{request.mutable_rows(0), request.mutable_rows(1)});
  return request;
}

// Returns the contents of tokens that were read from memory which changed between two contents:
// each number is one of two.
Content ReadRaced(World& world, Tenant& tenant, uint64_t id, const Fresh& first,
                  const Fresh& second) {
  std::vector<std::array<Row, kLayerCount>> rows(first.content.size());
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    v1::FetchBlocksRequest request;
    request.set_sequence_id(id);
    request.set_layer(kStoredLayers[layer]);
    request.add_ranges()->set_begin(first.first);
    request.mutable_ranges(0)->set_end(first.end());
    v1::FetchBlocksResponse response;
    const absl::Status status = world.sidecar().Call(tenant.client, request, &response);
    if (!status.ok()) Found("raced rows: " + status.ToString());
    const std::string& data = response.blocks(0).inline_data();
    if (data.size() != rows.size() * sizeof(Row)) Found("raced rows of another size");
    for (size_t token = 0; token < rows.size(); ++token) {
      Row& row = rows[token][layer];
      std::memcpy(row.data(), data.data() + token * sizeof(Row), sizeof(Row));
      const Row& one = tenant.rows.row(layer, first.content[token]);
      const Row& other = tenant.rows.row(layer, second.content[token]);
      for (uint32_t i = 0; i < kRowElements; ++i) {
        if (row[i] == one[i] || row[i] == other[i]) continue;
        Found("a number was stored that was never written, or NaN");
      }
    }
  }
  Content content;
  for (const auto& token : rows) content.push_back(tenant.rows.AddRows(token));
  return content;
}

}  // namespace

void Append(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (!Writable(one)) return;
  Fresh fresh = ChooseTokens(*one, bytes);
  const uint8_t kind = bytes.Byte();
  const bool repeats = kind % 8 == 7 && one->content.size() >= fresh.content.size();
  const bool leaves_gap = kind % 8 == 6;
  if (repeats) fresh.first -= fresh.content.size();
  if (leaves_gap) fresh.first += 1;
  if (repeats || leaves_gap) fresh.ids.clear();
  v1::AppendRequest request;
  v1::SequenceAppend* item = request.add_items();
  item->set_sequence_id(one->id);
  item->set_first_position(fresh.first);
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    SetRows(tenant.rows, layer, fresh.content, UsesFloats(fresh, kind / 8), item->add_rows());
  }
  // Names of tokens that have some already are repeated; all must be there or none.
  if (!fresh.ids.empty() || kind / 16 % 2 == 1) {
    std::vector<uint32_t> ids = one->ids;
    ids.insert(ids.end(), fresh.ids.begin(), fresh.ids.end());
    if (!repeats && !leaves_gap && ids.size() >= fresh.end()) {
      item->mutable_token_ids()->Add(ids.begin() + static_cast<ptrdiff_t>(fresh.first),
                                     ids.begin() + static_cast<ptrdiff_t>(fresh.end()));
    } else {
      fresh.ids.clear();
    }
  }
  if (kind / 32 % 2 == 1 && !tenant.is_staging_worn()) {
    Stage(tenant, std::vector<v1::LayerRows*>{item->mutable_rows(0), item->mutable_rows(1)});
  }
  v1::AppendResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  StatusCode expected = ExpectedOf(*one);
  if (expected == StatusCode::kOk && leaves_gap) expected = StatusCode::kInvalidArgument;
  if (!world.Expect(tenant, result, request, expected, /*may_lack=*/true)) return;
  if (!repeats) return Store(*one, fresh, response.token_counts(0));
  if (response.token_counts(0) != one->content.size()) Found("a repeat changed the count");
}

void Ingest(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (!Writable(one)) return;
  const Fresh fresh = ChooseTokens(*one, bytes);
  const uint8_t kind = bytes.Byte();
  const size_t chunks = std::min<size_t>(1 + kind % 2, fresh.content.size());
  std::vector<v1::IngestRequest> messages(1 + chunks * kLayerCount);
  v1::IngestHeader* header = messages[0].mutable_header();
  header->set_sequence_id(one->id);
  header->set_token_ids_begin(one->ids.size());
  header->mutable_token_ids()->Add(fresh.ids.begin(), fresh.ids.end());
  std::vector<v1::IngestRequest*> stream = {&messages[0]};
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    const size_t begin = chunk * fresh.content.size() / chunks;
    const size_t end = (chunk + 1) * fresh.content.size() / chunks;
    for (size_t layer = 0; layer < kLayerCount; ++layer) {
      v1::IngestChunk* part = messages[stream.size()].mutable_chunk();
      part->set_first_position(fresh.first + begin);
      SetRows(tenant.rows, layer, std::span(fresh.content).subspan(begin, end - begin),
              UsesFloats(fresh, kind / 2), part->mutable_rows());
      stream.push_back(&messages[stream.size()]);
    }
  }
  const uint64_t id = one->id;
  v1::IngestResponse response;
  const World::Result result = world.Ingest(tenant, stream, &response, bytes);
  // Only a header with these ids can have reached a sequence, and chunks follow it.
  for (const v1::IngestRequest* each : stream) {
    if (result.is_changed) world.Expect(tenant, result, *each, StatusCode::kOk);
  }
  if (result.is_changed) {
    if (result.status.ok()) tenant.Find(id)->is_loose = tenant.has_loose_names = true;
    return;
  }
  if (!world.Expect(tenant, result, messages[0], ExpectedOf(*one), /*may_lack=*/true)) return;
  Store(*one, fresh, response.token_count());
}

void Commit(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (!Writable(one) || tenant.is_staging_worn()) return;
  Fresh fresh = ChooseTokens(*one, bytes);
  fresh.ids.clear();
  const uint8_t kind = bytes.Byte();
  v1::CommitRequest request = CommitOf(tenant, *one, fresh, UsesFloats(fresh, kind));
  const bool leaves_slot = kind % 16 == 14;
  if (leaves_slot) {  // the tensor that ends where the slot does
    v1::StagingReference* place = request.mutable_rows(0)->mutable_values()->mutable_staging();
    place->set_offset_bytes(place->offset_bytes() + sizeof(uint64_t));
  }
  v1::CommitResponse response;
  const World::Result result = world.Call(tenant, request, &response, bytes);
  const StatusCode expected = leaves_slot ? StatusCode::kInvalidArgument : ExpectedOf(*one);
  if (!world.Expect(tenant, result, request, expected, /*may_lack=*/true)) return;
  Store(*one, fresh, response.token_count());
}

// While the call reads the slot, another thread writes it: each number that is stored is one of
// those that were written, and never NaN.
void RacedCommit(World& world, Tenant& tenant, Bytes& bytes) {
  Sequence* one = Choose(tenant, bytes);
  if (!Writable(one) || tenant.is_staging_worn()) return;
  if (one->ids.size() > one->content.size()) return;  // the names of a prompt promise its rows
  const uint8_t kind = bytes.Byte();
  const bool writes_nan = kind % 4 == 3;
  const Fresh first{.first = one->content.size(), .content = RacedContent(0), .ids = {}};
  const Fresh second{.first = first.first, .content = RacedContent(1), .ids = {}};
  v1::CommitRequest request;
  request.set_sequence_id(one->id);
  request.set_first_position(first.first);
  ++tenant.generation;
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    SetRows(tenant.rows, layer, first.content, false, request.add_rows());
    v1::LayerRows* rows = request.mutable_rows(static_cast<int>(layer));
    uint64_t offset = RacedOffset(writes_nan) + layer * first.content.size() * sizeof(Row);
    for (v1::Tensor* tensor : {rows->mutable_keys(), rows->mutable_values()}) {
      const size_t size = tensor->inline_data().size();
      v1::StagingReference* place = tensor->mutable_staging();
      place->set_offset_bytes(offset);
      place->set_size_bytes(size);
      place->set_generation(tenant.generation);
      offset += size;
    }
  }
  v1::CommitResponse response;
  world.WriteStaging(tenant, writes_nan);
  const World::Result result{.status = world.sidecar().Call(tenant.client, request, &response)};
  if (writes_nan && absl::IsInvalidArgument(result.status)) return;
  if (!world.Expect(tenant, result, request, ExpectedOf(*one), /*may_lack=*/true)) return;
  Fresh raced = first;
  raced.content = ReadRaced(world, tenant, one->id, first, second);
  Store(*one, raced, response.token_count());
}

}  // namespace pqcached::fuzz
