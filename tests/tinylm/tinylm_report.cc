// tinylm_report: asks the test model questions about long contexts, with its KV stored in
// several ways, and prints the share of right answers, the memory held, and the time taken.
//
//   tinylm_report --model DIR --prompts DIR --endpoint unix:///PATH [--lengths 32768,8192] [--tasks
//   niah,mq,var,freq]
//                 [--contexts 2] [--questions 5] [--dtype f16|f32] [--json FILE]
//
// One context is prefilled once and shared by all methods; every question starts from the context's
// end.

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "tests/tinylm/pqcached_attention.h"
#include "tests/tinylm/prompts.h"

namespace tinylm {
namespace {

using nlohmann::json;

struct Options {
  std::string model, prompts, endpoint, json_path;
  std::string lengths = "32768,8192", tasks = "niah,mq,var,freq", dtype = "f16";
  std::string contexts = "2", questions = "5";  // per task and length, and per context; 0 = all

  // Parsed and checked numbers.
  std::vector<uint32_t> length_list;
  uint32_t context_limit = 0, question_limit = 0;
};

enum class Kind { kFull, kSidecar, kWindow };

struct Method {
  std::string name;
  Kind kind;
  pqc_index index;
  double ratio;
};

std::vector<Method> Methods() {
  const pqc_index flat = FlatIndex(), pq48 = PqIndex(4, 8), pq26 = PqIndex(2, 6);
  return {{"full attention", Kind::kFull, flat, 1},
          {"exact top-k, 1/5", Kind::kSidecar, flat, 0.2},
          {"exact top-k, 1/10", Kind::kSidecar, flat, 0.1},
          {"pqcached m=4 b=8, 1/5", Kind::kSidecar, pq48, 0.2},
          {"pqcached m=4 b=8, 1/10", Kind::kSidecar, pq48, 0.1},
          {"pqcached m=2 b=6, 1/5", Kind::kSidecar, pq26, 0.2},
          {"pqcached m=2 b=6, 1/10", Kind::kSidecar, pq26, 0.1},
          {"sink + window only", Kind::kWindow, flat, 0}};
}

struct Score {
  uint32_t right = 0, count = 0;
};

struct MethodTally {
  std::map<std::string, Score> scores;  // by task
  AttendedTokens attended;              // at the last step
  uint64_t engine_bytes = 0, sidecar_bytes = 0;
  uint64_t steps = 0;
  double seconds = 0;
};

struct LengthTally {
  uint32_t length = 0, contexts = 0;
  std::vector<MethodTally> methods;
  std::vector<PqcachedAttention::IndexBuild> builds;  // of the last context
  uint64_t pool_bytes = 0;  // of the last context's sequence, all indexes included
  double prefill_seconds = 0;
};

std::vector<std::string> SplitList(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

// A progress bar for long prompts, shown only if stderr is a terminal.
class ProgressBar {
 public:
  ProgressBar(std::string label, size_t token_count)
      : label_(std::move(label)),
        token_count_(token_count),
        is_shown_(isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() {
    if (is_shown_) std::fprintf(stderr, "\r\033[K");
  }

  void Show(size_t done) const {
    if (!is_shown_) return;
    const std::string bar(30 * done / token_count_, '#');
    std::fprintf(stderr, "\r%s [%-30s] %3zu %%", label_.c_str(), bar.c_str(),
                 100 * done / token_count_);
  }

 private:
  std::string label_;
  size_t token_count_;
  bool is_shown_;
};

class Report {
 public:
  explicit Report(const Options& options)
      : options_(options),
        model_(LoadModel(options.model)),
        engine_(model_, workers_),
        full_(model_.config, workers_),
        window_(model_.config, {}, workers_),
        sidecar_(model_,
                 {.endpoint = options.endpoint,
                  .cache_name = "tinylm-" + options.dtype,
                  .dtype = options.dtype == "f32" ? PQC_F32 : PQC_F16,
                  .indexes = {PqIndex(4, 8), PqIndex(2, 6)},
                  .engine_tokens = {}},
                 workers_) {}

  void Run(uint32_t length) {
    LengthTally& tally = lengths_.emplace_back();
    tally.length = length;
    tally.methods.resize(methods_.size());
    for (const std::string& task : SplitList(options_.tasks)) {
      if (!HasPrompts(options_.prompts, task, length)) continue;
      const auto prompts = LoadPrompts(options_.prompts, task, length, options_.context_limit);
      for (size_t i = 0; i < prompts.size(); ++i) {
        Prefill(prompts[i], task + " " + std::to_string(length), tally);
        AskAll(prompts[i], task, i, tally);
      }
    }
    if (tally.contexts == 0) {
      throw std::runtime_error("no prompts of length " + std::to_string(length));
    }
  }

  void Print() const {
    for (const LengthTally& tally : lengths_) PrintLength(tally);
  }

  json ToJson() const;

 private:
  static constexpr double kMebibyte = 1 << 20;

  void Prefill(const Prompt& prompt, const std::string& label, LengthTally& tally) {
    const ProgressBar bar("prefill " + label, prompt.context.size());
    Attention* const attentions[] = {&full_, &window_, &sidecar_};
    const auto start = std::chrono::steady_clock::now();
    engine_.Prefill(prompt.context, attentions, [&](uint32_t done) { bar.Show(done); });
    tally.prefill_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++tally.contexts;
    tally.builds = sidecar_.builds();
    const pqc_sequence_info info = sidecar_.DescribeSequence();
    tally.pool_bytes = info.used_bytes;
    for (size_t m = 0; m < methods_.size(); ++m) {
      tally.methods[m].engine_bytes =
          AttentionOf(methods_[m]).engine_kv_bytes() + engine_.sliding_kv_bytes();
      tally.methods[m].sidecar_bytes =
          methods_[m].kind == Kind::kSidecar ? info.row_bytes + IndexBytes(methods_[m].index) : 0;
    }
  }

  void AskAll(const Prompt& prompt, const std::string& task, size_t context, LengthTally& tally) {
    const size_t limit = options_.question_limit;
    const size_t count = std::min(limit ? limit : prompt.questions.size(), prompt.questions.size());
    for (size_t m = 0; m < methods_.size(); ++m) {
      const Method& method = methods_[m];
      MethodTally& result = tally.methods[m];
      if (method.kind == Kind::kSidecar) sidecar_.SetSelection(method.index, method.ratio);
      for (size_t question = 0; question < count; ++question) {
        const Answer answer = Ask(engine_, AttentionOf(method), prompt.questions[question]);
        Score& score = result.scores[task];
        score.right += answer.is_right;
        ++score.count;
        result.steps += answer.step_count;
        result.seconds += answer.seconds;
        result.attended = AttentionOf(method).last_attended();
        outcomes_.push_back({{"length", tally.length},
                             {"task", task},
                             {"context", context},
                             {"question", question},
                             {"method", method.name},
                             {"right", answer.is_right}});
      }
    }
  }

  Attention& AttentionOf(const Method& method) {
    switch (method.kind) {
      case Kind::kFull:
        return full_;
      case Kind::kSidecar:
        return sidecar_;
      case Kind::kWindow:
        return window_;
    }
    __builtin_unreachable();
  }

  uint64_t IndexBytes(const pqc_index& index) const {
    uint64_t bytes = 0;
    for (const auto& build : sidecar_.builds()) {
      if (build.index.subspaces != index.subspaces || build.index.bits != index.bits) continue;
      for (const auto& layer : build.layers) bytes += layer.index_bytes + layer.codebook_bytes;
    }
    return bytes;
  }

  void PrintLength(const LengthTally& tally) const;

  Options options_;
  Workers workers_;
  Model model_;
  Engine engine_;
  FullAttention full_;
  WindowAttention window_;
  PqcachedAttention sidecar_;
  std::vector<Method> methods_ = Methods();
  std::vector<LengthTally> lengths_;
  json outcomes_ = json::array();
};

void Report::PrintLength(const LengthTally& tally) const {
  std::printf(
      "\nContexts of %u tokens: right answers of all; KV held by engine and sidecar in MiB\n%-24s",
      tally.length, "");
  for (const auto& [task, score] : tally.methods[0].scores) std::printf("%8s", task.c_str());
  std::printf("%25s%11s%11s%9s\n", "sink+window+selected", "engine", "sidecar", "ms/token");
  for (size_t m = 0; m < methods_.size(); ++m) {
    const MethodTally& method = tally.methods[m];
    std::printf("%-24s", methods_[m].name.c_str());
    for (const auto& [task, score] : method.scores)
      std::printf("%5u/%-2u", score.right, score.count);
    std::printf("%14llu+%3llu+%6llu", static_cast<unsigned long long>(method.attended.sink),
                static_cast<unsigned long long>(method.attended.window),
                static_cast<unsigned long long>(method.attended.selected));
    std::printf("%11.2f%11.2f%9.2f\n", static_cast<double>(method.engine_bytes) / kMebibyte,
                static_cast<double>(method.sidecar_bytes) / kMebibyte,
                1e3 * method.seconds / static_cast<double>(method.steps));
  }
  for (const auto& build : tally.builds) {
    std::printf("index m=%u b=%u:", build.index.subspaces, build.index.bits);
    for (const auto& layer : build.layers) {
      std::printf("  layer %u %.2f s, %.0f KiB codes, %.0f KiB centroids;", layer.layer,
                  layer.seconds, static_cast<double>(layer.index_bytes) / 1024,
                  static_cast<double>(layer.codebook_bytes) / 1024);
    }
    std::printf("  %.2f s in all\n", build.seconds);
  }
  std::printf(
      "prefill, ingest and index builds: %.1f s per context; %.1f MiB of pool per context\n",
      tally.prefill_seconds / tally.contexts, static_cast<double>(tally.pool_bytes) / kMebibyte);
}

json Report::ToJson() const {
  json lengths = json::array();
  for (const LengthTally& tally : lengths_) {
    json methods = json::array(), builds = json::array();
    for (size_t m = 0; m < methods_.size(); ++m) {
      const MethodTally& method = tally.methods[m];
      json scores = json::object();
      for (const auto& [task, score] : method.scores) {
        scores[task] = {{"right", score.right}, {"count", score.count}};
      }
      methods.push_back(
          {{"name", methods_[m].name},
           {"ratio", methods_[m].ratio},
           {"scores", scores},
           {"attended",
            {{"sink", method.attended.sink},
             {"window", method.attended.window},
             {"selected", method.attended.selected}}},
           {"engine_kv_bytes", method.engine_bytes},
           {"sidecar_kv_bytes", method.sidecar_bytes},
           {"ms_per_token", 1e3 * method.seconds / static_cast<double>(method.steps)}});
    }
    for (const auto& build : tally.builds) {
      json layers = json::array();
      for (const auto& layer : build.layers) {
        layers.push_back({{"layer", layer.layer},
                          {"seconds", layer.seconds},
                          {"index_bytes", layer.index_bytes},
                          {"codebook_bytes", layer.codebook_bytes}});
      }
      builds.push_back({{"subspaces", build.index.subspaces},
                        {"bits", build.index.bits},
                        {"seconds", build.seconds},
                        {"layers", layers}});
    }
    lengths.push_back({{"length", tally.length},
                       {"contexts", tally.contexts},
                       {"prefill_seconds_per_context", tally.prefill_seconds / tally.contexts},
                       {"pool_bytes_per_context", tally.pool_bytes},
                       {"methods", methods},
                       {"builds", builds}});
  }
  return {{"dtype", options_.dtype}, {"lengths", lengths}, {"outcomes", outcomes_}};
}

uint32_t ParseNumber(const std::string& text, const char* flag) {
  uint32_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end) {
    throw std::runtime_error(std::string(flag) + ": \"" + text + "\" is no number");
  }
  return number;
}

Options ParseOptions(int argc, char** argv) {
  Options options;
  const std::map<std::string, std::string*> flags = {
      {"--model", &options.model},       {"--prompts", &options.prompts},
      {"--endpoint", &options.endpoint}, {"--json", &options.json_path},
      {"--lengths", &options.lengths},   {"--tasks", &options.tasks},
      {"--contexts", &options.contexts}, {"--questions", &options.questions},
      {"--dtype", &options.dtype}};
  for (int i = 1; i < argc; i += 2) {
    const auto flag = flags.find(argv[i]);
    if (flag == flags.end() || i + 1 == argc) {
      throw std::runtime_error(std::string("unknown flag or no value: ") + argv[i]);
    }
    *flag->second = argv[i + 1];
  }
  if (options.model.empty() || options.prompts.empty() || options.endpoint.empty()) {
    throw std::runtime_error("--model, --prompts and --endpoint are needed");
  }
  if (options.dtype != "f16" && options.dtype != "f32") {
    throw std::runtime_error("--dtype: must be f16 or f32");
  }
  for (const std::string& length : SplitList(options.lengths)) {
    options.length_list.push_back(ParseNumber(length, "--lengths"));
  }
  options.context_limit = ParseNumber(options.contexts, "--contexts");
  options.question_limit = ParseNumber(options.questions, "--questions");
  return options;
}

void Main(int argc, char** argv) {
  const Options options = ParseOptions(argc, argv);
  const auto start = std::chrono::steady_clock::now();
  Report report(options);
  for (const uint32_t length : options.length_list) report.Run(length);
  report.Print();
  std::printf("%s contexts per task, %s questions each (0 = all); %.0f s in all\n",
              options.contexts.c_str(), options.questions.c_str(),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (options.json_path.empty()) return;
  std::ofstream out(options.json_path);
  out << report.ToJson().dump(1) << "\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + options.json_path);
}

}  // namespace
}  // namespace tinylm

int main(int argc, char** argv) {
  try {
    tinylm::Main(argc, argv);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tinylm_report: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
