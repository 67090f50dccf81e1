// RankedNodes keeps the best nodes of a walk, by descending score; ties: the lower node first.
//
// Included by the files of this folder only. It works in the caller's memory.
#ifndef PQCACHED_KERNELS_GRAPH_RANKED_NODES_H_
#define PQCACHED_KERNELS_GRAPH_RANKED_NODES_H_

#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/graph/top_picker.h"

namespace pqcached::kernels {

struct RankedNode {
  uint64_t key = 0;        // RankKey of score and node: larger is better
  uint32_t part = 0;       // the graph that has the node
  uint32_t next_edge = 0;  // the first neighbour that was not looked at; kAllEdges: none is left

  uint32_t node() const { return RankId(key); }
  float score() const { return RankValue(key); }
};

inline constexpr uint32_t kAllEdges = ~uint32_t{0};

class RankedNodes {
 public:
  explicit RankedNodes(std::span<RankedNode> memory) : memory_(memory) {}

  // Inserts an entry unless `memory` is full of better ones. Returns its rank, or the capacity.
  uint32_t Insert(const RankedNode& entry) {
    const auto capacity = static_cast<uint32_t>(memory_.size());
    if (size_ == capacity && (capacity == 0 || entry.key <= memory_[size_ - 1].key)) {
      return capacity;
    }
    const uint32_t rank = RankOf(entry.key);
    if (size_ < capacity) ++size_;
    RankedNode* const place = memory_.data() + rank;
    std::memmove(place + 1, place, (size_ - 1 - rank) * sizeof(RankedNode));
    *place = entry;
    return rank;
  }

  uint32_t size() const { return size_; }
  RankedNode& operator[](uint32_t rank) { return memory_[rank]; }
  const RankedNode& operator[](uint32_t rank) const { return memory_[rank]; }

 private:
  // Returns the number of entries with larger keys. It has no branch that depends on keys, because
  // such branches cannot be predicted.
  uint32_t RankOf(uint64_t key) const {
    uint32_t rank = 0;
    for (uint32_t left = size_; left > 0;) {
      const uint32_t half = left - left / 2;
      rank += half * static_cast<uint32_t>(memory_[rank + half - 1].key > key);
      left -= half;
    }
    return rank;
  }

  std::span<RankedNode> memory_;
  uint32_t size_ = 0;
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_RANKED_NODES_H_
