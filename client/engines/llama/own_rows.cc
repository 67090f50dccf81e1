#include "client/engines/llama/own_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/base/row_span.h"

namespace pqcached::llama {
namespace {

using kernels::Partial;

// A piece has at most kLongestPiece cells: the rows of all kv heads then lie in few enough pages
// for the processor's table of translations. Shorter ones share the work of short contexts.
constexpr uint32_t kLongestPiece = 512;
constexpr uint32_t kShortestPiece = 64;
constexpr uint32_t kPiecesPerThread = 4;

constexpr size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

bool OwnRows::Prepare(const Attention& attention, std::span<const uint64_t* const> hidden) {
  attention_ = attention;
  seen_cells_ = 0;
  if (runs_.size() < attention.streams) runs_.resize(attention.streams);
  for (uint32_t stream = 0; stream < attention.streams; ++stream) {
    const auto own = hidden.empty()
                         ? hidden
                         : hidden.subspan(size_t{stream} * attention.tokens, attention.tokens);
    if (!ReadMask(attention, stream, own, &runs_[stream])) return false;
    for (const CellRun& run : runs_[stream]) seen_cells_ += run.end - run.begin;
  }
  return true;
}

void OwnRows::Compute(const Crew& crew, std::span<const Partial> others) {
  CutIntoPieces(crew.threads);
  Reserve(crew.threads);
  LoadQueries();
  next_piece_.store(0, std::memory_order_relaxed);
  crew.run(
      crew.crew, [](void* self, uint32_t thread) { static_cast<OwnRows*>(self)->Work(thread); },
      this);
  Merge(crew.threads, others);
}

kernels::AttendShape OwnRows::Shape(uint32_t token_count) const {
  const auto* const k = static_cast<const std::byte*>(attention_.node->src[1]->data);
  const auto* const v = static_cast<const std::byte*>(attention_.node->src[2]->data);
  return {.dtype = attention_.dtype,
          .key_dim = attention_.key_dim,
          .value_dim = attention_.value_dim,
          .row_stride_bytes = attention_.cell_bytes,
          .group_size = attention_.group_size,
          .query_length = token_count,
          .value_offset_bytes = v - k};
}

void OwnRows::CutIntoPieces(uint32_t threads) {
  pieces_.clear();
  const uint64_t even = seen_cells_ / (uint64_t{threads} * kPiecesPerThread) + 1;
  const auto longest =
      static_cast<uint32_t>(std::clamp<uint64_t>(even, kShortestPiece, kLongestPiece));
  for (uint32_t stream = 0; stream < attention_.streams; ++stream) {
    for (const CellRun& run : runs_[stream]) AddPieces(stream, run, longest);
  }
}

void OwnRows::AddPieces(uint32_t stream, const CellRun& run, uint32_t longest) {
  for (uint32_t begin = run.begin; begin < run.end; begin += longest) {
    const uint32_t end = std::min(run.end, begin + longest);
    for (uint64_t left = run.seen_by; left != 0;) {
      uint64_t some = 0;
      for (uint32_t i = 0; i < kernels::kMaxAttendQueryLength && left != 0; ++i) {
        some |= left & -left;
        left &= left - 1;
      }
      pieces_.push_back({stream, begin, end, some});
    }
  }
}

void OwnRows::Reserve(uint32_t threads) {
  const size_t piece_heads = size_t{kernels::kMaxAttendQueryLength} * attention_.group_size;
  const size_t sums = rows() * heads();
  own_bytes_ = Aligned(piece_heads * attention_.key_dim * sizeof(float)) +
               Aligned(piece_heads * attention_.value_dim * sizeof(float)) +
               Aligned(piece_heads * sizeof(float)) +
               Aligned(sums * attention_.value_dim * sizeof(float)) +
               Aligned(sums * sizeof(float)) +
               Aligned(kernels::AttendScratchBytes(Shape(kernels::kMaxAttendQueryLength)));
  if (memory_bytes_ < own_bytes_ * threads + 64) {
    memory_bytes_ = own_bytes_ * threads + 64;
    memory_.reset(new std::byte[memory_bytes_]);
  }
  queries_.resize(std::max(queries_.size(), sums * attention_.key_dim));
  zeros_.resize(std::max(zeros_.size(), size_t{heads()} * attention_.value_dim));
}

OwnRows::Own OwnRows::OwnOf(uint32_t thread) const {
  const size_t piece_heads = size_t{kernels::kMaxAttendQueryLength} * attention_.group_size;
  const size_t sums = rows() * heads();
  void* memory = memory_.get();
  size_t space = memory_bytes_;
  auto* next = static_cast<std::byte*>(std::align(64, 1, memory, space)) + thread * own_bytes_;
  const auto take = [&next](size_t floats) {
    auto* taken = reinterpret_cast<float*>(next);
    next += Aligned(floats * sizeof(float));
    return taken;
  };
  Own own;
  own.queries = take(piece_heads * attention_.key_dim);
  own.output = take(piece_heads * attention_.value_dim);
  own.lse = take(piece_heads);
  own.sums = take(sums * attention_.value_dim);
  own.sum_lse = take(sums);
  own.scratch = next;
  return own;
}

void OwnRows::LoadQueries() {
  float* to = queries_.data();
  for (uint32_t stream = 0; stream < attention_.streams; ++stream) {
    for (uint32_t kv_head = 0; kv_head < attention_.kv_heads; ++kv_head) {
      for (uint32_t token = 0; token < attention_.tokens; ++token) {
        for (uint32_t g = 0; g < attention_.group_size; ++g, to += attention_.key_dim) {
          LoadQuery(attention_, stream, token, kv_head * attention_.group_size + g, to);
        }
      }
    }
  }
}

void OwnRows::Work(uint32_t thread) {
  const Own own = OwnOf(thread);
  std::fill_n(own.sum_lse, rows() * heads(), -std::numeric_limits<float>::infinity());
  for (;;) {
    const size_t i = next_piece_.fetch_add(1, std::memory_order_relaxed);
    if (i >= pieces_.size()) return;
    AttendPiece(pieces_[i], own);
  }
}

std::span<const float> OwnRows::QueriesOf(const Piece& piece, uint32_t kv_head,
                                          const Own& own) const {
  const auto count = static_cast<uint32_t>(std::popcount(piece.seen_by));
  const auto first = static_cast<uint32_t>(std::countr_zero(piece.seen_by));
  const size_t token_floats = size_t{attention_.group_size} * attention_.key_dim;
  const float* const of_head =
      queries_.data() +
      (size_t{piece.stream} * attention_.kv_heads + kv_head) * attention_.tokens * token_floats;
  if (piece.seen_by >> first == (uint64_t{1} << count) - 1) {
    return {of_head + first * token_floats, count * token_floats};
  }
  float* to = own.queries;
  for (uint64_t left = piece.seen_by; left != 0; left &= left - 1) {
    const auto token = static_cast<uint32_t>(std::countr_zero(left));
    to = std::copy_n(of_head + token * token_floats, token_floats, to);
  }
  return {own.queries, count * token_floats};
}

void OwnRows::AttendPiece(const Piece& piece, const Own& own) const {
  const GgmlTensor& k = *attention_.node->src[1];
  const auto count = static_cast<uint32_t>(std::popcount(piece.seen_by));
  const uint32_t group = attention_.group_size;
  const uint32_t dim = attention_.value_dim;
  kernels::AttendShape shape = Shape(count);
  const GgmlTensor& v = *attention_.node->src[2];
  shape.value_offset_bytes += static_cast<ptrdiff_t>(piece.stream * (v.nb[3] - k.nb[3]));
  for (uint32_t kv_head = 0; kv_head < attention_.kv_heads; ++kv_head) {
    const kernels::RowSpan span{static_cast<const std::byte*>(k.data) + piece.begin * k.nb[1] +
                                    kv_head * k.nb[2] + piece.stream * k.nb[3],
                                piece.end - piece.begin, 0};
    kernels::AttendShape head_shape = shape;
    head_shape.value_offset_bytes += static_cast<ptrdiff_t>(kv_head * (v.nb[2] - k.nb[2]));
    kernels::AttendAllRows(exec_, {.shape = head_shape,
                                   .scale = attention_.scale,
                                   .softcap = attention_.softcap,
                                   .queries = QueriesOf(piece, kv_head, own),
                                   .spans = {&span, 1},
                                   .positions = {},
                                   .output = {own.output, size_t{count} * group * dim},
                                   .lse = {own.lse, size_t{count} * group},
                                   .scratch = {own.scratch, kernels::AttendScratchBytes(shape)}});
    uint32_t ordinal = 0;
    for (uint64_t left = piece.seen_by; left != 0; left &= left - 1, ++ordinal) {
      const auto token = static_cast<uint32_t>(std::countr_zero(left));
      const size_t at =
          (size_t{piece.stream} * attention_.tokens + token) * heads() + kv_head * group;
      const Partial parts[] = {
          {own.sums + at * dim, own.sum_lse + at},
          {own.output + size_t{ordinal} * group * dim, own.lse + size_t{ordinal} * group}};
      kernels::MergePartials(exec_, {.query_count = group,
                                     .value_dim = dim,
                                     .partials = parts,
                                     .output = {own.sums + at * dim, size_t{group} * dim},
                                     .lse = {own.sum_lse + at, group}});
    }
  }
}

// Merges the threads' results with the other partial attentions, and with the learned sinks of
// models that have them.
void OwnRows::Merge(uint32_t threads, std::span<const Partial> others) {
  const GgmlTensor& node = *attention_.node;
  const GgmlTensor* sinks = node.src[4];
  const uint32_t dim = attention_.value_dim;
  lse_.resize(heads());
  for (size_t row = 0; row < rows(); ++row) {
    parts_.clear();
    for (uint32_t thread = 0; thread < threads; ++thread) {
      const Own own = OwnOf(thread);
      parts_.push_back({own.sums + row * heads() * dim, own.sum_lse + row * heads()});
    }
    if (!others.empty() && others[row].output != nullptr) parts_.push_back(others[row]);
    if (sinks != nullptr) parts_.push_back({zeros_.data(), static_cast<const float*>(sinks->data)});
    const size_t token = attention_.first_token + row % attention_.tokens,
                 stream = row / attention_.tokens;
    auto* const output = reinterpret_cast<float*>(static_cast<std::byte*>(node.data) +
                                                  token * node.nb[2] + stream * node.nb[3]);
    kernels::MergePartials(exec_, {.query_count = heads(),
                                   .value_dim = dim,
                                   .partials = parts_,
                                   .output = {output, size_t{heads()} * dim},
                                   .lse = lse_});
  }
}

}  // namespace pqcached::llama
