#include "tests/bench/local/decoding.h"

namespace pqcached::bench {

Decoding::Decoding(pqc_client* client, pqc_cache* cache, const Rows& rows, uint64_t tokens,
                   uint32_t query_seed, const pqc_build_options& build)
    : client_(client),
      rows_(rows),
      build_(build),
      next_(tokens),
      queries_(Queries(query_seed)),
      output_(queries_.size()),
      lse_(kQueryHeads) {
  Must(pqc_sequence_create(cache, &sequence_), "pqc_sequence_create");
  Fill(sequence_, rows, tokens);
  Must(pqc_build_index(sequence_, &build_), "pqc_build_index");
}

pqc_step* Decoding::Begin() {
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence_;
  item.query_position = next_;
  pqc_selection selection = Select(0.1);
  selection.index = build_.index;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.selection = &selection;
  options.timeout_ms = 60000;
  pqc_step* step = nullptr;
  Must(pqc_step_begin(client_, &item, 1, &options, &step), "pqc_step_begin");
  return step;
}

void Decoding::Flush() { Must(pqc_sequence_flush(sequence_), "pqc_sequence_flush"); }

void Decoding::Step(const pqc_selection& selection, bool append) {
  pqc_step* step = Begin();
  pqc_tensor queries = PQC_INIT(pqc_tensor);
  queries.ptr = queries_.data();
  queries.dtype = PQC_F32;
  queries.ndim = 3;
  queries.shape = queries_shape_;
  pqc_step_attention attention = PQC_INIT(pqc_step_attention);
  attention.output = output_.data();
  attention.output_capacity = output_.size();
  attention.lse = lse_.data();
  attention.lse_capacity = lse_.size();
  Must(pqc_step_attend(step, 0, &queries, &selection, &attention), "pqc_step_attend");
  if (!append) {
    pqc_step_abandon(step);
    return;
  }
  Rows::Pair pair;
  rows_.View(static_cast<uint32_t>(next_ % rows_.tokens()), 1, &pair);
  pqc_layer_rows layer = PQC_INIT(pqc_layer_rows);
  layer.keys = pair.keys;
  layer.values = pair.values;
  Must(pqc_step_end(step, &layer, 1, nullptr), "pqc_step_end");
  ++next_;
}

}  // namespace pqcached::bench
