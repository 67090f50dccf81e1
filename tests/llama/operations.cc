// Runs random operations of llama.cpp's API on a model, and writes the logits of all tokens that
// are asked for. The operations depend on the seed only, so that two runs, with and without the
// plug-in, are compared number by number. `paced` waits between operations, so that the sidecar can
// keep up. `alone` computes on one thread.
//
//   operations MODEL OUTPUT SEED COUNT [unified] [bf16] [paced] [alone]
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

namespace {

constexpr int kSequences = 4;
constexpr int kCells = 2048;  // of all sequences together
constexpr int kMostTokens = kCells / kSequences - 96;
constexpr int kThreads = 2;

class Operations {
 public:
  Operations(llama_model* model, llama_context* context, FILE* output, uint32_t seed,
             bool is_unified, bool can_shift, bool is_paced)
      : context_(context),
        memory_(llama_get_memory(context)),
        output_(output),
        vocabulary_(llama_vocab_n_tokens(llama_model_get_vocab(model))),
        random_(seed),
        is_unified_(is_unified),
        is_paced_(is_paced),
        can_shift_(can_shift && llama_memory_can_shift(memory_)) {}

  void RunOne() {
    const int kind = Pick(100);
    const int sequence = Pick(kSequences);
    if (kind < 25) return Prefill(sequence, 1 + Pick(90));
    if (kind < 65) return DecodeSome();
    if (kind < 75) return Speculate(sequence);
    if (kind < 80) return Remove(sequence, Pick(length_[sequence] + 1));
    if (kind < 84) return Copy(sequence, Pick(kSequences));
    if (kind < 88) return Shift(sequence);
    if (kind < 90) return RemoveMiddle(sequence);
    if (kind < 93) return Restore(sequence, Pick(kSequences));
    if (kind < 94) return saved_.empty() ? Save() : RestoreAll();
    if (kind < 95) return Reload();
    if (kind < 97) return PrefillBesideDecode(sequence);
    if (kind < 98) return PrefillShared(sequence);
    if (kind < 99) return Keep(sequence);
    llama_memory_clear(memory_, Pick(2) == 1);
    std::fill(std::begin(length_), std::end(length_), 0);
    has_copies_ = false;
  }

 private:
  int Pick(int count) { return static_cast<int>(random_() % static_cast<uint32_t>(count)); }
  bool HasRoom(int sequence, int count) const { return length_[sequence] + count <= kMostTokens; }

  struct Token {
    int sequence;
    bool has_logits;
    int other = -1;  // another sequence that has the token
  };

  // Decodes random tokens, each behind its sequence, and writes logits.
  void Decode(const std::vector<Token>& tokens) {
    if (tokens.empty()) return;
    llama_batch batch = llama_batch_init(static_cast<int>(tokens.size()), 0, 2);
    batch.n_tokens = static_cast<int>(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      batch.token[i] = Pick(vocabulary_);
      batch.pos[i] = length_[tokens[i].sequence]++;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = tokens[i].sequence;
      batch.logits[i] = tokens[i].has_logits;
      if (tokens[i].other < 0) continue;
      batch.seq_id[i][batch.n_seq_id[i]++] = tokens[i].other;
      ++length_[tokens[i].other];
    }
    if (const int status = llama_decode(context_, batch); status != 0) {
      std::fprintf(stderr, "error: llama_decode returned %d\n", status);
      std::exit(1);
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (!tokens[i].has_logits) continue;
      const float* logits = llama_get_logits_ith(context_, static_cast<int32_t>(i));
      std::fwrite(logits, sizeof(float), static_cast<size_t>(vocabulary_), output_);
    }
    llama_batch_free(batch);
  }

  void Prefill(int sequence, int count) {
    if (!HasRoom(sequence, count)) return;
    std::vector<Token> tokens(static_cast<size_t>(count), {sequence, false});
    tokens.back().has_logits = true;
    Decode(tokens);
  }

  void DecodeSome() {
    std::vector<Token> tokens;
    for (int sequence = 0; sequence < kSequences; ++sequence) {
      if (Pick(2) == 0 && HasRoom(sequence, 1)) tokens.push_back({sequence, true});
    }
    Decode(tokens);
  }

  // Decodes a draft, and removes what was not accepted.
  void Speculate(int sequence) {
    const int draft = 2 + Pick(5);
    if (!HasRoom(sequence, draft)) return;
    Decode(std::vector<Token>(static_cast<size_t>(draft), {sequence, true}));
    Remove(sequence, length_[sequence] - Pick(draft));
  }

  void Remove(int sequence, int keep) {
    llama_memory_seq_rm(memory_, sequence, keep, -1);
    Measure(sequence);
  }

  // The next token comes behind the last position, which may lie before a gap.
  void Measure(int sequence) {
    length_[sequence] = static_cast<int>(llama_memory_seq_pos_max(memory_, sequence)) + 1;
  }

  // Copies a sequence, or its first tokens: caches of their own can only be copied as a whole.
  void Copy(int from, int to) {
    if (from == to) return;
    const int count = is_unified_ && Pick(2) == 0 ? Pick(length_[from] + 1) : length_[from];
    llama_memory_seq_rm(memory_, to, -1, -1);
    llama_memory_seq_cp(memory_, from, to, -1, count == length_[from] ? -1 : count);
    Measure(to);
    // Both have the same cells, which must not be moved for one of them.
    has_copies_ = true;
  }

  // Removes the other sequences of the cache: all, when it is unified.
  void Keep(int sequence) {
    llama_memory_seq_keep(memory_, sequence);
    for (int each = 0; each < kSequences; ++each) Measure(each);
  }

  // Removes tokens from the middle, so that positions are left out.
  void RemoveMiddle(int sequence) {
    if (length_[sequence] < 20) return;
    const int begin = Pick(length_[sequence] - 10);
    llama_memory_seq_rm(memory_, sequence, begin, begin + 1 + Pick(9));
  }

  // Removes tokens from the middle, and moves the later ones there.
  void Shift(int sequence) {
    if (has_copies_ || !can_shift_ || length_[sequence] < 20) return;
    const int begin = Pick(length_[sequence] - 10);
    const int count = 1 + Pick(9);
    llama_memory_seq_rm(memory_, sequence, begin, begin + count);
    llama_memory_seq_add(memory_, sequence, begin + count, -1, -count);
    length_[sequence] -= count;
  }

  // Saves the state of a sequence, and loads it into another one.
  void Restore(int from, int to) {
    std::vector<uint8_t> state(llama_state_seq_get_size(context_, from));
    const size_t size = llama_state_seq_get_data(context_, state.data(), state.size(), from);
    llama_memory_seq_rm(memory_, to, -1, -1);
    if (llama_state_seq_set_data(context_, state.data(), size, to) == 0) {
      std::fprintf(stderr, "error: the state could not be loaded\n");
      std::exit(1);
    }
    length_[to] = length_[from];
  }

  // Saves the whole context, and loads it some time later.
  void Save() {
    saved_.resize(llama_state_get_size(context_));
    saved_.resize(llama_state_get_data(context_, saved_.data(), saved_.size()));
    std::copy(std::begin(length_), std::end(length_), saved_length_);
    saved_has_copies_ = has_copies_;
  }

  void RestoreAll() {
    if (llama_state_set_data(context_, saved_.data(), saved_.size()) == 0) {
      std::fprintf(stderr, "error: the state of all sequences could not be loaded\n");
      std::exit(1);
    }
    std::copy(std::begin(saved_length_), std::end(saved_length_), length_);
    has_copies_ = saved_has_copies_;
    saved_.clear();
  }

  // The rows are away for some time, in which the sidecar's thread may copy some. No graph shows it.
  void Reload() {
    std::vector<uint8_t> state(llama_state_get_size(context_));
    const size_t size = llama_state_get_data(context_, state.data(), state.size());
    llama_memory_clear(memory_, true);
    if (is_paced_) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (llama_state_set_data(context_, state.data(), size) == 0) {
      std::fprintf(stderr, "error: the state that was cleared could not be loaded\n");
      std::exit(1);
    }
  }

  // Two new sequences have the same tokens, in the same cells.
  void PrefillShared(int sequence) {
    const int other = (sequence + 1) % kSequences;
    if (!is_unified_) return;
    Remove(sequence, 0);
    Remove(other, 0);
    std::vector<Token> tokens(static_cast<size_t>(2 + Pick(60)), {sequence, false, other});
    tokens.back().has_logits = true;
    Decode(tokens);
    has_copies_ = true;
  }

  void PrefillBesideDecode(int sequence) {
    const int count = 2 + Pick(40);
    if (!HasRoom(sequence, count)) return;
    std::vector<Token> tokens(static_cast<size_t>(count), {sequence, false});
    tokens.back().has_logits = true;
    for (int other = 0; other < kSequences; ++other) {
      if (other != sequence && length_[other] > 0 && HasRoom(other, 1)) {
        tokens.push_back({other, true});
      }
    }
    Decode(tokens);
  }

  llama_context* context_;
  llama_memory_t memory_;
  FILE* output_;
  int vocabulary_;
  std::mt19937 random_;
  bool is_unified_;
  bool is_paced_;
  bool can_shift_;
  int length_[kSequences] = {};
  bool has_copies_ = false;  // since the last clearing
  std::vector<uint8_t> saved_;
  int saved_length_[kSequences] = {};
  bool saved_has_copies_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr,
                 "usage: operations MODEL OUTPUT SEED COUNT [unified] [bf16] [paced] [alone]\n");
    return 2;
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = kCells;
  params.n_batch = 256;
  params.n_ubatch = 64;
  params.n_seq_max = kSequences;
  params.n_threads = params.n_threads_batch = kThreads;
  params.kv_unified = false;
  bool is_paced = false;
  for (int i = 5; i < argc; ++i) {
    if (std::strcmp(argv[i], "unified") == 0) params.kv_unified = true;
    if (std::strcmp(argv[i], "paced") == 0) is_paced = true;
    if (std::strcmp(argv[i], "alone") == 0) params.n_threads = params.n_threads_batch = 1;
    if (std::strcmp(argv[i], "bf16") == 0) params.type_k = params.type_v = GGML_TYPE_BF16;
  }
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 1;
  FILE* output = std::fopen(argv[2], "wb");
  if (output == nullptr) return 1;
  Operations operations(model, context, output,
                        static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10)),
                        params.kv_unified, params.type_k != GGML_TYPE_BF16,
                        is_paced);  // llama.cpp cannot rotate bf16
  for (long i = std::strtol(argv[4], nullptr, 10); i > 0; --i) {
    operations.RunOne();
    if (is_paced) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::fclose(output);
  llama_free(context);
  llama_model_free(model);
  llama_backend_free();
}
