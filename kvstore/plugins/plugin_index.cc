#include "kvstore/plugins/plugin_index.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <utility>

#include "kernels/train/kmeans.h"
#include "kvstore/read/indexes/plugin_names.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kEncodedAtOnce = 256;
constexpr size_t kMaxParameterName = 32;
constexpr size_t kMaxTextBytes = 512;
static_assert(PQCACHED_INDEX_PLUGIN_PARAMETERS == kMaxPluginParameters &&
              PQCACHED_INDEX_PLUGIN_VALUE == kMaxPluginValue);

// The values of all parameters, as the plug-in reads them.
struct PluginValues {
  uint32_t values[kMaxPluginParameters];

  explicit PluginValues(const IndexDescriptor& index) {
    for (size_t i = 0; i < kMaxPluginParameters; ++i) values[i] = PluginValueOf(index, i);
  }
  pqcached_index_plugin_shape ShapeOf(uint32_t key_dim) const {
    return {.key_dim = key_dim, .values = values};
  }
};

bool IsText(const char* text) {
  return text != nullptr && *text != '\0' && strnlen(text, kMaxTextBytes + 1) <= kMaxTextBytes;
}

bool IsParameterName(const char* name) {
  if (name == nullptr || strnlen(name, kMaxParameterName + 1) > kMaxParameterName) return false;
  const std::string_view text = name;
  return !text.empty() &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string_view::npos;
}

std::string CheckPluginParameter(const PluginDescription& description, uint32_t number) {
  const pqcached_index_plugin_parameter& parameter = description.parameters[number];
  const std::string path = "parameters[" + std::to_string(number) + "]";
  if (!IsParameterName(parameter.name)) return path + ".name: must be [a-z0-9_]{1,32}";
  if (!IsText(parameter.text)) return path + ".text: must have 1 to 512 bytes";
  for (uint32_t other = 0; other < number; ++other) {
    if (std::string_view(description.parameters[other].name) == parameter.name) {
      return path + ".name: " + parameter.name + ", the name of another parameter";
    }
  }
  if (parameter.most > kMaxPluginValue || parameter.least > parameter.most) {
    return path + ".most: " + std::to_string(parameter.most) + ", must lie in [least, 65535]";
  }
  if (parameter.default_value < parameter.least || parameter.default_value > parameter.most) {
    return path + ".default_value: " + std::to_string(parameter.default_value) +
           ", must lie in [least, most]";
  }
  return {};
}

const std::byte* PartOf(const void* header, uint64_t offset, uint64_t stride, uint32_t kv_head) {
  return static_cast<const std::byte*>(header) + offset + kv_head * stride;
}

const std::byte* HeadCodebook(const CodebookHeader& header, uint32_t kv_head) {
  return PartOf(&header, header.centroid_offset_bytes, header.head_stride_bytes, kv_head);
}

// Returns the codes of a slot; those of a token are plane_stride_bytes long.
uint8_t* CodesOf(const IndexDataHeader& header, uint32_t kv_head, uint32_t slot) {
  return const_cast<uint8_t*>(Planes(header, kv_head)) + size_t{slot} * header.plane_stride_bytes;
}

void LoadKeys(const kernels::Exec& exec, const LayerShape& shape, const std::byte* rows,
              uint32_t count, uint32_t step, float* keys) {
  if (count == 0) return;
  kernels::KMeansLoad(exec, {.source_type = shape.dtype,
                             .rows = rows,
                             .row_stride = size_t{shape.row_bytes} * step,
                             .row_count = count,
                             .dim = shape.key_dim,
                             .pair_offset_bytes = 0,
                             .sample_type = kernels::DType::kF32,
                             .samples = reinterpret_cast<std::byte*>(keys)});
}

uint64_t CountRows(std::span<const kernels::RowSpan> spans) {
  uint64_t count = 0;
  for (const kernels::RowSpan& span : spans) count += span.token_count;
  return count;
}

// Returns the distance of the rows of a sample.
uint32_t SampleStep(const TrainingArgs& args) {
  const uint64_t rows = CountRows(args.rows);
  uint64_t most = PQCACHED_INDEX_PLUGIN_TRAIN_KEYS;
  if (args.sample_tokens != 0) most = std::min<uint64_t>(most, args.sample_tokens);
  return static_cast<uint32_t>(std::max<uint64_t>(1, (rows + most - 1) / most));
}

// Loads every `step`-th row. Returns their number.
uint32_t LoadPluginSample(const kernels::Exec& exec, const TrainingArgs& args, uint32_t step,
                          float* keys) {
  uint32_t loaded = 0;
  uint32_t skipped = 0;  // rows of the next span that are left out
  for (const kernels::RowSpan& span : args.rows) {
    if (span.token_count <= skipped) {
      skipped -= span.token_count;
      continue;
    }
    const uint32_t rows = span.token_count - skipped;
    const uint32_t count = (rows + step - 1) / step;
    LoadKeys(exec, args.shape, span.rows + size_t{skipped} * args.shape.row_bytes, count, step,
             keys + size_t{loaded} * args.shape.key_dim);
    loaded += count;
    skipped = count * step - rows;
  }
  return loaded;
}

uint32_t QueryStep(const SampledQueries& samples) {
  return static_cast<uint32_t>(SampleGap(samples, PQCACHED_INDEX_PLUGIN_TRAIN_QUERIES));
}

// Loads every `step`-th query. Returns their number.
uint32_t LoadPluginQueries(const TrainingArgs& args, uint32_t step, float* queries) {
  const SampledQueries& samples = args.samples;
  const size_t query_bytes = args.shape.key_dim * kernels::DTypeBytes(args.shape.dtype);
  uint32_t loaded = 0;
  for (uint64_t i = 0; i < samples.count(); i += step, ++loaded) {
    kernels::ConvertElements(
        args.shape.dtype, samples.query(i, query_bytes), kernels::DType::kF32,
        reinterpret_cast<std::byte*>(queries + size_t{loaded} * args.shape.key_dim),
        args.shape.key_dim);
  }
  return loaded;
}

}  // namespace

std::string CheckDescription(const PluginDescription& description) {
  if (description.name == nullptr ||
      !IsPluginName({description.name, strnlen(description.name, kMaxPluginName + 1)})) {
    return "name: must be [a-z0-9_]{1,12}";
  }
  if (!IsText(description.text)) return "text: must have 1 to 512 bytes";
  const uint32_t count = description.parameter_count;
  if (count > kMaxPluginParameters) {
    return "parameter_count: " + std::to_string(count) + ", must be at most 4";
  }
  if (count > 0 && description.parameters == nullptr) return "parameters: must not be NULL";
  for (uint32_t i = 0; i < count; ++i) {
    if (std::string wrong = CheckPluginParameter(description, i); !wrong.empty()) return wrong;
  }
  const bool is_complete = description.codebook_bytes != nullptr &&
                           description.code_bytes != nullptr && description.train != nullptr &&
                           description.encode != nullptr && description.score != nullptr;
  if (!is_complete) return "codebook_bytes, code_bytes, train, encode and score must not be NULL";
  if (description.needs_queries != nullptr && description.train_on_queries == nullptr) {
    return "train_on_queries: must not be NULL with needs_queries";
  }
  return "";
}

PluginInfo::PluginInfo(const PluginDescription& description, std::string switched_off)
    : switched_off_(std::move(switched_off)),
      text_(switched_off_.empty()
                ? std::string(description.text)
                : "It " + switched_off_ + ", and its layers are searched exactly. " +
                      description.text) {
  for (uint32_t i = 0; i < description.parameter_count; ++i) {
    const pqcached_index_plugin_parameter& parameter = description.parameters[i];
    parameters_.push_back({.name = parameter.name,
                           .text = parameter.text,
                           .least = parameter.least,
                           .most = parameter.most,
                           .default_value = parameter.default_value});
  }
  info_ = {.kind = PluginIndexOf(description.name).kind,
           .name = description.name,
           .text = text_,
           .parameters = parameters_,
           .switched_off = switched_off_};
}

std::string PluginInfo::NameOf(const IndexDescriptor& index) const {
  std::string name(info_.name);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    name += ' ';
    name += parameters_[i].name;
    name += '=';
    name += std::to_string(PluginValueOf(index, i));
  }
  return name;
}

// A call of the plug-in that is in progress. A plug-in that throws has crashed: the process ends
// while the call counts as being in progress.
class PluginIndex::Call {
 public:
  explicit Call(const PluginIndex& index) : calls_(index.calls_) {
    calls_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Call() {
    if (std::uncaught_exceptions() > exceptions_) std::abort();
    calls_.fetch_sub(1, std::memory_order_relaxed);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  std::atomic<uint32_t>& calls_;
  const int exceptions_ = std::uncaught_exceptions();
};

uint32_t PluginIndex::ValueOf(const IndexDescriptor& index, size_t parameter) const {
  return PluginValueOf(index, parameter);
}

void PluginIndex::SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const {
  SetPluginValue(index, parameter, value);
}

Refusal PluginIndex::CheckFit(const IndexDescriptor& index, uint32_t key_dim,
                              const char* field) const {
  const PluginValues values(index);
  const pqcached_index_plugin_shape shape = values.ShapeOf(key_dim);
  const auto refuse = [&](const std::string& text) -> Refusal {
    return {StatusCode::kInvalidArgument, JoinFields(field, info().name), text};
  };
  for (size_t i = info().parameters.size(); i < kMaxPluginParameters; ++i) {
    if (values.values[i] != 0) return refuse("it has no parameter #" + std::to_string(i));
  }
  const Call call(*this);
  if (plugin_.check != nullptr) {
    if (const char* const wrong = plugin_.check(&shape); wrong != nullptr) return refuse(wrong);
  }
  const size_t codebook_bytes = plugin_.codebook_bytes(&shape);
  if (codebook_bytes > PQCACHED_INDEX_PLUGIN_CODEBOOK_BYTES) {
    return refuse("the plug-in wants codebooks of " + std::to_string(codebook_bytes) +
                  " bytes, must be at most " +
                  std::to_string(PQCACHED_INDEX_PLUGIN_CODEBOOK_BYTES));
  }
  const size_t code_bytes = plugin_.code_bytes(&shape);
  if (code_bytes > 0 && code_bytes <= PQCACHED_INDEX_PLUGIN_CODE_BYTES) return {};
  return refuse("the plug-in wants codes of " + std::to_string(code_bytes) +
                " bytes, must lie in [1, " + std::to_string(PQCACHED_INDEX_PLUGIN_CODE_BYTES) +
                "]");
}

size_t PluginIndex::HeadCodebookBytes(const IndexDescriptor& index, uint32_t key_dim) const {
  const PluginValues values(index);
  const pqcached_index_plugin_shape shape = values.ShapeOf(key_dim);
  const Call call(*this);
  return std::min<size_t>(plugin_.codebook_bytes(&shape), PQCACHED_INDEX_PLUGIN_CODEBOOK_BYTES);
}

size_t PluginIndex::TokenCodeBytes(const IndexDescriptor& index, uint32_t key_dim) const {
  const PluginValues values(index);
  const pqcached_index_plugin_shape shape = values.ShapeOf(key_dim);
  const Call call(*this);
  return std::clamp<size_t>(plugin_.code_bytes(&shape), 1, PQCACHED_INDEX_PLUGIN_CODE_BYTES);
}

void PluginIndex::Score(const HeadSearch& search, const SearchPiece& piece, float* logits,
                        size_t stride) const {
  const IndexDataHeader& data = *piece.segment->index_data;
  const CodebookHeader& codebook = *search.plan.codebooks[piece.codebook];
  const PluginValues values(search.index);
  const pqcached_index_plugin_shape shape = values.ShapeOf(search.shape.key_dim);
  const uint32_t group = search.shape.group_size();
  const uint32_t count = piece.token_count();
  {
    const Call call(*this);
    plugin_.score(&shape, HeadCodebook(codebook, search.kv_head), search.queries.data(), group,
                  CodesOf(data, search.kv_head, piece.slot_begin), count, logits, stride);
  }
  // Finite logits in any case: a token without one is the last.
  constexpr float kLeast = std::numeric_limits<float>::lowest() / 2;
  for (uint32_t head = 0; head < group; ++head) {
    float* const row = logits + head * stride;
    for (uint32_t token = 0; token < count; ++token) {
      const float scaled = row[token] * search.shape.scale;
      row[token] = std::isfinite(scaled) ? scaled : kLeast;
    }
  }
}

size_t PluginIndex::CodebookBytes(const IndexDescriptor& index, const LayerShape& shape) const {
  return ContentAligned(sizeof(CodebookHeader)) +
         ContentAligned(HeadCodebookBytes(index, shape.key_dim)) * shape.kv_heads;
}

void PluginIndex::FormatCodebook(const LayerShape& shape, CodebookHeader* header) const {
  header->centroid_offset_bytes = ContentAligned(sizeof(CodebookHeader));
  header->head_stride_bytes = ContentAligned(HeadCodebookBytes(header->index, shape.key_dim));
  header->paired_dims = plugin_.data_version;
}

bool PluginIndex::ReadsCodebook(const CodebookHeader& header, const LayerShape& shape) const {
  CodebookHeader wanted;
  wanted.index = header.index;
  FormatCodebook(shape, &wanted);
  return header.centroid_offset_bytes == wanted.centroid_offset_bytes &&
         header.head_stride_bytes == wanted.head_stride_bytes &&
         header.paired_dims == wanted.paired_dims;
}

size_t PluginIndex::CodebookContentBytes(const CodebookHeader& header) const {
  return header.kv_head_count * HeadCodebookBytes(header.index, header.key_dim);
}

size_t PluginIndex::DataBytes(const IndexDescriptor& index, const LayerShape& shape,
                              uint32_t slot_capacity) const {
  return ContentAligned(sizeof(IndexDataHeader)) +
         ContentAligned(TokenCodeBytes(index, shape.key_dim) * slot_capacity) * shape.kv_heads;
}

void PluginIndex::FormatData(const LayerShape& shape, IndexDataHeader* header) const {
  header->plane_offset_bytes = ContentAligned(sizeof(IndexDataHeader));
  header->plane_stride_bytes = TokenCodeBytes(header->index, shape.key_dim);
  header->head_stride_bytes = ContentAligned(header->plane_stride_bytes * header->slot_capacity);
}

size_t PluginIndex::ZeroedDataBytes(const IndexDescriptor& index, const LayerShape& shape,
                                    uint32_t slot_capacity) const {
  return DataBytes(index, shape, slot_capacity);
}

size_t PluginIndex::DataContentBytes(const IndexDescriptor& index, const LayerShape& shape,
                                     uint32_t, uint32_t slot_count) const {
  return size_t{shape.kv_heads} * TokenCodeBytes(index, shape.key_dim) * slot_count;
}

// Only processes that map memory of another one check it, and they have no plug-ins.
std::string PluginIndex::CheckCodebook(const CodebookHeader&, size_t, const IndexDescriptor&,
                                       const LayerShape&) const {
  return "index";
}

std::string PluginIndex::CheckData(const IndexDataHeader&, size_t, const IndexDescriptor&,
                                   const LayerShape&, uint32_t) const {
  return "index";
}

bool PluginIndex::IsTrainedOnQueries(const pqcached_index_plugin_shape& shape) const {
  if (plugin_.needs_queries == nullptr) return false;
  const Call call(*this);
  return plugin_.needs_queries(&shape) != 0;
}

bool PluginIndex::NeedsSamples(const IndexDescriptor& index, uint32_t key_dim) const {
  const PluginValues values(index);
  return IsTrainedOnQueries(values.ShapeOf(key_dim));
}

size_t PluginIndex::TrainScratchBytes(const kernels::Exec&, const TrainingArgs& args) const {
  // A sample has at most one row more of each span.
  const uint64_t queries = args.samples.count() / QueryStep(args.samples);
  const uint64_t rows =
      CountRows(args.rows) / SampleStep(args) + args.rows.size() + 1 + queries + 1;
  return rows * args.shape.key_dim * sizeof(float);
}

TrainingResult PluginIndex::Train(const kernels::Exec& exec, const TrainingArgs& args,
                                  std::span<std::byte> scratch) const {
  const PluginValues values(args.codebook->index);
  const pqcached_index_plugin_shape shape = values.ShapeOf(args.shape.key_dim);
  auto* const keys = reinterpret_cast<float*>(scratch.data());
  const uint32_t count = LoadPluginSample(exec, args, SampleStep(args), keys);
  auto* const codebook = const_cast<std::byte*>(HeadCodebook(*args.codebook, args.kv_head));
  if (IsTrainedOnQueries(shape)) {
    float* const queries = keys + size_t{count} * args.shape.key_dim;
    const uint32_t query_count = LoadPluginQueries(args, QueryStep(args.samples), queries);
    const Call call(*this);
    plugin_.train_on_queries(&shape, keys, count, queries, query_count, args.seed, codebook);
  } else {
    const Call call(*this);
    plugin_.train(&shape, keys, count, args.seed, codebook);
  }
  return {.trained_tokens = count, .iterations = args.iterations};
}

size_t PluginIndex::EncodeScratchBytes(const IndexDescriptor&, const LayerShape& shape) const {
  return size_t{kEncodedAtOnce} * shape.key_dim * sizeof(float);
}

void PluginIndex::Encode(const kernels::Exec& exec, const EncodeArgs& args,
                         std::span<std::byte> scratch) const {
  const PluginValues values(args.codebook->index);
  const pqcached_index_plugin_shape shape = values.ShapeOf(args.shape.key_dim);
  auto* const keys = reinterpret_cast<float*>(scratch.data());
  const std::byte* const codebook = HeadCodebook(*args.codebook, args.kv_head);
  for (uint32_t slot = args.slots.begin; slot < args.slots.end; slot += kEncodedAtOnce) {
    const uint32_t count = std::min(kEncodedAtOnce, args.slots.end - slot);
    LoadKeys(exec, args.shape, args.rows + size_t{slot - args.slots.begin} * args.shape.row_bytes,
             count, /*step=*/1, keys);
    const Call call(*this);
    plugin_.encode(&shape, codebook, keys, count, CodesOf(*args.data, args.kv_head, slot));
  }
}

bool PluginIndex::CopyCodes(const IndexDataHeader& from, uint32_t kv_head, uint32_t slot_count,
                            uint32_t first_slot, IndexDataHeader* to) const {
  std::memcpy(CodesOf(*to, kv_head, first_slot), CodesOf(from, kv_head, 0),
              slot_count * from.plane_stride_bytes);
  return false;
}

uint32_t SwitchedOffIndex::ValueOf(const IndexDescriptor& index, size_t parameter) const {
  return PluginValueOf(index, parameter);
}

void SwitchedOffIndex::SetValue(IndexDescriptor* index, size_t parameter, uint32_t value) const {
  SetPluginValue(index, parameter, value);
}

}  // namespace pqcached::kvstore
