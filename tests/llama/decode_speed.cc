// Measures decoding of one token at the end of a long context, whose keys and values are random.
//
//   decode_speed MODEL TOKENS THREADS STEPS on|off|auto [PAUSE|prefill]
//
// Prints the milliseconds of each step, after some that are not counted, and the memory of the
// process. The fifth word is the flash attention. PAUSE: seconds in which a sidecar builds its index
// meanwhile, after the first three steps. `prefill`: the context is computed, which takes the
// milliseconds that are printed first, and all steps are counted.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "tests/llama/stored_context.h"

namespace {

constexpr uint32_t kChunkTokens = 512;

using Milliseconds = std::chrono::duration<double, std::milli>;

// Returns false when llama.cpp has failed.
bool Prefill(llama_context* context, uint32_t tokens) {
  const auto begin = std::chrono::steady_clock::now();
  for (uint32_t done = 0; done < tokens; done += kChunkTokens) {
    std::vector<llama_token> chunk(std::min(kChunkTokens, tokens - done));
    for (uint32_t i = 0; i < chunk.size(); ++i) {
      chunk[i] = static_cast<llama_token>((done + i) * 2654435761u >> 24);
    }
    const auto count = static_cast<int32_t>(chunk.size());
    if (llama_decode(context, llama_batch_get_one(chunk.data(), count)) != 0) return false;
  }
  const Milliseconds time = std::chrono::steady_clock::now() - begin;
  std::printf("prefill_ms %.3f\n", time.count());
  return true;
}

}  // namespace

namespace {

// Returns the memory that lies in mappings whose page faults the plug-in serves: the KV cache, when
// memory of it is given back.
long ServedKib() {
  std::ifstream smaps("/proc/self/smaps");
  long served = 0, resident = 0;
  for (std::string line; std::getline(smaps, line);) {
    if (line.rfind("Rss:", 0) == 0) resident = std::strtol(line.c_str() + 4, nullptr, 10);
    const bool is_served = line.rfind("VmFlags:", 0) == 0 && line.find(" um") != line.npos;
    if (is_served) served += resident;
  }
  return served;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) {
    std::fprintf(stderr,
                 "usage: decode_speed MODEL TOKENS THREADS STEPS on|off|auto [PAUSE|prefill]\n");
    return 2;
  }
  const auto tokens = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
  const int threads = std::atoi(argv[3]), steps = std::atoi(argv[4]);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = tokens + 256;
  params.n_batch = params.n_ubatch = kChunkTokens;
  params.n_threads = params.n_threads_batch = threads;
  params.flash_attn_type = std::strcmp(argv[5], "on") == 0    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                           : std::strcmp(argv[5], "off") == 0 ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                                              : LLAMA_FLASH_ATTN_TYPE_AUTO;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 1;
  const bool has_prefill = argc == 7 && std::strcmp(argv[6], "prefill") == 0;
  const bool has_pause = argc == 7 && !has_prefill;
  if (has_prefill) {
    if (!Prefill(context, tokens)) return 1;
  } else {
    pqcached::llama_test::StoreContext(context, tokens);
  }
  // After a pause, some steps more until the index is used.
  const int first = has_prefill ? 0 : has_pause ? -9 : -3;
  for (int i = first; i < steps; ++i) {
    if (has_pause && i == first + 3) {
      std::this_thread::sleep_for(std::chrono::seconds(std::atoi(argv[6])));
    }
    llama_token token = i + 16;
    const auto begin = std::chrono::steady_clock::now();
    if (llama_decode(context, llama_batch_get_one(&token, 1)) != 0) return 1;
    const Milliseconds time = std::chrono::steady_clock::now() - begin;
    if (i >= 0) std::printf("step_ms %.3f\n", time.count());
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  std::printf("peak_rss_mib %ld\n", usage.ru_maxrss / 1024);
  std::printf("served_kib %ld\n", ServedKib());
  llama_free(context);
  llama_model_free(model);
}
