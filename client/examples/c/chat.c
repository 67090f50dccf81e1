/* Two turns of a conversation; the second computes only its new tokens. Usage: chat ENDPOINT. */
#include "chat_model.h" /* stands for the rest of an engine; includes pqcached/client.h */

/* clang-format off */
int main(int argc, char** argv) {
  pqc_client* client; pqc_model* model; pqc_cache* cache; pqc_sequence* sequence;
  pqc_decoder* decoder; static uint32_t tokens[1024], count; uint64_t stored;
  pqc_client_options options = {sizeof options, .endpoint = argv[argc - 1]};
  Must(pqc_client_open(&options, &client));
  pqc_cache_spec spec = {sizeof spec, .name = "chat", .model_fingerprint = "chat-1"};
  Must(pqc_model_read(kConfig, NULL, &model));
  spec.groups = pqc_model_groups(model, &spec.group_count);
  Must(pqc_cache_open(client, &spec, &cache)); pqc_model_close(model);
  for (uint32_t turn = 0; turn < 2; ++turn, count += 60) {
    count = AddText(tokens, count, turn == 0 ? 600 : 100);
    pqc_sequence_options prompt = {sizeof prompt, .token_ids = tokens, .token_id_count = count,
        .has_live_index = 1, .sink_tokens = 16};
    Must(pqc_sequence_create_with(cache, &prompt, &sequence, &stored));
    if (stored == count) Must(pqc_sequence_truncate(sequence, --stored)); /* the last is decoded */
    Must(pqc_decoder_open(sequence, &(pqc_selection){sizeof(pqc_selection), .sink_tokens = 16,
        .window_tokens = 64, .budget = PQC_BUDGET_RATIO, .ratio = 0.1}, &decoder));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const pqc_tensor rows = Project(tokens + stored, count - 1 - stored, layer, kHeads);
      Must(pqc_decoder_prefill(decoder, layer, &rows, &rows));
    }
    float out[kQueryHeads * kDim];
    for (uint32_t* last = tokens + count - 1; last < tokens + count + 59; ++last) {
      pqc_row_options name = {sizeof name, (uint64_t)(last - tokens), last, .token_id_count = 1};
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        pqc_tensor q = RowOf(*last, layer, kQueryHeads), row = RowOf(*last, layer, kHeads);
        Must(pqc_decoder_decode_with(decoder, layer, &q, &row, &row, &name, out, sizeof out / 4));
      }
      last[1] = NextToken(*last);
    }
    printf("%d of %u tokens were stored; attention[0] = %.3f\n", (int)stored, count, out[0]);
    Must(pqc_sequence_flush(sequence)); /* else the drop discards rows that are still being sent */
    pqc_decoder_close(decoder); Must(pqc_sequence_drop(sequence));
  }
  pqc_cache_close(cache); pqc_client_close(client);
}
