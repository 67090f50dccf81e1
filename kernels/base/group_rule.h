// GroupRule defines the GQA head aggregation: how the logits of the query heads that share one kv
// head (a *group*) become one value per token.
//
// A *logit* is the scaled score of one token under one query head. The tokens with the largest
// values are selected. For example, 32 query heads over 8 kv heads form groups of 4.
#ifndef PQCACHED_KERNELS_BASE_GROUP_RULE_H_
#define PQCACHED_KERNELS_BASE_GROUP_RULE_H_

#include <cstdint>

namespace pqcached::kernels {

// Normalisers (the maximum and the sum of exponentials of a head's logits) cover all candidate
// tokens of all spans together.
//
// With one query head all rules are the same: the value is the logit.
enum class GroupRule : uint8_t {
  kSumSoftmax = 1,  // sum over heads of softmax(logits)[t]
  kMaxSoftmax = 2,  // max over heads of softmax(logits)[t], compared as (logit - max) - log(sum)
  kMeanLogit = 3,   // mean over heads of the logits, compared as their sum
  kMaxLogit = 4,    // max over heads of the logits
};

// Logits are clamped to [-kLogitLimit, kLogitLimit], infinities included, and NaN becomes
// -kLogitLimit: sums and differences of logits stay finite, and all tokens are ordered.
inline constexpr float kLogitLimit = 1e30f;

// Clamps, in the same way, the entries of tables, at most 16 of which are summed to a logit.
inline constexpr float kEntryLimit = kLogitLimit / 32;

// g++ 12 needs a third fewer instructions for this form than for two returns.
constexpr float ClampTo(float limit, float value) {
  const float below = limit < value ? limit : value;
  return below > -limit ? below : -limit;
}
constexpr float ClampLogit(float logit) { return ClampTo(kLogitLimit, logit); }
constexpr float ClampEntry(float entry) { return ClampTo(kEntryLimit, entry); }

// A softmax weight exp(x), x = logit - max <= 0, counts as zero below this x on every instruction
// set.
inline constexpr float kMinExponent = -64.0f;

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_GROUP_RULE_H_
