// CodeArena: random code planes of many heads in one large memory, and queries to select with.
#ifndef PQCACHED_TESTS_BENCH_CODE_ARENA_H_
#define PQCACHED_TESTS_BENCH_CODE_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/group_rule.h"
#include "kernels/select/pq.h"
#include "kernels/select/pq_select.h"
#include "tests/bench/huge_buffer.h"

namespace pqcached::bench {

// Codes are uniformly distributed: with cells, every cell has its share of the tokens, which is the
// hardest case for selections by cell.
class CodeArena {
 public:
  CodeArena(const kernels::PqGeometry& geometry, uint32_t head_count, uint32_t token_count,
            uint64_t seed);

  const kernels::PqGeometry& geometry() const { return geometry_; }
  uint32_t head_count() const { return head_count_; }
  uint32_t token_count() const { return token_count_; }
  size_t head_bytes() const { return head_bytes_; }
  size_t plane_stride() const { return kernels::PlaneStride(token_count_); }
  const uint8_t* Planes(uint32_t head) const {
    return memory_.As<uint8_t>() + size_t{head} * head_bytes_;
  }
  const std::byte* bytes(uint32_t head) const {
    return memory_.data() + size_t{head} * head_bytes_;
  }

  // All tokens of a head, with its cell counts and posting lists.
  kernels::PqSpan Span(uint32_t head) const;

 private:
  void BuildCellIndex(uint32_t head);

  kernels::PqGeometry geometry_;
  uint32_t head_count_;
  uint32_t token_count_;
  size_t head_bytes_;
  HugeBuffer memory_;
  HugeBuffer counts_;
  HugeBuffer list_begins_;  // with cells: [head][PostingBeginCount]
  HugeBuffer list_slots_;   // with cells: [head][token]
};

// A number of random query groups, with one random codebook and the tables of both.
class QueryPool {
 public:
  static constexpr uint32_t kQueries = 16;

  QueryPool(const kernels::PqGeometry& geometry, uint32_t group_size, uint64_t seed);

  const std::vector<float>& centroids() const { return centroids_; }
  float scale() const { return scale_; }
  uint32_t group_size() const { return group_size_; }
  std::span<const float> Queries(uint32_t index) const;  // [group_size, key_dim]
  std::span<const float> Tables(uint32_t index) const;   // [group_size, subspace_count, 2^bits]

 private:
  kernels::PqGeometry geometry_;
  uint32_t group_size_;
  float scale_;
  std::vector<float> centroids_;
  std::vector<float> queries_;
  std::vector<float> tables_;
};

// One thread's selections: positions and scratch.
class Selector {
 public:
  Selector(const kernels::PqGeometry& geometry, uint32_t group_size, uint32_t token_count,
           kernels::Exec exec = {});

  // Selects k tokens of the head by given tables of the first `group_size` heads.
  std::span<const uint32_t> Select(const CodeArena& arena, uint32_t head, uint32_t group_size,
                                   std::span<const float> tables, uint32_t k);

  // The same with the tables built from queries first.
  std::span<const uint32_t> BuildAndSelect(const CodeArena& arena, uint32_t head,
                                           const QueryPool& pool, uint32_t query,
                                           uint32_t group_size, uint32_t k);

 private:
  kernels::Exec exec_;
  std::vector<float> tables_;
  std::vector<uint32_t> positions_;
  HugeBuffer scratch_;
};

// Normally distributed numbers.
std::vector<float> NormalFloats(size_t count, uint64_t seed);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_CODE_ARENA_H_
