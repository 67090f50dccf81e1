#include "kernels/attend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/check.h"

namespace pqcached::kernels {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// Calls visit(row) for each row asked for, in order of positions.
template <typename Visit>
void ForEachRow(const AttendArgs& args, bool all_rows, Visit visit) {
  const size_t stride = args.shape.row_stride_bytes;
  if (all_rows) {
    for (const RowSpan& span : args.spans) {
      for (uint32_t i = 0; i < span.token_count; ++i) visit(span.rows + i * stride);
    }
    return;
  }
  size_t index = 0;
  for (const uint32_t position : args.positions) {
    while (position - args.spans[index].first_position >= args.spans[index].token_count) ++index;
    visit(args.spans[index].rows + (position - args.spans[index].first_position) * stride);
  }
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
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  return logit < -largest ? kNegativeInfinity : std::min(logit, largest);
}

// The specification. Every other variant is tested against it.
void AttendReference(const AttendArgs& args, bool all_rows) {
  const AttendShape& shape = args.shape;
  for (size_t head = 0; head < size_t{shape.query_length} * shape.group_size; ++head) {
    const float* query = args.queries.data() + head * shape.key_dim;
    double largest = kNegativeInfinity;
    ForEachRow(args, all_rows,
               [&](const std::byte* row) { largest = std::max(largest, Logit(args, query, row)); });

    double weight_sum = 0.0;
    double value_sum[kMaxAttendDim] = {};
    ForEachRow(args, all_rows, [&](const std::byte* row) {
      const double logit = Logit(args, query, row);
      if (logit == kNegativeInfinity) return;
      const double weight = std::exp(logit - largest);
      weight_sum += weight;
      for (uint32_t i = 0; i < shape.value_dim; ++i) {
        value_sum[i] +=
            weight * static_cast<double>(LoadElement(shape.dtype, row, shape.key_dim + i));
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

void Attend(const Exec& exec, const AttendArgs& args, bool all_rows) {
  const AttendShape& shape = args.shape;
  const size_t head_count = size_t{shape.query_length} * shape.group_size;
  PQC_CHECK(shape.key_dim % 8 == 0 && shape.key_dim > 0 && shape.key_dim <= kMaxAttendDim);
  PQC_CHECK(shape.value_dim % 8 == 0 && shape.value_dim > 0 && shape.value_dim <= kMaxAttendDim);
  PQC_CHECK(shape.row_stride_bytes >= (shape.key_dim + shape.value_dim) * DTypeBytes(shape.dtype));
  PQC_CHECK(shape.query_length >= 1 && shape.query_length <= kMaxAttendQueryLength);
  PQC_CHECK(args.queries.size() == head_count * shape.key_dim);
  PQC_CHECK(args.output.size() == head_count * shape.value_dim);
  PQC_CHECK(args.lse.size() == head_count);
  PQC_CHECK(args.scratch.size() >= AttendScratchBytes(shape));
  static_cast<void>(exec);
  AttendReference(args, all_rows);
}

}  // namespace

size_t AttendScratchBytes(const AttendShape& shape) {
  static_cast<void>(shape);
  return 0;
}

void AttendRows(const Exec& exec, const AttendArgs& args) { Attend(exec, args, false); }

void AttendAllRows(const Exec& exec, const AttendArgs& args) { Attend(exec, args, true); }

}  // namespace pqcached::kernels
