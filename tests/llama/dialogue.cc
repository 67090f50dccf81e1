// Feeds tokens to a model as commands say, and prints what it makes of them.
//
//   dialogue MODEL CONTEXT_TOKENS [off]
//
// `off` switches flash attention off.
//
// A command is a line of standard input, and its answer is a line of standard output:
//
//   text COUNT FILE         the first tokens of a text
//   prefill TOKEN...        begins anew with these tokens; the answer is their number
//   ask COUNT [TOKEN...]    feeds tokens, and continues greedily: COUNT words TOKEN:MARGIN, the
//                           margin being the distance to the logit of the second best token
//   rewind                  goes back to the end of the prefill
//   follow TOKEN...         feeds tokens one by one; for each a word BEST:MARGIN:LOGARITHM, which
//                           are the best token, as above, and the logarithm of the fed one's
//                           probability
//   logits FILE             from now on, `follow` appends the logits to a file: floats
//                           [tokens, vocabulary]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

// One: with several, ggml's threads wait for each other in loops, which takes minutes on a machine
// that has other work.
constexpr int kThreads = 1;
constexpr int kChunkTokens = 512;

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "error: %s\n", message.c_str());
  std::exit(1);
}

class Dialogue {
 public:
  Dialogue(const llama_model* model, llama_context* context)
      : vocabulary_(llama_model_get_vocab(model)),
        token_count_(llama_vocab_n_tokens(vocabulary_)),
        context_(context) {}

  void Run(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "text") return Text(words);
    if (command == "prefill") return Prefill(TokensOf(words));
    if (command == "ask") return Ask(words);
    if (command == "rewind") return Rewind();
    if (command == "follow") return Follow(TokensOf(words));
    if (command == "logits") return Logits(words);
    Fail("unknown command " + command);
  }

 private:
  static std::vector<llama_token> TokensOf(std::istringstream& words) {
    return {std::istream_iterator<llama_token>(words), {}};
  }

  void Text(std::istringstream& words) {
    size_t count = 0;
    std::string path;
    words >> count >> path;
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::vector<llama_token> tokens(text.size() + 1);
    const int found = llama_tokenize(vocabulary_, text.data(), static_cast<int>(text.size()),
                                     tokens.data(), static_cast<int>(tokens.size()), true, false);
    if (!file || found < static_cast<int>(count)) Fail(path + " has too few tokens");
    for (size_t i = 0; i < count; ++i) std::printf("%d ", tokens[i]);
  }

  void Prefill(std::vector<llama_token> tokens) {
    llama_memory_clear(llama_get_memory(context_), true);
    end_ = 0;
    pending_ = {};
    Feed(std::move(tokens));
    prefill_end_ = end_;
    prefill_logits_ = logits_;
    std::printf("%d", end_);
  }

  // The last token that a question has generated is fed with the next one's.
  void Ask(std::istringstream& words) {
    int count = 0;
    words >> count;
    std::vector<llama_token> tokens = TokensOf(words);
    tokens.insert(tokens.begin(), pending_.begin(), pending_.end());
    for (int i = 0; i < count; ++i) {
      if (!tokens.empty()) Feed(std::move(tokens));
      const Best best = FindBest();
      std::printf("%d:%g ", best.token, best.margin);
      tokens = {best.token};
    }
    pending_ = std::move(tokens);
  }

  void Rewind() {
    llama_memory_seq_rm(llama_get_memory(context_), 0, prefill_end_, -1);
    end_ = prefill_end_;
    logits_ = prefill_logits_;
    pending_ = {};
  }

  void Follow(const std::vector<llama_token>& tokens) {
    for (const llama_token token : tokens) {
      const Best best = FindBest();
      double whole = 0.0;
      for (const float logit : logits_) whole += std::exp(double{logit} - best.logit);
      const double logarithm = logits_[static_cast<size_t>(token)] - best.logit - std::log(whole);
      std::printf("%d:%g:%.9g ", best.token, best.margin, logarithm);
      if (logits_file_.is_open()) {
        logits_file_.write(reinterpret_cast<const char*>(logits_.data()),
                           static_cast<std::streamsize>(logits_.size() * sizeof(float)));
        if (!logits_file_) Fail("the logits could not be written");
      }
      Feed({token});
    }
  }

  void Logits(std::istringstream& words) {
    std::string path;
    words >> path;
    logits_file_.open(path, std::ios::binary);
    std::printf("%d", token_count_);
  }

  struct Best {
    llama_token token;
    float logit;
    float margin;
  };

  Best FindBest() {
    const auto best = std::max_element(logits_.begin(), logits_.end());
    const float logit = std::exchange(*best, -INFINITY);
    const float second = *std::max_element(logits_.begin(), logits_.end());
    *best = logit;
    return {static_cast<llama_token>(best - logits_.begin()), logit, logit - second};
  }

  // Afterwards logits_ has the logits behind the last token.
  void Feed(std::vector<llama_token> tokens) {
    for (size_t begin = 0; begin < tokens.size(); begin += kChunkTokens) {
      const size_t count = std::min<size_t>(kChunkTokens, tokens.size() - begin);
      const llama_batch batch =
          llama_batch_get_one(tokens.data() + begin, static_cast<int32_t>(count));
      if (llama_decode(context_, batch) != 0) Fail("llama_decode has failed");
    }
    end_ += static_cast<int>(tokens.size());
    const float* const logits = llama_get_logits_ith(context_, -1);
    logits_.assign(logits, logits + token_count_);
  }

  const llama_vocab* vocabulary_;
  int token_count_;
  llama_context* context_;
  std::vector<float> logits_, prefill_logits_;
  std::vector<llama_token> pending_;
  std::ofstream logits_file_;
  int end_ = 0, prefill_end_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: dialogue MODEL CONTEXT_TOKENS [off]\n");
    return 2;
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) Fail("the model could not be loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
  params.n_batch = params.n_ubatch = kChunkTokens;
  if (argc == 4 && std::strcmp(argv[3], "off") == 0) {
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  }
  params.n_threads = params.n_threads_batch = kThreads;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) Fail("no context could be made");
  Dialogue dialogue(model, context);
  for (std::string line; std::getline(std::cin, line);) {
    dialogue.Run(line);
    std::printf("\n");
    std::fflush(stdout);
  }
  llama_free(context);
  llama_model_free(model);
  llama_backend_free();
}
