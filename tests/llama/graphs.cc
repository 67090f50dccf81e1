// Runs a model with prefills, decoding and a draft of two sequences. Writes the logits of all
// tokens, and can record the attention of some graphs: all that a backend sees of it.
//
//   graphs MODEL LOGITS [paced] [RECORDING]
//
// `paced` waits between decoded tokens, so that a sidecar can keep up. A recording has lines of
// words:
//
//   graph NAME                            decoded next
//   rows TENSOR INDEX_TYPE CELLS...       SET_ROWS: the cells that are written, as runs FIRST-LAST
//   attention                             FLASH_ATTN_EXT; the lines that follow describe it
//   parameters NUMBER...                  words of op_params, in hexadecimal
//   operand INDEX TYPE NE*4 NB*4 ROOT OFFSET   INDEX -1 is the node itself. ROOT: the tensor that it
//                                         is a view of, and the offset in bytes from there
//   sees STREAM TOKEN CELLS...            the cells that the mask shows to the first and last token
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

namespace {

constexpr int kCells = 1024;  // of both sequences together
constexpr int kChunk = 48;    // tokens of a prefill's batch, which the plug-in computes
constexpr int kPrefill[] = {6 * kChunk, 3 * kChunk};
constexpr int kDecoded = 24;
constexpr int kDraft = 5;
constexpr int kEncoded = 200;
constexpr ggml_fp16_t kSeen = 0;  // bits of a mask's value

std::string NameOf(const ggml_tensor* tensor) {
  std::string name = tensor->name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name.empty() ? "-" : name;
}

const ggml_tensor* RootOf(const ggml_tensor* tensor) {
  while (tensor->view_src != nullptr) tensor = tensor->view_src;
  return tensor;
}

class Recorder {
 public:
  explicit Recorder(const char* path) : file_(path == nullptr ? nullptr : std::fopen(path, "w")) {}
  ~Recorder() {
    if (file_ != nullptr) std::fclose(file_);
  }

  bool is_open() const { return file_ != nullptr; }

  // Records the next graph; null: none is recorded.
  void Begin(const char* name) {
    is_recording_ = file_ != nullptr && name != nullptr;
    if (is_recording_) std::fprintf(file_, "graph %s\n", name);
  }

  void Record(const ggml_tensor* node) {
    if (!is_recording_) return;
    if (node->op == GGML_OP_SET_ROWS) Rows(node);
    if (node->op == GGML_OP_FLASH_ATTN_EXT) Attention(node);
  }

 private:
  void Rows(const ggml_tensor* node) {
    const ggml_tensor* const cells = node->src[1];
    std::fprintf(file_, "rows %s %d", NameOf(RootOf(node)).c_str(), cells->type);
    std::vector<int64_t> numbers(static_cast<size_t>(cells->ne[0]));
    for (size_t i = 0; i < numbers.size(); ++i) {
      std::memcpy(&numbers[i], static_cast<const char*>(cells->data) + i * cells->nb[0],
                  sizeof(int64_t));
    }
    Runs(numbers);
  }

  void Attention(const ggml_tensor* node) {
    std::fprintf(file_, "attention\nparameters");
    for (const int32_t word : node->op_params) {
      std::fprintf(file_, " %x", static_cast<uint32_t>(word));
    }
    std::fprintf(file_, "\n");
    Operand(-1, node);
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
      if (node->src[i] != nullptr) Operand(i, node->src[i]);
    }
    if (node->src[3] != nullptr) Mask(*node->src[3]);
  }

  void Operand(int index, const ggml_tensor* tensor) {
    std::fprintf(file_, "operand %d %d", index, tensor->type);
    for (const int64_t count : tensor->ne)
      std::fprintf(file_, " %lld", static_cast<long long>(count));
    for (const size_t stride : tensor->nb) std::fprintf(file_, " %zu", stride);
    const ggml_tensor* const root = RootOf(tensor);
    const auto offset =
        static_cast<const char*>(tensor->data) - static_cast<const char*>(root->data);
    // ggml's versions name nodes differently.
    std::fprintf(file_, " %s %td\n", index < 0 ? "-" : NameOf(root).c_str(), offset);
  }

  void Mask(const ggml_tensor& mask) {
    for (int64_t stream = 0; stream < mask.ne[3]; ++stream) {
      for (int64_t token = 0; token < mask.ne[1]; token += std::max<int64_t>(mask.ne[1] - 1, 1)) {
        const char* const row = static_cast<const char*>(mask.data) +
                                static_cast<size_t>(stream) * mask.nb[3] +
                                static_cast<size_t>(token) * mask.nb[1];
        std::vector<int64_t> seen;
        for (int64_t cell = 0; cell < mask.ne[0]; ++cell) {
          ggml_fp16_t value;
          std::memcpy(&value, row + static_cast<size_t>(cell) * mask.nb[0], sizeof(value));
          if (value == kSeen) seen.push_back(cell);
        }
        std::fprintf(file_, "sees %lld %lld", static_cast<long long>(stream),
                     static_cast<long long>(token));
        Runs(seen);
      }
    }
  }

  void Runs(const std::vector<int64_t>& numbers) {
    for (size_t begin = 0; begin < numbers.size();) {
      size_t last = begin;
      while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
      std::fprintf(file_, " %lld-%lld", static_cast<long long>(numbers[begin]),
                   static_cast<long long>(numbers[last]));
      begin = last + 1;
    }
    std::fprintf(file_, "\n");
  }

  FILE* file_;
  bool is_recording_ = false;
};

class Run {
 public:
  Run(const llama_model* model, llama_context* context, FILE* logits, Recorder* recorder,
      bool is_paced)
      : context_(context),
        vocabulary_(llama_vocab_n_tokens(llama_model_get_vocab(model))),
        has_encoder_(llama_model_has_encoder(model)),
        logits_(logits),
        recorder_(recorder),
        is_paced_(is_paced) {}

  void All() {
    if (has_encoder_) Encode();
    Prefill(0);
    // A decoder's tokens see the encoded tokens of their sequence only, which is 0.
    const std::vector<int> sequences = has_encoder_ ? std::vector{0} : std::vector{0, 1};
    if (!has_encoder_) Prefill(1);
    for (int i = 0; i < kDecoded; ++i) {
      Decode(sequences, i == 0 ? "decode" : nullptr);
      if (is_paced_) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    Decode(std::vector<int>(kDraft, 0), "draft");
    Decode({0}, nullptr);
  }

 private:
  int NextToken() { return static_cast<int>(static_cast<uint32_t>(next_ += 37) % 127) + 1; }

  void Encode() {
    std::vector<llama_token> tokens(kEncoded);
    for (llama_token& token : tokens) token = NextToken();
    recorder_->Begin(nullptr);
    if (llama_encode(context_, llama_batch_get_one(tokens.data(), kEncoded)) != 0) std::exit(1);
  }

  void Prefill(int sequence) {
    for (int done = 0; done < kPrefill[sequence]; done += kChunk) {
      const bool is_last = done + kChunk == kPrefill[sequence];
      Decode(std::vector<int>(kChunk, sequence), is_last && sequence == 0 ? "prefill" : nullptr);
    }
  }

  // Decodes a token of each given sequence.
  void Decode(const std::vector<int>& sequences, const char* name) {
    recorder_->Begin(name);
    llama_batch batch = llama_batch_init(static_cast<int>(sequences.size()), 0, 1);
    for (const int sequence : sequences) {
      const int i = batch.n_tokens++;
      batch.token[i] = NextToken();
      batch.pos[i] = length_[sequence]++;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = sequence;
      batch.logits[i] = 1;
    }
    if (llama_decode(context_, batch) != 0) {
      std::fprintf(stderr, "error: llama_decode has failed\n");
      std::exit(1);
    }
    for (int i = 0; i < batch.n_tokens; ++i) {
      std::fwrite(llama_get_logits_ith(context_, i), sizeof(float),
                  static_cast<size_t>(vocabulary_), logits_);
    }
    llama_batch_free(batch);
  }

  llama_context* context_;
  int vocabulary_;
  bool has_encoder_;
  FILE* logits_;
  Recorder* recorder_;
  bool is_paced_;
  uint32_t next_ = 0;
  int length_[2] = {};
};

bool RecordNode(ggml_tensor* node, bool asks, void* recorder) {
  if (asks) static_cast<Recorder*>(recorder)->Record(node);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 5) {
    std::fprintf(stderr, "usage: graphs MODEL LOGITS [paced] [RECORDING]\n");
    return 2;
  }
  const bool is_paced = argc > 3 && std::strcmp(argv[3], "paced") == 0;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  Recorder recorder(argc > 3 + is_paced ? argv[3 + is_paced] : nullptr);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = kCells;
  params.n_batch = params.n_ubatch = 256;
  params.n_seq_max = llama_model_has_encoder(model) ? 1 : 2;  // its bias has no streams
  params.n_threads = params.n_threads_batch = 1;
  if (recorder.is_open()) {
    params.cb_eval = &RecordNode;
    params.cb_eval_user_data = &recorder;
  }
  llama_context* context = llama_init_from_model(model, params);
  FILE* logits = std::fopen(argv[2], "wb");
  if (context == nullptr || logits == nullptr) return 1;
  Run(model, context, logits, &recorder, is_paced).All();
  std::fclose(logits);
  llama_free(context);
  llama_model_free(model);
}
