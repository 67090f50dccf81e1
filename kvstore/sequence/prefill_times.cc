#include "kvstore/sequence/prefill_times.h"

#include <algorithm>

namespace pqcached::kvstore {
namespace {

constexpr uint64_t kLeastIntervals = 8;  // before that, the cost is not known
constexpr double kKept = 0.98;           // share of the sums that remains with each new interval
// A longer pause between two chunks is not a prefill.
constexpr absl::Duration kLongestInterval = absl::Seconds(60);
// Least determinant, relative to the product of its diagonal: intervals of about one position and
// length say nothing about the square.
constexpr double kLeastDeterminant = 1e-6;

}  // namespace

PrefillTimes::PrefillTimes(const PrefillCost& configured, size_t layer_count)
    : layer_count_(static_cast<double>(std::max<size_t>(1, layer_count))), cost_(configured) {}

void PrefillTimes::Set(const PrefillReport& report) {
  const MutexLock lock(&mutex_);
  cost_ = report.cost;
  if (report.measured && !measures()) {
    interval_count_ = 0;
    arrivals_ = {};
    xx_ = xy_ = yy_ = xt_ = yt_ = 0;
  }
  measures_.store(report.measured, std::memory_order_relaxed);
}

void PrefillTimes::NoteChunk(uint64_t sequence_id, uint32_t begin, uint32_t end, SteadyTime now) {
  if (!measures() || end <= begin) return;
  const MutexLock lock(&mutex_);
  const auto found = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& each) {
    return each.sequence_id == sequence_id;
  });
  if (found == arrivals_.end()) {
    arrivals_[next_arrival_] = {sequence_id, end, now};
    next_arrival_ = (next_arrival_ + 1) % arrivals_.size();
    return;
  }
  // Tokens between the two chunks, as of decode steps, took time that is not a prefill's.
  if (found->token_end == begin && now - found->at <= kLongestInterval) {
    const double first = begin;
    const double last = end;
    Add(last * last - first * first, last - first, absl::ToDoubleSeconds(now - found->at));
  }
  *found = {sequence_id, end, now};
}

void PrefillTimes::Add(double squares, double tokens, double seconds) {
  ++interval_count_;
  for (double* const sum : {&xx_, &xy_, &yy_, &xt_, &yt_}) *sum *= kKept;
  xx_ += squares * squares;
  xy_ += squares * tokens;
  yy_ += tokens * tokens;
  xt_ += squares * seconds;
  yt_ += tokens * seconds;
}

PrefillCost PrefillTimes::Measured() const {
  if (interval_count_ < kLeastIntervals) return {};
  double square = 0;
  double linear = yt_ / yy_;
  const double determinant = xx_ * yy_ - xy_ * xy_;
  if (determinant > kLeastDeterminant * xx_ * yy_) {
    const double fit = (xt_ * yy_ - yt_ * xy_) / determinant;
    const double rest = (yt_ * xx_ - xt_ * xy_) / determinant;
    if (fit > 0 && rest >= 0) {
      square = fit;
      linear = rest;
    } else if (fit > 0) {  // neither coefficient of a prefill is negative
      square = xt_ / xx_;
      linear = 0;
    }
  }
  return {.seconds_per_token_squared = square / layer_count_,
          .seconds_per_token = linear / layer_count_};
}

PrefillCost PrefillTimes::Cost() const {
  const MutexLock lock(&mutex_);
  return measures() ? Measured() : cost_;
}

}  // namespace pqcached::kvstore
