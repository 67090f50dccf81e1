// DecodeState: what a step keeps for its decode calls (pqc_step_decode).
//
// A *row table* holds the rows of some tokens of one layer: [kv_heads][tokens][key | value], in the
// layer's dtype. Kernels read it like stored rows.
#ifndef PQCACHED_CLIENT_STEP_DECODE_STATE_H_
#define PQCACHED_CLIENT_STEP_DECODE_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "client/base/remote.h"
#include "client/local/layer_source.h"
#include "client/step/handover.h"

namespace pqcached::client {

// Memory is kept from step to step, so that steps in steady state do not allocate.
struct DecodeState {
  struct Layer {
    uint32_t number = 0;
    size_t table_begin = 0;  // in `rows`: the row table of all query tokens
  };
  // Tokens [begin, query_position) of an item, whose rows were not stored when the step's first
  // layer was decoded.
  struct Unstored {
    uint64_t begin = 0;
    size_t tables_begin = 0;  // in `unstored_rows`: the row tables of the stored layers, in order
  };
  // Query tokens of an item that attend to the same ranges, up to their own positions: all of them
  // or, in a layer of kind window, one.
  struct Part {
    uint32_t token = 0;  // the first one, in the item
    uint32_t token_count = 1;
    size_t ranges_begin = 0;  // in `ranges`: sink and window
    size_t ranges_end = 0;
  };
  // An item in the call in progress.
  struct Own {
    bool selects = false;    // there are tokens between sink and window
    size_t parts_begin = 0;  // in `parts`
    size_t parts_end = 0;
  };

  // Forgets all, but keeps memory that is worth reusing.
  void Clear();
  const Layer* Find(uint32_t layer) const;

  std::vector<Layer> layers;    // decoded ones
  std::vector<std::byte> rows;  // row tables of the decoded layers

  bool has_unstored = false;       // the next two are set
  std::vector<Unstored> unstored;  // [items]
  std::vector<std::byte> unstored_rows;

  // Of the call in progress.
  std::vector<Own> own;  // [items]
  std::vector<Part> parts;
  std::vector<kvstore::PositionRange> ranges;
  std::vector<float> output, lse;   // over the tokens that are not in row tables, packed
  std::vector<float> unwanted_lse;  // for callers that want none
  std::vector<OpenedLayer> opened;  // [items], local path

  // Of one copy.
  std::vector<std::shared_ptr<Handover>> queued;  // shared with the sender
  std::vector<RowBlock> blocks;
  std::vector<std::byte*> heads;  // [kv_heads]
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_DECODE_STATE_H_
