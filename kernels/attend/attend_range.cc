#include "kernels/attend/attend_range.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/attend/attend.h"
#include "kernels/attend/attend_range_internal.h"
#include "kernels/base/check.h"

namespace pqcached::kernels {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Up to this many heads, streaming the rows is faster than multiplying tiles, which converts every
// row to the layout of the products.
constexpr uint32_t kMaxStreamHeads = 20;

uint32_t HeadCount(const AttendRangeShape& shape) { return shape.token_count * shape.group_size; }

AttendShape StreamShape(const AttendRangeShape& shape) {
  return {.dtype = shape.dtype,
          .key_dim = shape.key_dim,
          .value_dim = shape.value_dim,
          .row_stride_bytes = shape.row_stride_bytes,
          .group_size = HeadCount(shape),
          .query_length = 1};
}

bool SeenByAll(const AttendRangeArgs& args) {
  for (const RowSpan& span : args.spans) {
    if (span.token_count == 0) continue;
    if (span.first_position + (span.token_count - 1) > args.query_position) return false;
  }
  return true;
}

double Logit(const AttendRangeArgs& args, const float* query, const std::byte* row) {
  double sum = 0.0;
  for (uint32_t i = 0; i < args.shape.key_dim; ++i) {
    sum +=
        static_cast<double>(query[i]) * static_cast<double>(LoadElement(args.shape.dtype, row, i));
  }
  double logit = sum * static_cast<double>(args.scale);
  if (args.softcap > 0.0f) {
    const double cap = static_cast<double>(args.softcap);
    logit = cap * std::tanh(logit / cap);
  }
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  return logit < -largest ? kMinusInfinity : std::min(logit, largest);
}

// Calls visit(logit, row) for each row that a head sees.
template <typename Visit>
void ForEachSeen(const AttendRangeArgs& args, uint32_t head, Visit visit) {
  const uint32_t last = args.query_position + head / args.shape.group_size;
  const float* query = args.queries.data() + size_t{head} * args.shape.key_dim;
  for (const RowSpan& span : args.spans) {
    for (uint32_t i = 0; i < span.token_count && span.first_position + i <= last; ++i) {
      const std::byte* row = span.rows + i * args.shape.row_stride_bytes;
      visit(Logit(args, query, row), row);
    }
  }
}

// The specification: every other variant is tested against it.
void AttendRangeReference(const AttendRangeArgs& args) {
  const AttendRangeShape& shape = args.shape;
  for (uint32_t head = 0; head < HeadCount(shape); ++head) {
    double largest = kMinusInfinity;
    ForEachSeen(args, head,
                [&](double logit, const std::byte*) { largest = std::max(largest, logit); });
    double weight_sum = 0.0;
    double value_sum[kMaxAttendDim] = {};
    ForEachSeen(args, head, [&](double logit, const std::byte* row) {
      if (logit == kMinusInfinity) return;
      const double weight = std::exp(logit - largest);
      weight_sum += weight;
      for (uint32_t i = 0; i < shape.value_dim; ++i) {
        value_sum[i] +=
            weight * static_cast<double>(LoadElement(shape.dtype, row, shape.key_dim + i));
      }
    });
    for (uint32_t i = 0; i < shape.value_dim; ++i) {
      args.output[size_t{head} * shape.value_dim + i] =
          weight_sum > 0.0 ? static_cast<float>(value_sum[i] / weight_sum) : 0.0f;
    }
    args.lse[head] =
        static_cast<float>(weight_sum > 0.0 ? largest + std::log(weight_sum) : kMinusInfinity);
  }
}

void StreamRows(const Exec& exec, const AttendRangeArgs& args) {
  AttendAllRows(exec, {.shape = StreamShape(args.shape),
                       .scale = args.scale,
                       .softcap = args.softcap,
                       .queries = args.queries,
                       .spans = args.spans,
                       .positions = {},
                       .output = args.output,
                       .lse = args.lse,
                       .scratch = args.scratch});
}

void RunVariant(Level level, const internal::RangeCall& call) {
#ifdef PQCACHED_X86
  if (level == Level::kAvx512Bf16 && call.dtype == DType::kBf16) {
    return internal::AttendRangeAvx512Bf16(call);
  }
  if (level >= Level::kAvx512) return internal::AttendRangeAvx512(call);
  if (level == Level::kAvx2) return internal::AttendRangeAvx2(call);
#else
  static_cast<void>(level);
#endif
  internal::AttendRangePortable(call);
}

void MultiplyTiles(const Exec& exec, const AttendRangeArgs& args) {
  const AttendRangeShape& shape = args.shape;
  void* scratch = args.scratch.data();
  size_t scratch_bytes = args.scratch.size();
  RunVariant(exec.level,
             {.dtype = shape.dtype,
              .key_dim = shape.key_dim,
              .value_dim = shape.value_dim,
              .row_stride_bytes = shape.row_stride_bytes,
              .group_size = shape.group_size,
              .head_count = HeadCount(shape),
              .scale = args.scale,
              .softcap = args.softcap,
              .query_position = args.query_position,
              .queries = args.queries.data(),
              .spans = args.spans.data(),
              .span_count = args.spans.size(),
              .output = args.output.data(),
              .lse = args.lse.data(),
              .scratch = static_cast<std::byte*>(std::align(64, 1, scratch, scratch_bytes))});
}

}  // namespace

size_t AttendRangeScratchBytes(const AttendRangeShape& shape) {
  using internal::kMaxLaneQueries;
  const size_t lanes =
      size_t{HeadCount(shape) + kMaxLaneQueries - 1} / kMaxLaneQueries * kMaxLaneQueries;
  const size_t dims = size_t{shape.key_dim} + shape.value_dim;
  constexpr size_t kStateFloats = 5;  // per query: the online softmax, and what the query sees
  const size_t floats = lanes * (dims + kStateFloats) + internal::kRangeBlockRows * dims +
                        size_t{internal::kMaxRangeBlockRows} * kMaxLaneQueries;
  return std::max(64 + floats * sizeof(float), AttendScratchBytes(StreamShape(shape)));
}

void AttendRange(const Exec& exec, const AttendRangeArgs& args) {
  const AttendRangeShape& shape = args.shape;
  PQC_CHECK(shape.key_dim % 8 == 0 && shape.key_dim > 0 && shape.key_dim <= kMaxAttendDim);
  PQC_CHECK(shape.value_dim % 8 == 0 && shape.value_dim > 0 && shape.value_dim <= kMaxAttendDim);
  PQC_CHECK(shape.row_stride_bytes >= (shape.key_dim + shape.value_dim) * DTypeBytes(shape.dtype));
  PQC_CHECK(shape.group_size >= 1 && shape.group_size <= kMaxRangeHeads);
  PQC_CHECK(shape.token_count >= 1 && shape.token_count <= kMaxRangeHeads);
  const size_t head_count = HeadCount(shape);
  PQC_CHECK(head_count <= kMaxRangeHeads);
  PQC_CHECK(args.queries.size() == head_count * shape.key_dim);
  PQC_CHECK(args.output.size() == head_count * shape.value_dim);
  PQC_CHECK(args.lse.size() == head_count);
  PQC_CHECK(args.scratch.size() >= AttendRangeScratchBytes(shape));
  if (exec.level == Level::kReference) {
    AttendRangeReference(args);
  } else if (head_count <= kMaxStreamHeads && SeenByAll(args)) {
    StreamRows(exec, args);
  } else {
    MultiplyTiles(exec, args);
  }
}

}  // namespace pqcached::kernels
