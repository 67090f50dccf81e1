// The state of a sequence, in the format in which llama_state_seq_get_data writes it and
// llama_state_seq_set_data reads it:
//
//   magic number, sequence, number of streams; for each stream the number of its cells, and for the
//   one that has cells: each cell's position and sequences; whether V is transposed, the number of
//   layers; each layer's type of K, bytes of a row, and rows by cell; the same for V
//
// Pure functions. All numbers are 4 bytes long, but for the bytes of a row, which are 8.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_STATE_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_STATE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pqcached/status.h"

namespace pqcached::llama {

// The KV cache of a context: all layers are alike.
struct KvShape {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t query_heads = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  int32_t type = 0;  // ggml's number of the elements' type
  uint32_t element_bytes = 0;

  uint64_t KeyRowBytes() const { return uint64_t{kv_heads} * key_dim * element_bytes; }
  uint64_t ValueRowBytes() const { return uint64_t{kv_heads} * value_dim * element_bytes; }
  uint64_t TokenBytes() const { return layers * (KeyRowBytes() + ValueRowBytes()); }
};

// Places of rows in a state: cell c of layer l has its key at keys[l] + c * KeyRowBytes().
struct StateRows {
  uint32_t cells = 0;
  std::vector<size_t> keys;    // [layers], bytes from the state's beginning
  std::vector<size_t> values;  // [layers]
  // The cell of each position; empty when cell i has position i.
  std::vector<int64_t> cell_of_position;
};

// PQC_OK, or the status of a state that cannot be used and the reason.
struct StateResult {
  pqc_status status = PQC_OK;
  std::string message;
};

// Finds the rows in a state. Reads nothing outside of it, whatever its numbers are.
//
// Errors: PQC_UNIMPLEMENTED        another format, transposed V, rows or layers of another shape
//         PQC_FAILED_PRECONDITION  elements of another type, positions that are not 0 to cells - 1
StateResult FindRows(std::span<const std::byte> state, const KvShape& shape, StateRows* rows);

// Sets *streams to the number of streams in the state of an empty sequence.
//
// Errors: PQC_UNIMPLEMENTED  another format, or a sequence that has cells
StateResult CountStreams(std::span<const std::byte> state, uint32_t* streams);

// Returns the bytes of a state of `cells` cells, 1 to 2^22.
size_t StateBytes(const KvShape& shape, uint32_t streams, uint32_t cells);
// Writes a state, of StateBytes, in which cell i has position i, except its rows: *rows receives
// their places.
void WriteState(const KvShape& shape, uint32_t streams, uint32_t cells, std::span<std::byte> state,
                StateRows* rows);

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_STATE_H_
