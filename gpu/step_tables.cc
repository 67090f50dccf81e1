#include "gpu/step_tables.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "gpu/arena.h"
#include "kernels/base/status_macros.h"

namespace pqcached::gpu {
namespace {

using kernels::cuda::kBlockSlots;
using kernels::cuda::kChunkTokens;

Status Invalid(const std::string& message) { return {Code::kInvalid, message}; }

Status NoRoom(const char* what, size_t wanted, const char* field, uint32_t capacity) {
  return {Code::kOutOfMemory, std::string(what) + ": " + std::to_string(wanted) + ", but " + field +
                                  " is " + std::to_string(capacity)};
}

bool HasIndex(const StepsOptions& options, uint32_t layer) {
  return options.layer_kinds == nullptr || options.layer_kinds[layer] == StepLayerKind::kSelected;
}

uint32_t CodeLayerCount(const StepsOptions& options) {
  uint32_t count = 0;
  for (uint32_t layer = 0; layer < options.layer_count; ++layer) count += HasIndex(options, layer);
  return count;
}

uint32_t BlockCount(uint32_t tokens) { return (tokens + kBlockSlots - 1) / kBlockSlots; }

}  // namespace

// Places the uploaded tables first in `base`. Planes and centroids are placed elsewhere, as the
// host image has none.
size_t StepTables::PlaceTables(void* base, Image& image) const {
  Arena arena(base);
  image.layers.resize(options_.layer_count);
  arena.Place(image.seats, options_.sequence_capacity);
  arena.Place(image.full_ranges, size_t{options_.sequence_capacity} * options_.range_capacity * 2);
  arena.Place(image.own_items, options_.sequence_capacity);
  arena.Place(image.page_items, options_.sequence_capacity);
  arena.Place(image.excluded, excluded_capacity());
  const size_t lanes = lane_capacity_;
  const size_t brought = code_layer_count_ - codes_->resident_layer_count();
  arena.Place(image.code_ranges, brought * lanes * plane_count_);
  for (uint32_t i = 0; i < options_.layer_count; ++i) {
    Layer& layer = image.layers[i];
    arena.Place(layer.row_lanes, lanes);
    arena.Place(layer.spans, lanes * options_.span_capacity);
    if (!has_index(i)) continue;
    arena.Place(layer.select_lanes, lanes);
    arena.Place(layer.chunks, lanes * chunk_capacity_);
    arena.Place(layer.tasks, lanes * options_.codebook_capacity);
  }
  return arena.size_bytes();
}

LayerCodes::Options StepTables::CodesOptions(const StepsOptions& options) {
  const uint32_t planes =
      options.sequence_capacity * options.kv_heads * kernels::PlaneCount(options.geometry);
  return {.layer_count = CodeLayerCount(options),
          .layer_capacity_bytes = planes * kernels::PlaneStride(options.token_capacity),
          .codes_bytes = options.codes_bytes,
          .range_capacity = options.codes_bytes == 0 ? 1 : planes};
}

Status StepTables::Create(const StepsOptions& options, const LayerCodes& codes,
                          const float* lane_queries) {
  options_ = options;
  for (uint32_t layer = 0; layer < options.layer_count; ++layer) {
    code_layers_.push_back(HasIndex(options, layer) ? code_layer_count_++ : kNoIndex);
  }
  options_.layer_kinds = nullptr;  // the caller's memory
  options_.layer_windows = nullptr;
  codes_ = &codes;
  lane_queries_ = lane_queries;
  lane_capacity_ = options.sequence_capacity * options.kv_heads;
  chunk_capacity_ = (options.token_capacity + kChunkTokens - 1) / kChunkTokens +
                    options.codebook_capacity + options.range_capacity;
  plane_count_ = kernels::PlaneCount(options.geometry);
  plane_stride_ = kernels::PlaneStride(options.token_capacity);
  codebook_floats_ = kernels::CentroidFloats(options.geometry);
  upload_bytes_ = PlaceTables(nullptr, host_);
  const size_t lanes = lane_capacity_;
  const auto place_centroids = [&](Arena& arena) {
    std::byte* tables = nullptr;
    arena.Place(tables, upload_bytes_);
    for (uint32_t layer = 0; layer < options.layer_count; ++layer) {
      if (!has_index(layer)) continue;
      arena.Place(device_.layers[layer].centroids,
                  lanes * options.codebook_capacity * codebook_floats_);
    }
  };
  device_.layers.resize(options.layer_count);
  Arena sizes;
  place_centroids(sizes);
  RETURN_IF_ERROR(memory_.Allocate(sizes.size_bytes()));
  RETURN_IF_ERROR(pinned_.Allocate(upload_bytes_));
  RETURN_IF_ERROR(uploaded_.Create());
  PlaceTables(memory_.data(), device_);
  Arena centroids(memory_.data());
  place_centroids(centroids);
  for (uint32_t layer = 0; layer < options.layer_count; ++layer) {
    if (!has_index(layer)) continue;
    device_.layers[layer].planes = reinterpret_cast<uint8_t*>(codes.Memory(code_layer(layer)));
  }
  if (const size_t brought = code_layer_count_ - codes.resident_layer_count(); brought > 0) {
    RETURN_IF_ERROR(host_codes_.Allocate(brought * lanes * plane_count_ * plane_stride_));
  }
  PlaceTables(pinned_.data(), host_);
  std::memset(pinned_.data(), 0, pinned_.size_bytes());
  seats_.resize(options.sequence_capacity);
  item_seats_.reserve(options.sequence_capacity);
  described_.resize(size_t{options.layer_count} * options.sequence_capacity);
  for (Described& one : described_) {
    one.spans.reserve(options.span_capacity);
    one.codebooks.reserve(options.codebook_capacity);
  }
  return {};
}

void StepTables::InvalidateAll() {
  for (Seat& seat : seats_) seat = {};
  for (Described& one : described_) {
    one.tokens = one.coded = 0;
    one.spans.clear();
    one.codebooks.clear();
  }
}

// Assigns seats: a known sequence keeps its seat, and a new one takes the seat that was unused for
// the longest time.
Status StepTables::FindSeats(const StepBatch& batch) {
  if (batch.count > options_.sequence_capacity) {
    return Invalid("items: " + std::to_string(batch.count) + ", but sequence_capacity is " +
                   std::to_string(options_.sequence_capacity));
  }
  item_seats_.assign(batch.count, kernels::cuda::kEmptySeat);
  for (uint32_t item = 0; item < batch.count; ++item) {
    for (uint32_t seat = 0; seat < seats_.size(); ++seat) {
      if (seats_[seat].sequence != batch.sequences[item].sequence) continue;
      item_seats_[item] = seat;
      seats_[seat].last_step = step_;
    }
  }
  for (uint32_t item = 0; item < batch.count; ++item) {
    if (item_seats_[item] != kernels::cuda::kEmptySeat) continue;
    const auto oldest =
        std::min_element(seats_.begin(), seats_.end(),
                         [](const Seat& a, const Seat& b) { return a.last_step < b.last_step; });
    *oldest = {batch.sequences[item].sequence, step_};
    item_seats_[item] = static_cast<uint32_t>(oldest - seats_.begin());
  }
  return {};
}

void StepTables::EmptySeats() {
  std::fill_n(host_.seats, options_.sequence_capacity, kernels::cuda::SeatItem{});
  std::fill_n(host_.full_ranges, size_t{options_.sequence_capacity} * options_.range_capacity * 2,
              uint64_t{0});
  const size_t brought = code_layer_count_ - codes_->resident_layer_count();
  std::fill_n(host_.code_ranges, brought * lane_capacity_ * plane_count_,
              kernels::cuda::ByteRange{});
  for (uint32_t i = 0; i < options_.layer_count; ++i) {
    if (!has_index(i)) continue;
    Layer& layer = host_.layers[i];
    for (uint32_t lane = 0; lane < lane_capacity_; ++lane) {
      const uint32_t first_chunk = lane * chunk_capacity_;
      const uint32_t first_table = lane * options_.codebook_capacity;
      layer.select_lanes[lane] = {.chunk_begin = first_chunk,
                                  .chunk_end = first_chunk,
                                  .table_begin = first_table,
                                  .table_end = first_table,
                                  .k = 0};
      for (uint32_t chunk = 0; chunk < chunk_capacity_; ++chunk) {
        layer.chunks[first_chunk + chunk].lane = kernels::cuda::kNoLane;
      }
      for (uint32_t table = 0; table < options_.codebook_capacity; ++table) {
        layer.tasks[first_table + table].queries = nullptr;
      }
    }
  }
}

Status StepTables::Update(const StepBatch& batch, const Rows& rows, kernels::cuda::Stream stream) {
  ++step_;
  previous_seats_ = seats_;
  RETURN_IF_ERROR(FindSeats(batch));
  // The upload of the previous step may still read the host image that is overwritten now.
  RETURN_IF_ERROR(uploaded_.Wait());
  EmptySeats();
  RETURN_IF_ERROR(WriteExcluded(batch));
  for (uint32_t item = 0; item < batch.count; ++item) {
    const uint64_t previous = previous_seats_[item_seats_[item]].sequence;
    const bool is_new = previous != batch.sequences[item].sequence;
    if (Status status = DescribeItem(batch, item, is_new, rows, stream); !status.ok()) {
      for (const uint32_t taken : item_seats_) seats_[taken] = {};  // forget the descriptions
      return {status.code(), "items[" + std::to_string(item) + "]: " + status.message()};
    }
  }
  const cudaError_t error = cudaMemcpyAsync(memory_.data(), pinned_.data(), upload_bytes_,
                                            cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) return FromCuda(error, "copying the tables of a step");
  return uploaded_.Record(stream);
}

// Writes what the tables have of one item, and describes its layers.
Status StepTables::DescribeItem(const StepBatch& batch, uint32_t item, bool is_new,
                                const Rows& rows, kernels::cuda::Stream stream) {
  const StepSequence& sequence = batch.sequences[item];
  const uint32_t seat = item_seats_[item];
  host_.seats[seat] = {
      .item = item, .query_begin = sequence.query_begin, .row_end = sequence.row_end};
  RETURN_IF_ERROR(WriteFullRanges(sequence, item));
  RETURN_IF_ERROR(WriteOwn(batch, item));
  RETURN_IF_ERROR(WritePageItem(sequence, item));
  const uint32_t stored_end = batch.decodes ? sequence.own.stored_end : 0;
  for (uint32_t layer = 0; layer < options_.layer_count; ++layer) {
    const Place place{.from = batch.layers[size_t{item} * options_.layer_count + layer],
                      .row_end = std::max(sequence.row_end, stored_end),
                      .seat = seat,
                      .layer = layer,
                      .query_length = batch.selects_per_token ? 1 : batch.query_length,
                      .selects = batch.selects && has_index(layer),
                      .rows = rows,
                      .stream = stream};
    RETURN_IF_ERROR(Describe(place, is_new ? 0 : sequence.unchanged_tokens));
  }
  return {};
}

Status StepTables::WriteExcluded(const StepBatch& batch) {
  std::fill_n(host_.excluded, excluded_capacity(), kernels::cuda::OwnRange{});
  if (batch.excluded_count > excluded_capacity()) {
    return NoRoom("excluded ranges", batch.excluded_count, "their room", excluded_capacity());
  }
  for (uint32_t i = 0; i < batch.excluded_count; ++i) {
    host_.excluded[i] = {batch.excluded[i].begin, batch.excluded[i].end};
  }
  return {};
}

// Writes the sink and the window of an item of a step that decodes.
Status StepTables::WriteOwn(const StepBatch& batch, uint32_t item) {
  if (!batch.decodes) return {};
  const StepOwn& own = batch.sequences[item].own;
  const bool is_ordered = own.sink_end <= own.window_begin &&
                          own.window_begin <= own.query_position &&
                          own.stored_end <= own.query_position;
  if (!is_ordered) return Invalid("sink and window are not in order");
  const uint64_t tokens =
      uint64_t{own.sink_end} + own.query_position - own.window_begin + batch.query_length;
  if (tokens > options_.selected_capacity) {
    return Invalid("sink and window have " + std::to_string(tokens) +
                   " tokens, but selected_capacity is " +
                   std::to_string(options_.selected_capacity));
  }
  if (own.query_position - own.stored_end > kRecentCapacity) {
    return Invalid(std::to_string(own.query_position - own.stored_end) +
                   " tokens are not stored, must be at most " + std::to_string(kRecentCapacity));
  }
  host_.own_items[item_seats_[item]] = {.query_position = own.query_position,
                                        .stored_end = own.stored_end,
                                        .sink_end = own.sink_end,
                                        .window_begin = own.window_begin};
  return {};
}

// Writes the sink and the window by which pages are listed.
Status StepTables::WritePageItem(const StepSequence& sequence, uint32_t item) {
  if (sequence.sink_end > sequence.window.begin || sequence.window.begin > sequence.window.end) {
    return Invalid("sink and window for pages are not in order");
  }
  host_.page_items[item_seats_[item]] = {.sink_end = sequence.sink_end,
                                         .window_begin = sequence.window.begin,
                                         .window_end = sequence.window.end};
  return {};
}

// Writes the candidates of an item in layers of kind full.
Status StepTables::WriteFullRanges(const StepSequence& sequence, uint32_t item) {
  if (sequence.candidate_count > options_.range_capacity) {
    return NoRoom("candidate ranges", sequence.candidate_count, "range_capacity",
                  options_.range_capacity);
  }
  uint64_t* const ranges = host_.full_ranges + size_t{item} * options_.range_capacity * 2;
  for (uint32_t i = 0; i < sequence.candidate_count; ++i) {
    const StepRange& range = sequence.candidates[i];
    if (range.end > sequence.row_end) {
      return Invalid("candidates end at " + std::to_string(range.end) + ", but the step reads " +
                     std::to_string(sequence.row_end) + " tokens");
    }
    ranges[2 * i] = range.begin;
    ranges[2 * i + 1] = range.end;
  }
  return {};
}

Status StepTables::CheckLayer(const Place& place) const {
  const StepLayer& from = place.from;
  if (from.candidate_count > options_.range_capacity) {
    return NoRoom("candidate ranges", from.candidate_count, "range_capacity",
                  options_.range_capacity);
  }
  if (from.select_count > options_.selected_capacity) {
    return Invalid("k is " + std::to_string(from.select_count) + ", but selected_capacity is " +
                   std::to_string(options_.selected_capacity));
  }
  if (place.row_end > options_.token_capacity) {
    return Invalid("the step reads " + std::to_string(place.row_end) +
                   " tokens, but token_capacity is " + std::to_string(options_.token_capacity));
  }
  if (place.row_end > from.row_tokens) {
    return Invalid("the step reads " + std::to_string(place.row_end) + " tokens, but only " +
                   std::to_string(from.row_tokens) + " are stored");
  }
  if (from.candidate_count == 0) return {};
  const uint32_t end = from.candidates[from.candidate_count - 1].end;
  if (end > place.row_end) {
    return Invalid("candidates end at " + std::to_string(end) + ", but the step reads " +
                   std::to_string(place.row_end) + " tokens");
  }
  if (end <= from.coded_tokens) return {};
  return Invalid("candidates end at " + std::to_string(end) + ", but only " +
                 std::to_string(from.coded_tokens) + " tokens are coded");
}

Status StepTables::Describe(const Place& place, uint32_t unchanged_tokens) {
  RETURN_IF_ERROR(CheckLayer(place));
  Described& described = this->described(place.layer, place.seat);
  uint32_t stable_rows = std::min(unchanged_tokens, described.tokens);
  uint32_t stable_codes = described.coded;
  for (size_t i = 0; i < described.spans.size(); ++i) {
    const Span& span = described.spans[i];
    const bool is_last = i + 1 == described.spans.size();
    const StepSegment* segment = i < place.from.segment_count ? &place.from.segments[i] : nullptr;
    if (segment == nullptr || segment->first_position != span.first_position ||
        segment->rows[0] != span.rows || (!is_last && segment->token_count != span.token_count)) {
      stable_rows = std::min(stable_rows, span.first_position);
      break;
    }
    if (!place.selects || span.first_position >= described.coded) continue;
    if (segment->planes != span.planes || segment->centroids != span.codebook.centroids ||
        segment->codebook_generation != span.codebook.codebook_generation) {
      stable_codes = std::min(stable_codes, span.first_position);
    }
  }
  if (stable_rows < described.tokens || unchanged_tokens == 0) {
    RETURN_IF_ERROR(InvalidateRows(place, described, stable_rows));
  }
  described.coded = std::min(stable_codes, stable_rows);
  while (!described.codebooks.empty() &&
         described.codebooks.back().first_position >= described.coded) {
    described.codebooks.pop_back();
  }
  if (place.row_end > described.tokens) {
    RETURN_IF_ERROR(ExtendRows(place, described));
  }
  if (place.from.candidate_count == 0) return {};
  if (place.from.candidates[place.from.candidate_count - 1].end > described.coded) {
    RETURN_IF_ERROR(ExtendCodes(place, described));
  }
  WriteCodeRanges(place);
  return WriteChunks(place, described);
}

Status StepTables::InvalidateRows(const Place& place, Described& described, uint32_t position) {
  uint32_t first_block = 0;
  while (!described.spans.empty() && described.spans.back().first_position >= position) {
    described.spans.pop_back();
  }
  if (!described.spans.empty()) {
    Span& last = described.spans.back();
    last.token_count = std::min(last.token_count, position - last.first_position);
    first_block = last.first_block + last.token_count / kBlockSlots;
  }
  described.tokens = position;
  WriteRowLanes(place, described);
  const uint32_t first_lane = place.seat * options_.kv_heads;
  if (place.rows.caches == nullptr) return {};
  return place.rows.caches[place.layer].InvalidateRange(
      place.stream, first_lane, first_lane + options_.kv_heads, first_block);
}

// Describes all stored rows, more than this step needs, so that the following steps need no update.
Status StepTables::ExtendRows(const Place& place, Described& described) {
  const uint32_t target = std::min(place.from.row_tokens, options_.token_capacity);
  size_t index = described.spans.empty() ? 0 : described.spans.size() - 1;
  uint32_t first_block = described.spans.empty() ? 0 : described.spans.back().first_block;
  for (; index < place.from.segment_count; ++index) {
    const StepSegment& segment = place.from.segments[index];
    if (segment.first_position >= target) break;
    if (index >= options_.span_capacity) {
      return NoRoom("segments", place.from.segment_count, "segment_capacity",
                    options_.span_capacity);
    }
    const uint32_t end = std::min(segment.first_position + segment.token_count, target);
    if (index == described.spans.size()) described.spans.emplace_back();
    Span& span = described.spans[index];
    span.rows = segment.rows[0];
    span.first_position = segment.first_position;
    span.token_count = end - segment.first_position;
    span.first_block = first_block;
    first_block += BlockCount(span.token_count);
    WriteSpan(place, segment, span, index);
  }
  WriteRowLanes(place, described);
  described.tokens = target;
  return {};
}

// Copies all codes that there are, as ExtendRows describes all rows.
Status StepTables::ExtendCodes(const Place& place, Described& described) {
  const uint32_t target = std::min(place.from.coded_tokens, described.tokens);
  for (size_t index = 0; index < described.spans.size(); ++index) {
    Span& span = described.spans[index];
    const uint32_t begin = std::max(span.first_position, described.coded);
    const uint32_t end = std::min(span.first_position + span.token_count, target);
    if (begin >= end) continue;
    const StepSegment& segment = place.from.segments[index];
    span.planes = segment.planes;
    span.codebook = {segment.centroids, segment.codebook_generation, span.first_position,
                     segment.paired_dims};
    if (described.codebooks.empty() || described.codebooks.back().centroids != segment.centroids ||
        described.codebooks.back().codebook_generation != segment.codebook_generation) {
      if (described.codebooks.size() >= options_.codebook_capacity) {
        return NoRoom("codebooks", described.codebooks.size() + 1, "codebook_capacity",
                      options_.codebook_capacity);
      }
      described.codebooks.push_back(span.codebook);
      RETURN_IF_ERROR(CopyCentroids(place, segment, described.codebooks.size() - 1));
    }
    RETURN_IF_ERROR(CopyCodes(place, segment, begin, end));
  }
  described.coded = target;
  return {};
}

// Writes the span range of each lane and the length of its last span. The block caches admit
// complete blocks only, so the length of a span cut by a roll-back must be exact.
void StepTables::WriteRowLanes(const Place& place, const Described& described) {
  Layer& host = host_.layers[place.layer];
  const auto count = static_cast<uint32_t>(described.spans.size());
  for (uint32_t head = 0; head < options_.kv_heads; ++head) {
    const uint32_t lane = place.seat * options_.kv_heads + head;
    const uint32_t first = lane * options_.span_capacity;
    host.row_lanes[lane] = {.span_begin = first, .span_end = first + count};
    if (count > 0) host.spans[first + count - 1].token_count = described.spans.back().token_count;
  }
}

Status StepTables::CopyCodes(const Place& place, const StepSegment& segment, uint32_t begin,
                             uint32_t end) {
  const uint32_t first_slot = begin - segment.first_position;
  for (uint32_t head = 0; head < options_.kv_heads; ++head) {
    const size_t lane = size_t{place.seat} * options_.kv_heads + head;
    const uint8_t* const from = segment.planes + head * segment.planes_head_stride + first_slot;
    if (!codes_->IsResident(code_layer(place.layer))) {
      std::byte* const target = HostCodes(place.layer, lane) + begin;
      for (uint32_t plane = 0; plane < plane_count_; ++plane) {
        std::memcpy(target + plane * plane_stride_, from + plane * segment.plane_stride,
                    end - begin);
      }
      continue;
    }
    uint8_t* const target =
        device_.layers[place.layer].planes + lane * plane_count_ * plane_stride_ + begin;
    const cudaError_t error =
        cudaMemcpy2DAsync(target, plane_stride_, from, segment.plane_stride, end - begin,
                          plane_count_, cudaMemcpyHostToDevice, place.stream);
    if (error != cudaSuccess) return FromCuda(error, "copying codes to the device");
  }
  return {};
}

std::byte* StepTables::HostCodes(uint32_t layer, size_t lane) const {
  const size_t lanes =
      size_t{code_layer(layer) - codes_->resident_layer_count()} * lane_capacity_ + lane;
  return static_cast<std::byte*>(host_codes_.data()) + lanes * plane_count_ * plane_stride_;
}

// Writes the ranges of the planes that the step reads. Each starts at the beginning of its plane,
// so that its addresses stay aligned.
void StepTables::WriteCodeRanges(const Place& place) {
  const uint32_t code_layer = this->code_layer(place.layer);
  if (codes_->IsResident(code_layer)) return;
  const uint32_t end = place.from.candidates[place.from.candidate_count - 1].end;
  for (uint32_t head = 0; head < options_.kv_heads; ++head) {
    const size_t lane = size_t{place.seat} * options_.kv_heads + head;
    const size_t lanes =
        size_t{code_layer - codes_->resident_layer_count()} * lane_capacity_ + lane;
    const std::byte* const from = HostCodes(place.layer, lane);
    std::byte* const to = codes_->Memory(code_layer) + lane * plane_count_ * plane_stride_;
    for (uint32_t plane = 0; plane < plane_count_; ++plane) {
      host_.code_ranges[lanes * plane_count_ + plane] = {.from = from + plane * plane_stride_,
                                                         .to = to + plane * plane_stride_,
                                                         .size_bytes = end};
    }
  }
}

Status StepTables::CopyCentroids(const Place& place, const StepSegment& segment, size_t codebook) {
  const size_t bytes = codebook_floats_ * sizeof(float);
  const uint32_t lane = place.seat * options_.kv_heads;
  float* const target = device_.layers[place.layer].centroids +
                        (size_t{lane} * options_.codebook_capacity + codebook) * codebook_floats_;
  return FromCuda(cudaMemcpy2DAsync(target, options_.codebook_capacity * bytes, segment.centroids,
                                    segment.centroids_head_stride, bytes, options_.kv_heads,
                                    cudaMemcpyHostToDevice, place.stream),
                  "copying a codebook to the device");
}

// Writes one span per kv head. The host copies rows that cannot be page-locked or that are not
// contiguous on the device.
void StepTables::WriteSpan(const Place& place, const StepSegment& segment, const Span& span,
                           size_t index) {
  const size_t row_bytes =
      (size_t{options_.key_dim} + options_.value_dim) * kernels::DTypeBytes(options_.dtype);
  const size_t bytes = span.token_count * row_bytes;
  PageLock& page_lock = *place.rows.page_lock;
  for (uint32_t head = 0; head < options_.kv_heads; ++head) {
    const auto offset = static_cast<size_t>(segment.rows[head] - place.rows.pool);
    const std::byte* rows = nullptr;
    if (page_lock.Lock(offset, bytes).ok()) {
      rows = page_lock.DeviceAddress(offset);
      if (page_lock.DeviceAddress(offset + bytes - 1) != rows + bytes - 1) rows = nullptr;
    }
    const bool host_only = rows == nullptr;
    has_host_only_rows_ = has_host_only_rows_ || host_only;
    const size_t lane = size_t{place.seat} * options_.kv_heads + head;
    host_.layers[place.layer].spans[lane * options_.span_capacity + index] = {
        .rows = host_only ? segment.rows[head] : rows,
        .token_count = span.token_count,
        .first_position = span.first_position,
        .first_block = span.first_block,
        .host_only = host_only ? 1u : 0u};
  }
}

// Cuts the candidates at codebook boundaries and at multiples of kChunkTokens. Slots of these
// planes are positions.
Status StepTables::WriteChunks(const Place& place, const Described& described) {
  Layer& host = host_.layers[place.layer];
  const Layer& device = device_.layers[place.layer];
  const size_t lane_floats = size_t{place.query_length} * options_.group_size * options_.key_dim;
  for (uint32_t head = 0; head < options_.kv_heads; ++head) {
    const uint32_t lane = place.seat * options_.kv_heads + head;
    const uint32_t first_table = lane * options_.codebook_capacity;
    const uint32_t first_chunk = lane * chunk_capacity_;
    uint32_t next = first_chunk;
    size_t codebook = 0;
    for (uint32_t r = 0; r < place.from.candidate_count; ++r) {
      const StepRange range = place.from.candidates[r];
      for (uint32_t begin = range.begin; begin < range.end;) {
        uint32_t end = std::min(range.end, (begin / kChunkTokens + 1) * kChunkTokens);
        while (codebook + 1 < described.codebooks.size() &&
               described.codebooks[codebook + 1].first_position <= begin) {
          ++codebook;
        }
        if (codebook + 1 < described.codebooks.size()) {
          end = std::min(end, described.codebooks[codebook + 1].first_position);
        }
        if (next == first_chunk + chunk_capacity_) {
          return NoRoom("chunks", chunk_capacity_ + size_t{1}, "their room", chunk_capacity_);
        }
        host.chunks[next++] = {
            .planes = device.planes + size_t{lane} * plane_count_ * plane_stride_,
            .stride = plane_stride_,
            .slot_begin = begin,
            .slot_end = end,
            .first_position = 0,
            .table = first_table + static_cast<uint32_t>(codebook),
            .lane = lane};
        begin = end;
      }
    }
    const auto table_count = static_cast<uint32_t>(described.codebooks.size());
    for (uint32_t i = 0; i < table_count; ++i) {
      host.tasks[first_table + i] = {
          .queries = lane_queries_ + lane * lane_floats,
          .centroids = device.centroids + size_t{first_table + i} * codebook_floats_,
          .paired_dims = described.codebooks[i].paired_dims};
    }
    host.select_lanes[lane] = {.chunk_begin = first_chunk,
                               .chunk_end = next,
                               .table_begin = first_table,
                               .table_end = first_table + table_count,
                               .k = place.from.select_count};
  }
  return {};
}

}  // namespace pqcached::gpu
