// How the query heads that share one kv head (a *group*) agree on one value per token.
//
// A *logit* is the scaled score of one token under one query head. The tokens with the largest
// values are selected.
#ifndef PQCACHED_KERNELS_GROUP_RULE_H_
#define PQCACHED_KERNELS_GROUP_RULE_H_

#include <cstdint>

namespace pqcached::kernels {

// Normalisers (max and sum of exponentials of a head's logits) are over all candidate tokens, over
// all spans together.
//
// With one query head all rules are the same: the value is the logit.
enum class GroupRule : uint8_t {
  kSumSoftmax = 1,  // sum over heads of softmax(logits)[t]
  kMaxSoftmax = 2,  // max over heads of softmax(logits)[t], compared as (logit - max) - log(sum)
  kMeanLogit = 3,   // mean over heads of the logits, compared as their sum
  kMaxLogit = 4,    // max over heads of the logits
};

// Logits beyond it, infinities among them, count as it, and NaN counts as -kLogitLimit: sums and
// differences of logits stay finite, and every token has a place in the order.
inline constexpr float kLogitLimit = 1e30f;

// The same for the entries of tables that are added up to logits, at most 16 of them.
inline constexpr float kEntryLimit = kLogitLimit / 32;

constexpr float ClampTo(float limit, float value) {
  if (value > limit) return limit;
  return value >= -limit ? value : -limit;
}
constexpr float ClampLogit(float logit) { return ClampTo(kLogitLimit, logit); }
constexpr float ClampEntry(float entry) { return ClampTo(kEntryLimit, entry); }

// A softmax weight exp(x), x = logit - max <= 0, counts as zero below this x, at every level.
inline constexpr float kMinExponent = -64.0f;

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GROUP_RULE_H_
