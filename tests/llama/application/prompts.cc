// An application with llama.cpp that uses libpqcached_llama. It does what commands say, and prints
// one line for each.
//
//   prompts MODEL CELLS ENDPOINT NAME [unified] [bf16] [f32] [says_f16] [plain_attention]
//           [timeout=MS] [second=MODEL]
//
// A command is a line of standard input. SEQ is a sequence, TOKEN... its tokens from position 0 on.
//
//   compute SEQ BEGIN FILE TOKEN...  decodes the tokens from BEGIN on, and then 64 greedily; appends
//                                    the logits of all 65 to the file, and prints the 64 tokens
//   save SEQ TOKEN...                the calls of the library: STATUS TOKENS MILLISECONDS MESSAGE
//   restore SEQ TOKEN...
//   match 0 TOKEN...
//   cells SEQ                        prints the first and the last position of the sequence
//   clear SEQ                        empties the sequence
//   remove SEQ BEGIN END             removes positions
//   move SEQ BEGIN DELTA             moves positions
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "pqcached_llama.h"

namespace {

constexpr uint32_t kSequences = 4;
constexpr int kAnswerTokens = 64;
constexpr int kStepTokens = 128;

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "error: %s\n", message.c_str());
  std::exit(1);
}

class Application {
 public:
  Application(llama_context* context, pqc_llama_cache* cache)
      : context_(context),
        memory_(llama_get_memory(context)),
        vocabulary_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)))),
        cache_(cache) {}

  void Run(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    int sequence = 0;
    words >> command >> sequence;
    if (command == "compute") return Compute(sequence, words);
    if (command == "save" || command == "restore" || command == "match") {
      return Call(command, sequence, TokensOf(words));
    }
    if (command == "cells") {
      std::printf("%d %d", llama_memory_seq_pos_min(memory_, sequence),
                  llama_memory_seq_pos_max(memory_, sequence));
      return;
    }
    int begin = -1, end = -1;
    words >> begin >> end;
    if (command == "clear" || command == "remove") {
      std::printf("%d", llama_memory_seq_rm(memory_, sequence, begin, end));
      return;
    }
    if (command == "move") return llama_memory_seq_add(memory_, sequence, begin, -1, end);
    Fail("unknown command " + command);
  }

 private:
  static std::vector<llama_token> TokensOf(std::istringstream& words) {
    return {std::istream_iterator<llama_token>(words), {}};
  }

  void Call(const std::string& command, int sequence, const std::vector<llama_token>& tokens) {
    uint64_t count = 0;
    const auto begin = std::chrono::steady_clock::now();
    const pqc_status status =
        command == "save"
            ? pqc_llama_save(cache_, context_, sequence, tokens.data(), tokens.size(), &count)
        : command == "restore"
            ? pqc_llama_restore(cache_, context_, sequence, tokens.data(), tokens.size(), &count)
            : pqc_llama_match(cache_, tokens.data(), tokens.size(), &count);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    std::printf("%s %d %.3f %s", pqc_status_name(status), static_cast<int>(count), time.count(),
                pqc_llama_last_error());
  }

  // In batches that end at multiples of 128 tokens, and the last token alone where it would end
  // one: then a restored prompt has the batches that a computed one has.
  void Compute(int sequence, std::istringstream& words) {
    size_t begin = 0;
    std::string path;
    words >> begin >> path;
    std::vector<llama_token> tokens = TokensOf(words);
    FILE* const file = std::fopen(path.c_str(), "ab");
    if (file == nullptr) Fail("no file " + path);
    const size_t count = tokens.size();
    while (begin < count) {
      size_t end = std::min(count, begin - begin % kStepTokens + kStepTokens);
      if (end == count && end % kStepTokens == 0 && end - begin > 1) --end;
      Decode(sequence, begin,
             {tokens.begin() + static_cast<long>(begin), tokens.begin() + static_cast<long>(end)});
      begin = end;
    }
    for (int i = 0; i < kAnswerTokens; ++i) {
      const float* const logits = llama_get_logits_ith(context_, -1);
      std::fwrite(logits, sizeof(float), static_cast<size_t>(vocabulary_), file);
      const auto token =
          static_cast<llama_token>(std::max_element(logits, logits + vocabulary_) - logits);
      std::printf("%d ", token);
      Decode(sequence, begin++, {token});
    }
    std::fwrite(llama_get_logits_ith(context_, -1), sizeof(float), static_cast<size_t>(vocabulary_),
                file);
    std::fclose(file);
  }

  void Decode(int sequence, size_t position, const std::vector<llama_token>& tokens) {
    llama_batch batch = llama_batch_init(static_cast<int32_t>(tokens.size()), 0, 1);
    batch.n_tokens = static_cast<int32_t>(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      batch.token[i] = tokens[i];
      batch.pos[i] = static_cast<llama_pos>(position + i);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = sequence;
      batch.logits[i] = i + 1 == tokens.size();
    }
    if (llama_decode(context_, batch) != 0) Fail("llama_decode has failed");
    llama_batch_free(batch);
  }

  llama_context* context_;
  llama_memory_t memory_;
  int vocabulary_;
  pqc_llama_cache* cache_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) Fail("too few arguments");
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) Fail("the model could not be loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
  params.n_batch = params.n_ubatch = 128;
  params.n_seq_max = kSequences;
  params.n_threads = params.n_threads_batch = 1;
  params.kv_unified = false;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  pqc_llama_options options = PQC_INIT(pqc_llama_options);
  options.endpoint = argv[3];
  options.model_name = argv[4];
  llama_model* described = model;
  for (int i = 5; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "unified") params.kv_unified = true;
    if (word == "plain_attention") params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (word == "bf16") params.type_k = params.type_v = GGML_TYPE_BF16;
    if (word == "f32") params.type_k = params.type_v = GGML_TYPE_F32;
    if (word == "q8_0") params.type_k = params.type_v = GGML_TYPE_Q8_0;
    if (word == "bf16") options.kv_dtype = PQC_BF16;
    if (word == "f32") options.kv_dtype = PQC_F32;
    if (word == "says_f16") options.kv_dtype = PQC_F16;
    if (word.rfind("timeout=", 0) == 0) {
      options.timeout_ms = static_cast<uint32_t>(std::atoi(word.c_str() + 8));
    }
    if (word.rfind("second=", 0) == 0) {
      described = llama_model_load_from_file(word.c_str() + 7, llama_model_default_params());
    }
  }
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) Fail("no context could be made");
  pqc_llama_cache* cache = nullptr;
  const pqc_status status = pqc_llama_cache_open(described, &options, &cache);
  std::printf("%s 0 0 %s\n", pqc_status_name(status), pqc_llama_last_error());
  std::fflush(stdout);
  Application application(context, cache);
  for (std::string line; std::getline(std::cin, line);) {
    application.Run(line);
    std::printf("\n");
    std::fflush(stdout);
  }
  pqc_llama_cache_close(cache);
  llama_free(context);
  llama_model_free(model);
  llama_backend_free();
}
