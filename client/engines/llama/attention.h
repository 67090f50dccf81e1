// An attention node of llama.cpp's graph (FLASH_ATTN_EXT), as far as the plug-in computes it:
// which query tokens see which cells of the KV cache.
//
// A *cell* is one token's place in the cache; its key and value of one layer are rows of the arrays
// K and V. A cell is not a position: cells are used again, and sequences share them. The mask of
// the node says which cells each query token sees, and is all that an exact attention needs.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_ATTENTION_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_ATTENTION_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/engines/llama/ggml_abi.h"
#include "kernels/base/dtype.h"

namespace pqcached::llama {

// Query tokens of a node per stream: more are a prefill, which ggml computes well in tiles.
inline constexpr uint32_t kMostTokens = 63;

struct Attention {
  kernels::DType dtype = kernels::DType::kF16;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t group_size = 0;   // query heads per kv head
  uint32_t tokens = 0;       // query tokens of each stream
  uint32_t first_token = 0;  // of the node, when these are a part of its query tokens
  uint32_t streams = 0;      // caches of their own, with tokens of their own
  uint32_t cells = 0;        // of each stream
  float scale = 1.0f;
  float softcap = 0.0f;
  size_t cell_bytes = 0;  // from a cell's row to the next one, of K and of V
  // Cells over all streams: cell c of stream s is first_cell + s * stream_cells + c.
  uint32_t first_cell = 0;
  uint32_t stream_cells = 0;
  const GgmlTensor* node = nullptr;
};

// Describes the node. Returns nullptr on success, or why the plug-in leaves it to ggml.
const char* Describe(const GgmlTensor& node, Attention* attention);

// Cells [begin, end) that the same query tokens see: bit t of `seen_by` is token t.
struct CellRun {
  uint32_t begin;
  uint32_t end;
  uint64_t seen_by;
};

// Copies a query, rounded to the type of K: ggml rounds queries likewise, with and without flash
// attention. to: [key_dim].
void LoadQuery(const Attention& attention, uint32_t stream, uint32_t token, uint32_t head,
               float* to);

// Returns the positions of the query tokens, [streams, tokens], which the rotation of the queries
// has. Empty when queries are not rotated, or not by one number. `rope_op`: number of ROPE.
std::span<const int32_t> PositionsOf(const Attention& attention, int32_t rope_op);

// Returns the tensor that a tensor is a view of.
const GgmlTensor* RootOf(const GgmlTensor* tensor);

// Sets `runs` to the visible cells of a stream, ascending. Returns false when the mask has other
// values than 0 and minus infinity. hidden[t], where it is not null: cells that token t is not to
// see, as bits of words from cell 0 of the stream on.
bool ReadMask(const Attention& attention, uint32_t stream, std::span<const uint64_t* const> hidden,
              std::vector<CellRun>* runs);

// Adds the cells that a token sees to `words`, as bits from cell 0 of the stream on. Returns false
// as ReadMask does.
bool ReadSeen(const Attention& attention, uint32_t stream, uint32_t token,
              std::span<uint64_t> words);

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_ATTENTION_H_
