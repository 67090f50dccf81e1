// Exact attention over the rows that llama.cpp keeps itself.
//
// One call computes a whole node: the visible cells are cut into pieces, the engine's threads take
// one piece after the other, and their partial results are merged. A piece is read once for all
// query tokens that see it, so that parallel requests read a shared prompt once.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_OWN_ROWS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_OWN_ROWS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/engines/llama/attention.h"
#include "kernels/attend/attend.h"
#include "kernels/attend/merge.h"
#include "kernels/base/exec.h"

namespace pqcached::llama {

// Runs work(context, i) once for each i in [0, count) on the engine's threads, and waits.
struct Crew {
  uint32_t threads = 1;
  void (*run)(void* crew, void (*work)(void* context, uint32_t thread), void* context) = nullptr;
  void* crew = nullptr;
};

// The buffers grow to the largest node and stay: a step of decoding allocates nothing. One node at
// a time.
class OwnRows {
 public:
  explicit OwnRows(kernels::Exec exec) : exec_(exec) {}

  // Reads the masks. Returns false when they have values other than 0 and minus infinity; the node
  // is then ggml's. Afterwards, seen_cells() is the number of cells that any token sees. `hidden`:
  // empty, or [streams, tokens] cells that a token is not to see, as ReadMask has it.
  bool Prepare(const Attention& attention, std::span<const uint64_t* const> hidden = {});
  uint64_t seen_cells() const { return seen_cells_; }

  // Computes the node that Prepare has read. `others`: empty, or [streams, tokens] partial
  // attentions over hidden cells, [query heads] each; none where the output is null.
  void Compute(const Crew& crew, std::span<const kernels::Partial> others = {});

 private:
  // Cells [begin, end) of a stream, for up to kMaxAttendQueryLength tokens that see them.
  struct Piece {
    uint32_t stream;
    uint32_t begin;
    uint32_t end;
    uint64_t seen_by;
  };
  // The memory that a thread writes.
  struct Own {
    float* queries;  // of the tokens of a piece, when they are not consecutive
    float* output;   // of a piece and kv head
    float* lse;
    float* sums;     // partial result of all tokens: [stream, token, query head, value_dim]
    float* sum_lse;  // [stream, token, query head]
    std::byte* scratch;
  };

  uint32_t heads() const { return attention_.kv_heads * attention_.group_size; }
  size_t rows() const { return size_t{attention_.streams} * attention_.tokens; }
  kernels::AttendShape Shape(uint32_t token_count) const;
  void CutIntoPieces(uint32_t threads);
  void AddPieces(uint32_t stream, const CellRun& run, uint32_t longest);
  void Reserve(uint32_t threads);
  Own OwnOf(uint32_t thread) const;
  void LoadQueries();
  void Work(uint32_t thread);
  void AttendPiece(const Piece& piece, const Own& own) const;
  std::span<const float> QueriesOf(const Piece& piece, uint32_t kv_head, const Own& own) const;
  void Merge(uint32_t threads, std::span<const kernels::Partial> others);

  kernels::Exec exec_;
  Attention attention_;
  std::vector<std::vector<CellRun>> runs_;  // per stream
  uint64_t seen_cells_ = 0;
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_piece_{0};
  std::vector<float> queries_;  // [stream, kv head, token, group, key_dim], rounded to K's type
  std::unique_ptr<std::byte[]> memory_;
  size_t memory_bytes_ = 0;
  size_t own_bytes_ = 0;
  std::vector<float> zeros_;  // the value of a learned sink
  std::vector<float> lse_;
  std::vector<kernels::Partial> parts_;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_OWN_ROWS_H_
