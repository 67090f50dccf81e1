// Two turns of a conversation with complete attention. Usage: chat ENDPOINT. The second turn
// computes only the tokens that the first has not stored.
#include "model.h"  // stands for the rest of an engine; includes pqcached/client.hpp

// clang-format off
int main(int argc, char** argv) {
  // [example]
  auto client = Must(pqcached::Client::Open({.endpoint = argv[argc - 1]}));
  auto cache = Must(client.OpenCache({.name = "chat", .model_fingerprint = "chat-1",
      .groups = Must(pqcached::GroupsOf(kConfig)), .capacity_bytes = 64 << 20}));
  std::vector<uint32_t> tokens;
  for (const uint32_t length : {600, 100}) {  // of the text of a turn
    const uint64_t prompt = AddText(tokens, length);
    uint64_t stored = 0;  // tokens of the prompt whose rows the sidecar has
    auto sequence = Must(cache.CreateSequence(
        {.prompt = {tokens}, .live_index = pqcached::LiveIndex{.sink_tokens = 16}}, &stored));
    Must(sequence.Truncate(stored = std::min(stored, prompt - 1)));  // the last one is decoded
    auto decoder = Must(pqcached::Decoder::Open(
        sequence, {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1}));
    const uint64_t count = prompt - 1 - stored;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {  // prefill
      const auto rows = Project({&tokens[stored], count}, layer, kHeads);
      Must(decoder.Prefill(layer, {rows, {count, kHeads, kDim}}, {rows, {count, kHeads, kDim}}));
    }
    std::vector<float> attention(kQueryHeads * kDim);
    for (; tokens.size() < prompt + 60; tokens.push_back(NextToken(tokens.back()))) {  // decode
      const std::span<const uint32_t> token(&tokens.back(), 1);
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto query = Project(token, layer, kQueryHeads), row = Project(token, layer, kHeads);
        Must(decoder.Decode(layer, {query, {kQueryHeads, kDim}}, {row, {kHeads, kDim}},
            {row, {kHeads, kDim}}, attention, {.begin = tokens.size() - 1, .token_ids = token}));
      }
    }
    Must(sequence.Flush());  // else the end of the sequence discards rows that are still being sent
    std::printf("%d of %d tokens were stored; attention[0] = %.3f\n", static_cast<int>(stored),
                static_cast<int>(prompt), attention[0]);
  }
  // [example]
}
