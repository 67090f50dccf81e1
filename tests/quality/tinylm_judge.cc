// tinylm_judge: asks the test model its development questions with many methods, after one
// prefill for all of them.
//
//   tinylm_judge --model DIR --prompts DIR --endpoint unix:///PATH --json FILE
//                --methods full,oracle@1/10,pq4x8@1/10,window@256,...
//                [--suite last|first|long] [--tasks niah,mq] [--lengths 1024,4096]
//                [--contexts N] [--questions N]                     (per file, per context; 0 = all)
//
// A method is KIND[@BUDGET]. KIND: full, oracle (exact top-k in this process), flat and pqMxB (the
// sidecar's indexes), graph and heads (the sidecar's graphs and exact scores, with tokens of its own
// for each query head), window (the latest tokens), random. BUDGET: of all tokens attended, sink and
// window included, a ratio (1/10) or a count (256). KIND kcacheNxL has no budget: the N best tokens
// of each query head by the engine's own keys, with the values of the first L layers in the engine;
// kcacheNxLr renormalises their weights.
//
// Suites: `last`: questions after the context. `first`: the question stands before the context, and
// only its last token follows it. `long`: after the context the rows of two other contexts are
// decoded token by token, as a long answer would be, and then questions about both parts are asked
// in one conversation.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "tests/quality/chosen_attention.h"
#include "tests/quality/kcache_attention.h"
#include "tests/tinylm/pqcached_attention.h"
#include "tests/tinylm/prompts.h"

namespace pqcached::quality {
namespace {

using nlohmann::json;
using tinylm::Answer;
using tinylm::Prompt;
using tinylm::Question;

constexpr tinylm::WindowAttention::Options kEnds{.sink_tokens = 16, .window_tokens = 64};
constexpr uint32_t kGeneratedContexts = 2;  // of the suite `long`, after the prefill

std::vector<std::string> SplitList(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

struct Method {
  std::string name, kind;
  Budget budget;
  pqc_index index;  // of flat and pq
  // Of kcache.
  uint32_t top_count = 0, kept_layers = 0;
  bool renormalises = false;
};

Method ParseMethod(const std::string& name) {
  Method method{.name = name,
                .kind = name.substr(0, name.find('@')),
                .budget = {},
                .index = tinylm::FlatIndex()};
  const size_t at = name.find('@');
  if (at != std::string::npos) {
    const std::string budget = name.substr(at + 1);
    if (budget.starts_with("1/")) {
      method.budget.ratio = 1.0 / std::stod(budget.substr(2));
    } else {
      method.budget.count = std::stoull(budget);
    }
  }
  if (std::sscanf(method.kind.c_str(), "kcache%ux%u", &method.top_count, &method.kept_layers) ==
      2) {
    method.renormalises = method.kind.ends_with('r');
    method.kind = "kcache";
  }
  uint32_t subspaces = 0, bits = 0;
  if (std::sscanf(method.kind.c_str(), "pq%ux%u", &subspaces, &bits) == 2) {
    method.index = tinylm::PqIndex(subspaces, bits);
  } else if (method.kind == "graph") {
    method.index = tinylm::GraphIndex();
  } else if (method.kind != "full" && method.kind != "flat" && method.kind != "heads" &&
             method.kind != "oracle" && method.kind != "window" && method.kind != "random" &&
             method.kind != "kcache") {
    throw std::runtime_error("unknown method " + name);
  }
  if ((method.kind == "full" || method.kind == "kcache") == (at != std::string::npos)) {
    throw std::runtime_error(name + ": full and kcache have no budget, all others have one");
  }
  return method;
}

struct Options {
  std::string model, prompts, endpoint, json_path, methods, suite = "last";
  std::string tasks = "niah", lengths = "1024";
  size_t contexts = 0, questions = 0;
};

class Judge {
 public:
  explicit Judge(const Options& options)
      : options_(options),
        methods_(ParseMethods(options.methods)),
        model_(tinylm::LoadModel(options.model)),
        engine_(model_, workers_),
        full_(model_.config, workers_),
        chosen_(model_.config, kEnds, workers_),
        sidecar_(model_,
                 {.endpoint = options.endpoint,
                  .cache_name = "judge",
                  .indexes = BuiltIndexes(methods_),
                  .engine_tokens = kEnds},
                 workers_) {
    for (const Method& method : methods_) {
      std::unique_ptr<KCacheAttention>& kcache = kcaches_[method.kept_layers];
      if (method.kind != "kcache" || kcache) continue;
      kcache = std::make_unique<KCacheAttention>(
          model_,
          KCacheAttention::Options{.endpoint = options.endpoint,
                                   .cache_name = "kcache-" + std::to_string(method.kept_layers),
                                   .kept_layers = method.kept_layers},
          workers_);
    }
    std::erase_if(kcaches_, [](const auto& entry) { return !entry.second; });
  }

  void Run(const std::string& task, uint32_t length) {
    const auto prompts = tinylm::LoadPrompts(options_.prompts, task, length, options_.contexts);
    for (size_t i = 0; i < prompts.size(); ++i) {
      where_ = {{"task", task}, {"length", length}, {"context", i}};
      if (options_.suite == "last") {
        AskAfter(prompts[i]);
      } else if (options_.suite == "first") {
        AskBefore(prompts[i]);
      } else {
        AskLate(prompts[i], i);
      }
      std::fprintf(stderr, "%s %s %u: context %zu of %zu done\n", options_.suite.c_str(),
                   task.c_str(), length, i + 1, prompts.size());
    }
  }

  json ToJson() const { return {{"outcomes", outcomes_}, {"builds", builds_}}; }

 private:
  static std::vector<Method> ParseMethods(const std::string& list) {
    std::vector<Method> methods;
    for (const std::string& name : SplitList(list)) methods.push_back(ParseMethod(name));
    if (methods.empty()) throw std::runtime_error("--methods is empty");
    return methods;
  }

  static std::vector<pqc_index> BuiltIndexes(const std::vector<Method>& methods) {
    std::map<std::string, pqc_index> by_kind;
    for (const Method& method : methods) {
      if (method.index.kind != PQC_INDEX_FLAT) by_kind[method.kind] = method.index;
    }
    std::vector<pqc_index> indexes;
    for (const auto& [kind, index] : by_kind) indexes.push_back(index);
    return indexes;
  }

  void Prefill(const std::vector<uint32_t>& context) {
    std::vector<tinylm::Attention*> attentions = {&full_, &chosen_, &sidecar_};
    for (const auto& [kept_layers, kcache] : kcaches_) attentions.push_back(kcache.get());
    engine_.Prefill(context, attentions);
    for (const auto& build : sidecar_.builds()) {
      for (const auto& layer : build.layers) {
        json entry = where_;
        entry.update({{"subspaces", build.index.subspaces},
                      {"bits", build.index.bits},
                      {"layer", layer.layer},
                      {"seconds", layer.seconds},
                      {"index_bytes", layer.index_bytes},
                      {"codebook_bytes", layer.codebook_bytes}});
        builds_.push_back(std::move(entry));
      }
    }
  }

  tinylm::Attention& Use(const Method& method) {
    if (method.kind == "full") return full_;
    if (method.kind == "kcache") {
      KCacheAttention& kcache = *kcaches_.at(method.kept_layers);
      kcache.SetSelection(method.top_count, method.renormalises);
      return kcache;
    }
    const bool has_heads = method.kind == "graph" || method.kind == "heads";
    if (method.kind == "flat" || has_heads || method.index.kind == PQC_INDEX_PQ) {
      sidecar_.SetGroupRule(has_heads ? PQC_PER_QUERY_HEAD : PQC_SUM_SOFTMAX);
      if (method.budget.count > 0) {
        sidecar_.SetTokenBudget(method.index, method.budget.count);
      } else {
        sidecar_.SetSelection(method.index, method.budget.ratio);
      }
      return sidecar_;
    }
    chosen_.SetChooser(method.kind == "oracle"   ? ChooseExactTopK
                       : method.kind == "window" ? ChooseLatest
                                                 : ChooseRandom,
                       method.budget);
    return chosen_;
  }

  void Record(const Method& method, const tinylm::Attention& attention, size_t question,
              const Answer& answer) {
    const tinylm::AttendedTokens attended = attention.last_attended();
    json outcome = where_;
    outcome.update({{"question", question},
                    {"method", method.name},
                    {"right", answer.is_right},
                    {"steps", answer.step_count},
                    {"seconds", answer.seconds},
                    {"sink", attended.sink},
                    {"window", attended.window},
                    {"selected", attended.selected},
                    {"engine_bytes", attention.engine_kv_bytes()}});
    if (method.kind == "kcache") {
      outcome["sidecar_bytes"] = kcaches_.at(method.kept_layers)->sidecar_row_bytes();
    }
    outcomes_.push_back(std::move(outcome));
  }

  size_t QuestionCount(const Prompt& prompt) const {
    const size_t all = prompt.questions.size();
    return options_.questions > 0 ? std::min(options_.questions, all) : all;
  }

  void AskAfter(const Prompt& prompt) {
    Prefill(prompt.context);
    for (const Method& method : methods_) {
      tinylm::Attention& attention = Use(method);
      for (size_t i = 0; i < QuestionCount(prompt); ++i) {
        Record(method, attention, i, tinylm::Ask(engine_, attention, prompt.questions[i]));
      }
    }
  }

  // The question's first turn alone, moved between the first token and the rest.
  void AskBefore(const Prompt& prompt) {
    for (size_t i = 0; i < QuestionCount(prompt); ++i) {
      const tinylm::Segment& turn = prompt.questions[i].front();
      std::vector<uint32_t> context = prompt.context;
      context.insert(context.begin() + 1, turn.input.begin(), turn.input.end());
      Prefill(context);
      const Question cue = {{.input = {turn.input.back()}, .answer = turn.answer}};
      for (const Method& method : methods_) {
        tinylm::Attention& attention = Use(method);
        Record(method, attention, i, tinylm::Ask(engine_, attention, cue));
      }
    }
  }

  void AskLate(const Prompt& prompt, size_t context) {
    if (others_.empty()) others_ = tinylm::LoadPrompts(options_.prompts, "niah", 1024);
    for (const Method& method : methods_) {
      Prefill(prompt.context);  // closed tails cannot be rolled back
      tinylm::Attention& attention = Use(method);
      std::vector<std::pair<const char*, const Prompt*>> parts = {{"prefill", &prompt}};
      for (uint32_t i = 0; i < kGeneratedContexts; ++i) {
        const Prompt& other = others_[(kGeneratedContexts * context + i) % others_.size()];
        for (size_t t = 1; t < other.context.size(); ++t) {
          engine_.Decode(other.context[t], attention);
        }
        parts.emplace_back("generated", &other);
      }
      size_t number = 0;
      for (const auto& [about, part] : parts) {
        for (size_t i = 0; i < QuestionCount(*part); ++i) {
          where_["about"] = about;
          Record(method, attention, number++, Converse(part->questions[i], attention));
        }
      }
      where_.erase("about");
    }
  }

  // Like Ask, but what was said stays.
  Answer Converse(const Question& question, tinylm::Attention& attention) {
    Answer answer;
    answer.is_right = true;
    std::vector<float> logits;
    for (const tinylm::Segment& turn : question) {
      for (const uint32_t token : turn.input) logits = engine_.Decode(token, attention);
      for (const uint32_t expected : turn.answer) {
        const auto best =
            static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
        answer.is_right = answer.is_right && best == expected;
        logits = engine_.Decode(best, attention);
      }
      answer.step_count += static_cast<uint32_t>(turn.input.size() + turn.answer.size());
    }
    return answer;
  }

  Options options_;
  std::vector<Method> methods_;
  tinylm::Workers workers_;
  tinylm::Model model_;
  tinylm::Engine engine_;
  tinylm::FullAttention full_;
  ChosenAttention chosen_;
  tinylm::PqcachedAttention sidecar_;
  std::map<uint32_t, std::unique_ptr<KCacheAttention>> kcaches_;  // by the layers that they keep
  std::vector<Prompt> others_;
  json where_, outcomes_ = json::array(), builds_ = json::array();
};

Options ParseOptions(int argc, char** argv) {
  Options options;
  std::string contexts = "0", questions = "0";
  const std::map<std::string, std::string*> flags = {
      {"--model", &options.model},       {"--prompts", &options.prompts},
      {"--endpoint", &options.endpoint}, {"--json", &options.json_path},
      {"--methods", &options.methods},   {"--suite", &options.suite},
      {"--tasks", &options.tasks},       {"--lengths", &options.lengths},
      {"--contexts", &contexts},         {"--questions", &questions}};
  for (int i = 1; i < argc; i += 2) {
    const auto flag = flags.find(argv[i]);
    if (flag == flags.end() || i + 1 == argc) {
      throw std::runtime_error(std::string("unknown flag or no value: ") + argv[i]);
    }
    *flag->second = argv[i + 1];
  }
  options.contexts = std::stoull(contexts);
  options.questions = std::stoull(questions);
  if (options.suite != "last" && options.suite != "first" && options.suite != "long") {
    throw std::runtime_error("--suite: must be last, first or long");
  }
  return options;
}

void Main(int argc, char** argv) {
  const Options options = ParseOptions(argc, argv);
  Judge judge(options);
  for (const std::string& length_text : SplitList(options.lengths)) {
    const auto length = static_cast<uint32_t>(std::stoul(length_text));
    for (const std::string& task : SplitList(options.tasks)) {
      if (tinylm::HasPrompts(options.prompts, task, length)) judge.Run(task, length);
    }
  }
  std::ofstream out(options.json_path);
  out << judge.ToJson().dump() << "\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + options.json_path);
}

}  // namespace
}  // namespace pqcached::quality

int main(int argc, char** argv) {
  try {
    pqcached::quality::Main(argc, argv);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tinylm_judge: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
