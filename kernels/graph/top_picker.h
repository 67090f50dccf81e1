// TopPicker keeps the items with the largest values of a stream.
//
// Included by the files of this folder only. It works in the caller's memory.
#ifndef PQCACHED_KERNELS_GRAPH_TOP_PICKER_H_
#define PQCACHED_KERNELS_GRAPH_TOP_PICKER_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>

namespace pqcached::kernels {

// Returns a number that orders items by descending value, equal values by ascending id; NaN is
// below all values. Larger is better.
inline uint64_t RankKey(float value, uint32_t id) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes 0
  const uint32_t order = (bits >> 31u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{value == value ? order : 0} << 32u) | static_cast<uint32_t>(~id);
}

// Returns the value of a key; -infinity for NaN.
inline float RankValue(uint64_t key) {
  const auto order = static_cast<uint32_t>(key >> 32u);
  const float value = std::bit_cast<float>((order >> 31u) != 0 ? order & 0x7fffffffu : ~order);
  return value == value ? value : -std::bit_cast<float>(0x7f800000u);
}

inline uint32_t RankId(uint64_t key) { return ~static_cast<uint32_t>(key); }

class TopPicker {
 public:
  // `keep` items; `memory`: MemoryCount(keep).
  TopPicker(uint32_t keep, std::span<uint64_t> memory) : keep_(keep), memory_(memory) {}

  static constexpr size_t MemoryCount(uint32_t keep) { return size_t{keep} * 4 + 64; }

  void Add(float value, uint32_t id) { AddKey(RankKey(value, id)); }

  // Adds the items values[i] with ids from 0 on. REQUIRES: nothing was added before.
  void AddAll(std::span<const float> values) {
    AddAbove(values, GuessLimit(values));
    if (size_ >= keep_) return;
    // The guess was too high.
    size_ = 0;
    least_ = 0;
    for (size_t i = 0; i < values.size(); ++i) Add(values[i], static_cast<uint32_t>(i));
  }

  // Returns the kept keys, the best first.
  std::span<const uint64_t> Finish() {
    std::sort(memory_.begin(), memory_.begin() + static_cast<ptrdiff_t>(size_), std::greater<>());
    return memory_.first(std::min<size_t>(size_, keep_));
  }

 private:
  // Returns a value that, as a rule, a little more than `keep` values exceed: that of a sample.
  float GuessLimit(std::span<const float> values) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const size_t count = memory_.size();
    if (values.size() <= 4 * count) return kNone;
    const size_t stride = values.size() / count;
    for (size_t i = 0; i < count; ++i) memory_[i] = RankKey(values[i * stride], 0);
    const size_t rank = keep_ / stride + keep_ / stride / 2 + 8;
    if (rank >= count) return kNone;
    const auto at = memory_.begin() + static_cast<ptrdiff_t>(rank);
    std::nth_element(memory_.begin(), at, memory_.end(), std::greater<>());
    return RankValue(*at);
  }

  void AddAbove(std::span<const float> values, float limit) {
    constexpr size_t kBlock = 32;
    size_t i = 0;
    for (; i + kBlock <= values.size(); i += kBlock) {
      int above = 0;
      for (size_t j = 0; j < kBlock; ++j) above |= static_cast<int>(values[i + j] > limit);
      if (above == 0) continue;
      for (size_t j = i; j < i + kBlock; ++j) {
        if (values[j] > limit) Add(values[j], static_cast<uint32_t>(j));
      }
    }
    for (; i < values.size(); ++i) {
      if (values[i] > limit) Add(values[i], static_cast<uint32_t>(i));
    }
  }

  void AddKey(uint64_t key) {
    if (key <= least_) return;
    memory_[size_++] = key;
    if (size_ == memory_.size()) Shrink();
  }

  void Shrink() {
    if (size_ < keep_) return;
    if (keep_ == 0) {
      size_ = 0;
      return;
    }
    const auto last = memory_.begin() + (static_cast<ptrdiff_t>(keep_) - 1);
    std::nth_element(memory_.begin(), last, memory_.begin() + static_cast<ptrdiff_t>(size_),
                     std::greater<>());
    least_ = *last;
    size_ = keep_;
  }

  const uint32_t keep_;
  const std::span<uint64_t> memory_;
  size_t size_ = 0;
  uint64_t least_ = 0;  // keys that are not above it cannot be among the best
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_TOP_PICKER_H_
