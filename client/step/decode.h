// Complete attention in decode steps (pqc_step_decode).
//
// On a GPU, the device does this work (gpu/decode.cc). Elsewhere, the selected tokens are attended
// to as in pqc_step_attend. Sink and window are the item's own rows: those that are stored are read
// where they are; those that earlier steps have passed and that are not stored yet are copied from
// the sender's queue, once per step; those of the step are kept until its end. All partial results
// are merged.
#ifndef PQCACHED_CLIENT_STEP_DECODE_H_
#define PQCACHED_CLIENT_STEP_DECODE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/step/step.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/selection.h"

namespace pqcached::client {

// Implements pqc_step_decode.
pqc_status DecodeInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                        const pqc_tensor* keys, const pqc_tensor* values,
                        const pqc_selection* selection, pqc_step_attention* out);

// Adds the rows of the decoded layers to those that the step's end lists. Refuses a layer that has
// rows twice or not at all.
pqc_status AddDecodedRows(const pqc_step& step, std::vector<RowBlock>* blocks);

// Checks the terms for an item that selects nothing, which no reader sees.
pqc_status CheckUnusedTerms(const kvstore::Selection& given, StepItem& item);

// Copies the rows of earlier steps that are not stored yet, once per step.
pqc_status CopyUnstored(pqc_step* step);
// Copies those of one item, of positions from `floor` on, behind those of the items before.
pqc_status CopyUnstoredOf(pqc_step& step, size_t number, uint64_t floor);
// Adds the row table of a layer to those of the step; the caller removes it if the call fails.
pqc_status KeepRows(pqc_step* step, const RowBlock& rows, const LayerShape& shape);

// Finds which tokens each item attends to without a selection.
void FindOwnRanges(const LayerCall& call, DecodeState* state);

// Attends to the rows of sink and window, merges the result with the packed one of the step, and
// stores it. views [items]: layers with the stored rows; empty when these are in the packed result.
pqc_status AttendToOwnRows(const LayerCall& call, std::span<const OpenedLayer> views,
                           const kvstore::ParallelFor& threads);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_DECODE_H_
