#include "kernels/select/mass_count.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/select/value_ops.h"
#include "kernels/select/value_select.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kMostGroupHeads = 64;
// Bits of a value's key that one pass counts by, from the highest ones on.
constexpr uint32_t kPassBits[] = {12, 10, 10};
constexpr uint32_t kMostBuckets = 1u << 12;

struct MassBucket {
  double mass = 0;
  uint32_t count = 0;
};

// Returns a number that orders as the value does.
uint32_t KeyOf(float value) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 is 0
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

size_t CandidateCount(std::span<const ScoreSpan> spans) {
  size_t count = 0;
  for (const ScoreSpan& span : spans) count += span.token_count;
  return count;
}

double OwnSumAt(const OwnWeight& own, float max) {
  return own.sum_exp > 0 ? own.sum_exp * std::exp(double{own.max} - max) : 0;
}

// Writes each candidate's share of the attention, in the mean over the heads. Returns the share of
// the own tokens.
double ComputeMasses(const Exec& exec, const MassCountArgs& args, std::span<float> masses) {
  // The portable variant is also the reference.
  const ValueOps& ops = exec.level == Level::kReference ? kValueOpsPortable : ValueOpsFor(exec);
  double own_mass = 0;
  for (uint32_t head = 0; head < args.group_size; ++head) {
    const OwnWeight& own = args.own[head];
    Normaliser normaliser;
    if (own.sum_exp > 0) normaliser.max = std::max(normaliser.max, own.max);
    for (const ScoreSpan& span : args.spans) {
      AddToMax(exec, {span.logits + head * span.head_stride, span.token_count}, normaliser);
    }
    for (const ScoreSpan& span : args.spans) {
      AddToSum(exec, {span.logits + head * span.head_stride, span.token_count}, normaliser);
    }
    const double own_sum = OwnSumAt(own, normaliser.max);
    const double sum = (normaliser.sum + own_sum) * args.group_size;
    own_mass += own_sum / sum;
    const HeadWeight weight{
        .max = normaliser.max, .inverse_sum = static_cast<float>(1.0 / sum), .log_sum = 0};
    float* to = masses.data();
    for (const ScoreSpan& span : args.spans) {
      ops.add_softmax(span.logits + head * span.head_stride, span.token_count, weight, head == 0,
                      to);
      to += span.token_count;
    }
  }
  return own_mass;
}

// The k best of some values, and what they have.
class MassCut {
 public:
  MassCut(std::span<const float> values, std::span<const float> masses,
          std::span<MassBucket> buckets)
      : values_(values), masses_(masses), buckets_(buckets) {}

  // Returns the smallest k whose k best have the mass.
  uint32_t Find(double mass) {
    if (mass <= 0) return 0;
    uint32_t shift = 32;
    for (const uint32_t bits : kPassBits) {
      shift -= bits;
      CountBuckets(shift, bits);
      // Rounding keeps the sum below it: all that were counted, of the first pass all values.
      if (!FindBucket(mass, bits)) return count_;
    }
    return FindAmongEqual(mass);
  }

 private:
  // Counts the values whose higher bits are the prefix, by the next `bits` bits.
  void CountBuckets(uint32_t shift, uint32_t bits) {
    std::fill_n(buckets_.begin(), size_t{1} << bits, MassBucket{});
    const uint32_t above = shift + bits;
    for (size_t i = 0; i < values_.size(); ++i) {
      const uint32_t key = KeyOf(values_[i]);
      if (above < 32 && key >> above != prefix_) continue;
      MassBucket& bucket = buckets_[(key >> shift) & ((1u << bits) - 1)];
      bucket.mass += masses_[i];
      ++bucket.count;
    }
  }

  // Goes down to the bucket in which the mass is reached; false if it is in none.
  bool FindBucket(double mass, uint32_t bits) {
    for (uint32_t bucket = 1u << bits; bucket-- > 0;) {
      if (mass_ + buckets_[bucket].mass >= mass && buckets_[bucket].count > 0) {
        prefix_ = prefix_ << bits | bucket;
        return true;
      }
      mass_ += buckets_[bucket].mass;
      count_ += buckets_[bucket].count;
    }
    return false;
  }

  // Takes the values whose key is the prefix from the lowest position on.
  uint32_t FindAmongEqual(double mass) {
    for (size_t i = 0; i < values_.size() && mass_ < mass; ++i) {
      if (KeyOf(values_[i]) != prefix_) continue;
      mass_ += masses_[i];
      ++count_;
    }
    return count_;
  }

  const std::span<const float> values_;
  const std::span<const float> masses_;
  const std::span<MassBucket> buckets_;
  uint32_t prefix_ = 0;
  double mass_ = 0;  // of the values above the prefix
  uint32_t count_ = 0;
};

}  // namespace

size_t MassCountScratchBytes(uint32_t token_count) {
  return 2 * ((size_t{token_count} + 15) / 16 * 16) * sizeof(float) +
         kMostBuckets * sizeof(MassBucket);
}

uint32_t CountForMass(const Exec& exec, const MassCountArgs& args) {
  const size_t count = CandidateCount(args.spans);
  PQC_CHECK(args.group_size >= 1 && args.group_size <= kMostGroupHeads);
  PQC_CHECK(args.own.size() == args.group_size);
  PQC_CHECK(args.scratch.size() >= MassCountScratchBytes(static_cast<uint32_t>(count)));
  auto* const buckets = reinterpret_cast<MassBucket*>(args.scratch.data());
  auto* const floats =
      reinterpret_cast<float*>(args.scratch.data() + kMostBuckets * sizeof(MassBucket));
  const std::span<float> values(floats, count);
  const std::span<float> masses(floats + (count + 15) / 16 * 16, count);
  ScoreValues(exec, {args.group_size, args.rule, args.spans, values});
  const double own = ComputeMasses(exec, args, masses);
  return MassCut(values, masses, {buckets, kMostBuckets}).Find(args.mass - own);
}

}  // namespace pqcached::kernels
