// RankedNodes keeps the best nodes of a walk, by descending score; ties: the lower node first.
//
// Included by the files of this folder only. It works in the caller's memory.
#ifndef PQCACHED_KERNELS_GRAPH_RANKED_NODES_H_
#define PQCACHED_KERNELS_GRAPH_RANKED_NODES_H_

#include <algorithm>
#include <cstdint>
#include <span>

namespace pqcached::kernels {

struct RankedNode {
  float score = 0.0f;  // not NaN
  uint32_t node = 0;
  uint32_t next_edge = 0;  // the first neighbour that was not looked at; kAllEdges: none is left
};

inline constexpr uint32_t kAllEdges = ~uint32_t{0};

inline bool RanksBefore(const RankedNode& a, const RankedNode& b) {
  return a.score > b.score || (a.score == b.score && a.node < b.node);
}

class RankedNodes {
 public:
  explicit RankedNodes(std::span<RankedNode> memory) : memory_(memory) {}

  // Inserts an entry unless `memory` is full of better ones. Returns its rank, or the capacity.
  uint32_t Insert(const RankedNode& entry) {
    const auto capacity = static_cast<uint32_t>(memory_.size());
    if (size_ == capacity && (capacity == 0 || !RanksBefore(entry, memory_[size_ - 1]))) {
      return capacity;
    }
    RankedNode* const begin = memory_.data();
    RankedNode* const place = std::upper_bound(begin, begin + size_, entry, RanksBefore);
    if (size_ < capacity) ++size_;
    std::move_backward(place, begin + size_ - 1, begin + size_);
    *place = entry;
    return static_cast<uint32_t>(place - begin);
  }

  uint32_t size() const { return size_; }
  RankedNode& operator[](uint32_t rank) { return memory_[rank]; }
  const RankedNode& operator[](uint32_t rank) const { return memory_[rank]; }

 private:
  std::span<RankedNode> memory_;
  uint32_t size_ = 0;
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_RANKED_NODES_H_
