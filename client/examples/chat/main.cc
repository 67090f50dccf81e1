// Two turns of a conversation with complete attention. Usage: chat ENDPOINT. The second turn
// computes only the tokens that the first has not stored.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "pqcached/client.hpp"

namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 64;
// The model's config.json; an engine reads the file that comes with the weights.
constexpr char kConfig[] =
    R"({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "dtype": "float16"})";

// Stands for a model: returns rows [tokens, heads, kDim] of these tokens in a layer.
std::vector<float> Project(std::span<const uint32_t> tokens, uint32_t layer, uint32_t heads) {
  std::vector<float> rows;
  for (const uint32_t token : tokens) {
    for (uint32_t column = 0; column < heads * kDim; ++column) {
      rows.push_back(static_cast<float>(std::sin((token * 31 + column * 7 + layer) % 997)));
    }
  }
  return rows;
}

// Returns the token that follows; a model samples it from its logits.
uint32_t NextToken(uint32_t token) { return (token * 5 + 1) % 997; }

// Appends `length` tokens that a user has written.
std::vector<uint32_t>& AddText(std::vector<uint32_t>& tokens, uint32_t length) {
  for (uint32_t i = 0; i < length; ++i) tokens.push_back(i * i % 997);
  return tokens;
}

// Ends the program on an error: an example has no caller to report it to.
void Must(const pqcached::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <class T>
T Must(pqcached::Result<T> result) {
  Must(result.status());
  return std::move(*result);
}

// clang-format off
// [example]
// Prefills what is not stored of a prompt, and appends `length` tokens to it.
void Answer(pqcached::Cache& cache, std::vector<uint32_t>& tokens, uint64_t length) {
  uint64_t stored = 0, prompt = tokens.size();
  auto sequence = Must(cache.CreateSequence(
      {.prompt = {tokens}, .live_index = pqcached::LiveIndex{.sink_tokens = 16}}, &stored));
  Must(sequence.Truncate(stored = std::min(stored, prompt - 1)));  // the last token is decoded
  auto decoder = Must(
      pqcached::Decoder::Open(sequence, {.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1}));
  const uint64_t count = prompt - 1 - stored;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto rows = Project({&tokens[stored], count}, layer, kHeads);
    Must(decoder.Prefill(layer, {rows, {count, kHeads, kDim}}, {rows, {count, kHeads, kDim}}));
  }
  std::vector<float> attention(kQueryHeads * kDim);
  for (; tokens.size() < prompt + length; tokens.push_back(NextToken(tokens.back()))) {
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

}  // namespace

int main(int argc, char** argv) {
  auto client = Must(pqcached::Client::Open({.endpoint = argv[argc - 1]}));
  auto cache = Must(client.OpenCache({.name = "chat", .model_fingerprint = "chat-1",
                                      .groups = Must(pqcached::GroupsOf(kConfig)),
                                      .capacity_bytes = 64 << 20}));
  std::vector<uint32_t> tokens;
  for (const uint32_t length : {600u, 100u}) Answer(cache, AddText(tokens, length), 60);
}
// [example]
