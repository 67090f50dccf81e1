#include "kernels/attend/attend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/attend/attend_internal.h"
#include "kernels/base/check.h"

namespace pqcached::kernels {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

enum class RowChoice : uint8_t { kAll, kChosen, kScored };

ptrdiff_t ValueOffset(const AttendShape& shape) {
  if (shape.value_offset_bytes != 0) return shape.value_offset_bytes;
  return static_cast<ptrdiff_t>(shape.key_dim * DTypeBytes(shape.dtype));
}

// Calls visit(ordinal, row) for each requested row, in order of positions.
template <typename Visit>
void ForEachRow(const AttendArgs& args, RowChoice choice, Visit visit) {
  const size_t stride = args.shape.row_stride_bytes;
  size_t ordinal = 0;
  if (choice == RowChoice::kAll) {
    for (const RowSpan& span : args.spans) {
      for (uint32_t i = 0; i < span.token_count; ++i) visit(ordinal++, span.rows + i * stride);
    }
    return;
  }
  size_t index = 0;
  for (const uint32_t position : args.positions) {
    while (position - args.spans[index].first_position >= args.spans[index].token_count) ++index;
    visit(ordinal++,
          args.spans[index].rows + (position - args.spans[index].first_position) * stride);
  }
}

// Returns a logit as it counts: within the range of float, or minus infinity.
double Bounded(double logit) {
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  return logit < -largest ? kNegativeInfinity : std::min(logit, largest);
}

double Logit(const AttendArgs& args, const float* query, const std::byte* row) {
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
  return Bounded(logit);
}

// The specification: every other variant is tested against it.
void AttendReference(const AttendArgs& args, RowChoice choice) {
  const AttendShape& shape = args.shape;
  for (size_t head = 0; head < size_t{shape.query_length} * shape.group_size; ++head) {
    const auto logit_of = [&](size_t ordinal, const std::byte* row) {
      if (choice == RowChoice::kScored) {
        return Bounded(static_cast<double>(args.logits[head * args.positions.size() + ordinal]));
      }
      return Logit(args, args.queries.data() + head * shape.key_dim, row);
    };
    double largest = kNegativeInfinity;
    ForEachRow(args, choice, [&](size_t ordinal, const std::byte* row) {
      largest = std::max(largest, logit_of(ordinal, row));
    });

    double weight_sum = 0.0;
    double value_sum[kMaxAttendDim] = {};
    ForEachRow(args, choice, [&](size_t ordinal, const std::byte* row) {
      const double logit = logit_of(ordinal, row);
      if (logit == kNegativeInfinity) return;
      const double weight = std::exp(logit - largest);
      weight_sum += weight;
      for (uint32_t i = 0; i < shape.value_dim; ++i) {
        value_sum[i] +=
            weight * static_cast<double>(LoadElement(shape.dtype, row + ValueOffset(shape), i));
      }
    });

    for (uint32_t i = 0; i < shape.value_dim; ++i) {
      args.output[head * shape.value_dim + i] =
          weight_sum > 0.0 ? static_cast<float>(value_sum[i] / weight_sum) : 0.0f;
    }
    args.lse[head] =
        static_cast<float>(weight_sum > 0.0 ? largest + std::log(weight_sum) : kNegativeInfinity);
  }
}

void RunVariant(Level level, const internal::AttendCall& call) {
#ifdef PQCACHED_X86
  if (level == Level::kAvx512Bf16 && call.dtype == DType::kBf16) {
    return internal::AttendAvx512Bf16(call);
  }
  if (level >= Level::kAvx512) return internal::AttendAvx512(call);
  if (level == Level::kAvx2) return internal::AttendAvx2(call);
#else
  static_cast<void>(level);
#endif
  internal::AttendPortable(call);
}

// Processes the heads in passes of at most kHeadsPerPass.
void AttendInPasses(const Exec& exec, const AttendArgs& args, RowChoice choice) {
  const AttendShape& shape = args.shape;
  void* scratch = args.scratch.data();
  size_t scratch_bytes = args.scratch.size();
  internal::AttendCall call{
      .dtype = shape.dtype,
      .key_dim = shape.key_dim,
      .value_dim = shape.value_dim,
      .row_stride_bytes = shape.row_stride_bytes,
      .value_offset_bytes = ValueOffset(shape),
      .head_count = 0,
      .scale = args.scale,
      .softcap = args.softcap,
      .queries = args.queries.data(),
      .logits = choice == RowChoice::kScored ? args.logits.data() : nullptr,
      .spans = args.spans.data(),
      .span_count = args.spans.size(),
      .positions = args.positions.data(),
      .position_count = args.positions.size(),
      .all_rows = choice == RowChoice::kAll,
      .output = args.output.data(),
      .lse = args.lse.data(),
      .scratch = static_cast<std::byte*>(std::align(64, 1, scratch, scratch_bytes)),
  };
  uint32_t left = shape.query_length * shape.group_size;
  while (left > 0) {
    call.head_count = std::min(left, internal::kHeadsPerPass);
    RunVariant(exec.level, call);
    left -= call.head_count;
    if (call.logits != nullptr) {
      call.logits += size_t{call.head_count} * args.positions.size();
    } else {
      call.queries += size_t{call.head_count} * shape.key_dim;
    }
    call.output += size_t{call.head_count} * shape.value_dim;
    call.lse += call.head_count;
  }
}

void Attend(const Exec& exec, const AttendArgs& args, RowChoice choice) {
  const AttendShape& shape = args.shape;
  const size_t head_count = size_t{shape.query_length} * shape.group_size;
  PQC_CHECK(shape.key_dim % 8 == 0 && shape.key_dim <= kMaxAttendDim);
  PQC_CHECK(shape.key_dim > 0 || choice == RowChoice::kScored);
  PQC_CHECK(shape.value_dim % 8 == 0 && shape.value_dim > 0 && shape.value_dim <= kMaxAttendDim);
  const uint32_t row_dim = shape.value_offset_bytes == 0 ? shape.key_dim + shape.value_dim
                                                         : std::max(shape.key_dim, shape.value_dim);
  PQC_CHECK(shape.row_stride_bytes >= row_dim * DTypeBytes(shape.dtype));
  PQC_CHECK(shape.group_size >= 1 && shape.query_length >= 1);
  PQC_CHECK(shape.query_length <= kMaxAttendQueryLength);
  if (choice == RowChoice::kScored) {
    PQC_CHECK(args.logits.size() == head_count * args.positions.size());
  } else {
    PQC_CHECK(args.queries.size() == head_count * shape.key_dim);
  }
  PQC_CHECK(args.output.size() == head_count * shape.value_dim);
  PQC_CHECK(args.lse.size() == head_count);
  PQC_CHECK(args.scratch.size() >= AttendScratchBytes(shape));
  if (exec.level == Level::kReference) {
    AttendReference(args, choice);
  } else {
    AttendInPasses(exec, args, choice);
  }
}

}  // namespace

size_t AttendScratchBytes(const AttendShape& shape) {
  const uint32_t head_count =
      std::min(shape.query_length * shape.group_size, internal::kHeadsPerPass);
  const auto padded = [](uint32_t dim) { return (dim + 31) / 32 * 32; };
  const size_t head_floats = padded(shape.key_dim) + padded(shape.value_dim) +
                             internal::kBlockRows + internal::kHeadStateFloats;
  return 64 + head_count * head_floats * sizeof(float);
}

void AttendRows(const Exec& exec, const AttendArgs& args) {
  Attend(exec, args, RowChoice::kChosen);
}

void AttendScored(const Exec& exec, const AttendArgs& args) {
  if (args.positions.empty()) {  // then the logits may be null
    std::fill(args.output.begin(), args.output.end(), 0.0f);
    std::fill(args.lse.begin(), args.lse.end(), static_cast<float>(kNegativeInfinity));
    return;
  }
  Attend(exec, args, RowChoice::kScored);
}

void AttendAllRows(const Exec& exec, const AttendArgs& args) {
  Attend(exec, args, RowChoice::kAll);
}

}  // namespace pqcached::kernels
