// Runs random operations on sequences that are longer than the context, and writes the logits of
// all tokens that are asked for. With `offload` the application offloads tokens after every batch;
// without it, the context has to have cells for all tokens. The operations depend on the seed only,
// so that both runs are compared number by number.
//
//   offloading MODEL OUTPUT SEED COUNT CELLS UBATCH [unified] [offload] [persistent]
//              [slow] [copy|shift|hole]
//
// PQCACHED_LLAMA_REGISTER in the environment: the plug-in that the program loads itself.
//
// After a failed batch the program says so and ends; `persistent` repeats the batch instead. `slow` waits between
// operations. At the
// end sequence 0 is changed (`copy`, `shift` or `hole`), and the result of its next batch printed,
// then that of a batch after the sequence was removed.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "pqcached_llama.h"

namespace {

constexpr int kSequences = 2;
constexpr int kMostTokens = 1400;  // of a sequence
constexpr int kWindowTokens = 32;  // as in PQCACHED_LLAMA
constexpr int kMostBatch = 96;
constexpr int kMostFirstBatch = 60;  // longer prefills without offloaded tokens are ggml's
constexpr int kThreads = 2;
constexpr int kRepetitions = 50;

class Offloading {
 public:
  Offloading(llama_model* model, llama_context* context, FILE* output, uint32_t seed, bool offloads,
             bool is_persistent)
      : context_(context),
        memory_(llama_get_memory(context)),
        output_(output),
        vocabulary_(llama_vocab_n_tokens(llama_model_get_vocab(model))),
        random_(seed),
        offloads_(offloads),
        is_persistent_(is_persistent) {}

  void RunOne() {
    const int kind = Pick(100);
    const int sequence = Pick(kSequences);
    if (kind < 30) return Feed({{sequence, 1 + Pick(kMostBatch)}});
    if (kind < 60) return Feed({{sequence, 1}});
    if (kind < 75) return Feed({{0, 1}, {1, 1}});
    if (kind < 85) return Feed({{sequence, 1 + Pick(40)}, {1 - sequence, 1}});
    if (kind < 92) return Remove(sequence, Pick(20));
    if (kind < 97) return Remove(sequence, Pick(length_[sequence] + 1));
    Remove(sequence, length_[sequence]);
  }

  // Changes a sequence in a way in which its offloaded tokens cannot follow.
  void Change(const char* change) {
    while (length_[0] < 4 * kWindowTokens) Feed({{0, 20}});
    const int middle = length_[0] - kWindowTokens / 2;
    int sequence = 0;
    if (std::strcmp(change, "copy") == 0) {
      sequence = 1;
      llama_memory_seq_rm(memory_, 1, -1, -1);
      llama_memory_seq_cp(memory_, 0, 1, -1, -1);
      length_[1] = length_[0];
      Feed({{0, 1}});
    } else {
      llama_memory_seq_rm(memory_, 0, middle, middle + 4);
      if (std::strcmp(change, "shift") == 0) {
        llama_memory_seq_add(memory_, 0, middle + 4, -1, -4);
        length_[0] -= 4;
      }
    }
    std::printf("%d ", TryOne(sequence));
    llama_memory_seq_rm(memory_, sequence, -1, -1);
    length_[sequence] = 0;
    std::printf("%d\n", TryOne(sequence));
  }

 private:
  // Decodes a token behind a sequence. Returns the status.
  int TryOne(int sequence) {
    llama_batch batch = llama_batch_init(1, 0, 1);
    batch.n_tokens = 1;
    batch.token[0] = 1;
    batch.pos[0] = length_[sequence];
    batch.n_seq_id[0] = 1;
    batch.seq_id[0][0] = sequence;
    batch.logits[0] = true;
    const int status = llama_decode(context_, batch);
    llama_batch_free(batch);
    return status;
  }

  struct Part {
    int sequence;
    int count;
  };

  int Pick(int count) { return static_cast<int>(random_() % static_cast<uint32_t>(count)); }

  // Decodes random tokens behind sequences, and writes the logits of the last one of each.
  void Feed(const std::vector<Part>& parts) {
    llama_batch batch = llama_batch_init(2 * kMostBatch, 0, 1);
    for (Part part : parts) {
      if (length_[part.sequence] < 2 * kWindowTokens) {
        part.count = std::min(part.count, kMostFirstBatch);
      }
      for (int i = 0; i < part.count; ++i) {
        const llama_token token = Pick(vocabulary_);
        if (length_[part.sequence] + part.count > kMostTokens) continue;
        const auto at = static_cast<size_t>(batch.n_tokens++);
        batch.token[at] = token;
        batch.pos[at] = length_[part.sequence] + i;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = part.sequence;
        batch.logits[at] = i + 1 == part.count;
      }
    }
    if (batch.n_tokens > 0) Decode(batch);
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
      ++length_[batch.seq_id[i][0]];
      if (!batch.logits[i]) continue;
      const float* logits = llama_get_logits_ith(context_, i);
      std::fwrite(logits, sizeof(float), static_cast<size_t>(vocabulary_), output_);
    }
    for (const Part& part : parts) {
      const int sequence = part.sequence;
      offloaded_[sequence] = std::max(offloaded_[sequence], length_[sequence] - kWindowTokens);
      Offload(sequence);
    }
    llama_batch_free(batch);
  }

  void Decode(const llama_batch& batch) {
    for (int i = 0; i <= kRepetitions; ++i) {
      const int status = llama_decode(context_, batch);
      if (status == 0) return;
      std::fprintf(stderr, "llama_decode returned %d\n", status);
      if (!is_persistent_) std::exit(3);
      for (int sequence = 0; sequence < kSequences; ++sequence) {
        llama_memory_seq_rm(memory_, sequence, length_[sequence], -1);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::exit(3);
  }

  void Offload(int sequence) {
    if (!offloads_ || length_[sequence] == 0) return;
    for (int i = 0; i <= kRepetitions; ++i) {
      const pqc_status status = pqc_llama_offload(context_, sequence);
      if (status == PQC_OK) return;
      // Two sequences of one length cannot be told apart.
      if (status == PQC_FAILED_PRECONDITION && length_[0] == length_[1]) return;
      std::fprintf(stderr, "not offloaded: %s\n", pqc_llama_last_error());
      if (!is_persistent_) std::exit(4);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::exit(4);
  }

  void Remove(int sequence, int count) {
    // llama.cpp takes a token only behind the one before it, which must not be offloaded.
    int keep = std::max(0, length_[sequence] - count);
    if (keep <= offloaded_[sequence]) keep = offloaded_[sequence] = 0;
    llama_memory_seq_rm(memory_, sequence, keep, -1);
    length_[sequence] = keep;
  }

  llama_context* context_;
  llama_memory_t memory_;
  FILE* output_;
  int vocabulary_;
  std::mt19937 random_;
  bool offloads_;
  bool is_persistent_;
  int length_[kSequences] = {};
  int offloaded_[kSequences] = {};  // first tokens that may be offloaded
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr,
                 "usage: offloading MODEL OUTPUT SEED COUNT CELLS UBATCH [unified] [offload] "
                 "[persistent] [slow] [copy|shift|hole]\n");
    return 2;
  }
  const char* change = nullptr;
  bool is_slow = false, is_unified = false, offloads = false, is_persistent = false;
  for (int i = 7; i < argc; ++i) {
    is_slow = is_slow || std::strcmp(argv[i], "slow") == 0;
    is_unified = is_unified || std::strcmp(argv[i], "unified") == 0;
    offloads = offloads || std::strcmp(argv[i], "offload") == 0;
    for (const char* each : {"copy", "shift", "hole"}) {
      if (std::strcmp(argv[i], each) == 0) change = each;
    }
    is_persistent = is_persistent || std::strcmp(argv[i], "persistent") == 0;
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  const char* const plugin = std::getenv("PQCACHED_LLAMA_REGISTER");
  if (plugin != nullptr && pqc_llama_register(plugin) != PQC_OK) {
    std::fprintf(stderr, "not registered: %s\n", pqc_llama_last_error());
    return 5;
  }
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(std::strtoul(argv[5], nullptr, 10));
  params.n_batch = 2 * kMostBatch;
  params.n_ubatch = static_cast<uint32_t>(std::strtoul(argv[6], nullptr, 10));
  params.n_seq_max = kSequences;
  params.n_threads = params.n_threads_batch = kThreads;
  params.kv_unified = is_unified;
  params.type_k = params.type_v = GGML_TYPE_F16;
  llama_context* context = llama_init_from_model(model, params);
  FILE* output = std::fopen(argv[2], "wb");
  if (context == nullptr || output == nullptr) return 1;
  Offloading offloading(model, context, output,
                        static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10)), offloads,
                        is_persistent);
  for (long i = std::strtol(argv[4], nullptr, 10); i > 0; --i) {
    offloading.RunOne();
    if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (change != nullptr) offloading.Change(change);
  std::fclose(output);
  llama_free(context);
  llama_model_free(model);
  llama_backend_free();
}
