// Measures the prefill of a long random prompt, and prints its seconds and the last token's best
// logits.
//
//   prefill_speed MODEL TOKENS THREADS CELLS on|off|auto [offload]
//
// CELLS: of the context. `offload`: tokens are offloaded after each batch of 512, so that CELLS may
// be fewer than TOKENS.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "pqcached_llama.h"

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) {
    std::fprintf(stderr, "usage: prefill_speed MODEL TOKENS THREADS CELLS on|off|auto [offload]\n");
    return 2;
  }
  constexpr int kBatch = 512;
  const auto count = std::strtoul(argv[2], nullptr, 10);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10));
  params.n_batch = params.n_ubatch = kBatch;
  params.n_threads = params.n_threads_batch = std::atoi(argv[3]);
  params.flash_attn_type = std::strcmp(argv[5], "on") == 0    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                           : std::strcmp(argv[5], "off") == 0 ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                                              : LLAMA_FLASH_ATTN_TYPE_AUTO;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 1;
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::mt19937 random(3);
  std::vector<llama_token> tokens(count);
  for (llama_token& token : tokens) {
    token = static_cast<llama_token>(random() % static_cast<uint32_t>(vocabulary));
  }
  const auto begin = std::chrono::steady_clock::now();
  for (size_t first = 0; first < count; first += kBatch) {
    const size_t part = std::min<size_t>(kBatch, count - first);
    const llama_batch batch =
        llama_batch_get_one(tokens.data() + first, static_cast<int32_t>(part));
    if (const int status = llama_decode(context, batch); status != 0) {
      std::fprintf(stderr, "error: llama_decode returned %d\n", status);
      return 1;
    }
    if (argc == 7 && pqc_llama_offload(context, 0) != PQC_OK) {
      std::fprintf(stderr, "error: %s\n", pqc_llama_last_error());
      return 1;
    }
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  std::printf("prefill_s %.3f\n", time.count());
  const float* const logits = llama_get_logits_ith(context, -1);
  for (int i = 0; i < 8; ++i) std::printf("logit %.5f\n", logits[i]);
  llama_free(context);
  llama_model_free(model);
}
