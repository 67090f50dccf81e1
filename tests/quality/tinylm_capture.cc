// tinylm_capture: writes Q, K and V of the model's full-attention layers for one context and its
// questions, as fp32 .npy files.
//
//   tinylm_capture --model DIR --prompts DIR --task niah --length 8192 --context 0
//                  --questions 5 --out DIR
//
// k.npy, v.npy [layers, kv_heads, context tokens, 64]; per question i, for its S tokens (input and
// the right answer, fed as decode steps under full attention): q_i.npy [layers, S, query_heads, 64],
// scaled, so that q . k is the logit; k_i.npy, v_i.npy [layers, kv_heads, S, 64].

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <stdexcept>

#include "tests/quality/chosen_attention.h"
#include "tests/tinylm/prompts.h"

namespace pqcached::quality {
namespace {

// Version 1.0 of numpy's format: magic, header length, a Python dict, padded to 64 bytes, data.
void WriteNpy(const std::string& path, const std::vector<size_t>& shape,
              const std::vector<float>& data) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
  for (const size_t extent : shape) header += std::to_string(extent) + ", ";
  header += "), }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  std::ofstream out(path, std::ios::binary);
  out << "\x93NUMPY" << '\x01' << '\0' << static_cast<char>(header.size() % 256)
      << static_cast<char>(header.size() / 256) << header;
  out.write(reinterpret_cast<const char*>(data.data()),
            static_cast<std::streamsize>(data.size() * sizeof(float)));
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

// Full attention that notes the queries it saw.
class RecordingAttention : public tinylm::FullAttention {
 public:
  RecordingAttention(const tinylm::Config& config, tinylm::Workers& workers)
      : FullAttention(config, workers),
        config_(config),
        rows_(config.layer_count(), Layer(config)) {}

  void BeginSequence() override {
    FullAttention::BeginSequence();
    Clear();
  }
  void Prefill(const tinylm::KvChunk& chunk) override {
    FullAttention::Prefill(chunk);
    rows_[chunk.layer].kv.Append(chunk.k, chunk.v, chunk.token_count);
  }
  void Decode(const tinylm::DecodeArgs& args) override {
    FullAttention::Decode(args);
    Layer& layer = rows_[args.layer];
    layer.kv.Append(args.k, args.v, 1);
    layer.q.insert(layer.q.end(), args.q, args.q + size_t{config_.query_heads} * config_.head_dim);
  }

  // Writes what came since the last Clear.
  void Write(const std::string& directory, const std::string& suffix) const {
    std::vector<float> q, k, v;
    size_t tokens = 0;
    const std::vector<uint32_t> layers = config_.full_layers();
    for (const uint32_t id : layers) {
      const Layer& layer = rows_[id];
      tokens = layer.kv.end_position();
      q.insert(q.end(), layer.q.begin(), layer.q.end());
      for (uint32_t head = 0; head < config_.kv_heads; ++head) {
        const auto floats = tokens * config_.head_dim;
        k.insert(k.end(), layer.kv.k(head, 0), layer.kv.k(head, 0) + floats);
        v.insert(v.end(), layer.kv.v(head, 0), layer.kv.v(head, 0) + floats);
      }
    }
    const std::vector<size_t> shape = {layers.size(), config_.kv_heads, tokens, config_.head_dim};
    WriteNpy(directory + "/k" + suffix + ".npy", shape, k);
    WriteNpy(directory + "/v" + suffix + ".npy", shape, v);
    if (!q.empty()) {
      WriteNpy(directory + "/q" + suffix + ".npy",
               {layers.size(), tokens, config_.query_heads, config_.head_dim}, q);
    }
  }

  void Clear() {
    for (Layer& layer : rows_) {
      layer.q.clear();
      layer.kv.Clear(0);
    }
  }

 private:
  struct Layer {
    explicit Layer(const tinylm::Config& config) : kv(config) {}
    std::vector<float> q;
    tinylm::KvRows kv;  // positions count from the last Clear
  };

  const tinylm::Config& config_;
  std::vector<Layer> rows_;
};

void Main(int argc, char** argv) {
  std::map<std::string, std::string> flags = {{"--questions", "5"}, {"--context", "0"}};
  for (int i = 1; i + 1 < argc; i += 2) flags[argv[i]] = argv[i + 1];
  for (const char* flag : {"--model", "--prompts", "--task", "--length", "--out"}) {
    if (!flags.contains(flag)) throw std::runtime_error(std::string(flag) + " is needed");
  }
  const size_t context = std::stoull(flags["--context"]);
  const auto prompts =
      tinylm::LoadPrompts(flags["--prompts"], flags["--task"],
                          static_cast<uint32_t>(std::stoul(flags["--length"])), context + 1);
  const tinylm::Prompt& prompt = prompts.at(context);

  tinylm::Workers workers;
  const tinylm::Model model = tinylm::LoadModel(flags["--model"]);
  tinylm::Engine engine(model, workers);
  RecordingAttention attention(model.config, workers);
  tinylm::Attention* const attentions[] = {&attention};
  engine.Prefill(prompt.context, attentions);
  attention.Write(flags["--out"], "");
  const size_t count = std::min<size_t>(prompt.questions.size(), std::stoull(flags["--questions"]));
  for (size_t i = 0; i < count; ++i) {
    attention.Clear();
    for (const tinylm::Segment& turn : prompt.questions[i]) {
      for (const uint32_t token : turn.input) engine.Decode(token, attention);
      for (const uint32_t token : turn.answer) engine.Decode(token, attention);
    }
    attention.Write(flags["--out"], std::string("_").append(std::to_string(i)));
    engine.Rewind(attention);
  }
}

}  // namespace
}  // namespace pqcached::quality

int main(int argc, char** argv) {
  try {
    pqcached::quality::Main(argc, argv);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tinylm_capture: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
