#include "tests/tinylm/reference.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "tests/tinylm/prompts.h"

namespace tinylm {
namespace {

using nlohmann::json;

std::vector<json> ReadLines(const std::string& path) {
  std::ifstream in(path);
  std::vector<json> lines;
  try {
    for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
  } catch (const json::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
  return lines;
}

void Compare(const Answer& answer, const json& expected, const std::string& where,
             ReferenceComparison& result) {
  ++result.question_count;
  std::vector<uint32_t> tokens;
  for (const json& segment : expected.at("outputs")) {
    for (const json& token : segment) tokens.push_back(token);
  }
  size_t i = 0;
  while (i < std::min(tokens.size(), answer.outputs.size()) && tokens[i] == answer.outputs[i].token)
    ++i;
  if (i == tokens.size() && i == answer.outputs.size()) {
    ++result.match_count;
  } else if (i == std::min(tokens.size(), answer.outputs.size())) {
    throw std::runtime_error(where + ": the reference has another number of tokens");
  } else {
    const GeneratedToken& actual = answer.outputs[i];
    result.mismatches.push_back(
        {where + " token " + std::to_string(i), tokens[i], actual.token, actual.margin,
         actual.runner_up == tokens[i] && actual.margin < 2 * kLogitTolerance});
  }
  if (!expected.contains("logits_after_first_input")) return;
  const auto logits = expected.at("logits_after_first_input").get<std::vector<float>>();
  if (logits.size() != answer.first_logits.size()) {
    throw std::runtime_error(where + ": the reference has a different number of logits");
  }
  for (size_t token = 0; token < logits.size(); ++token) {
    const float error = std::abs(logits[token] - answer.first_logits[token]);
    // A NaN counts as the worst error.
    if (!(error <= result.logit_max_abs_error)) {
      result.logit_max_abs_error =
          std::isnan(error) ? std::numeric_limits<float>::infinity() : error;
    }
    ++result.logit_count;
  }
}

}  // namespace

void ReferenceComparison::Add(const ReferenceComparison& other) {
  question_count += other.question_count;
  match_count += other.match_count;
  mismatches.insert(mismatches.end(), other.mismatches.begin(), other.mismatches.end());
  logit_count += other.logit_count;
  logit_max_abs_error = std::max(logit_max_abs_error, other.logit_max_abs_error);
}

ReferenceComparison CompareWithReference(Engine& engine, Attention& attention,
                                         const std::string& prompt_directory,
                                         const std::string& reference_directory,
                                         const std::string& task, uint32_t length,
                                         size_t prompt_limit) {
  const std::string name = task + "_" + std::to_string(length);
  const std::vector<json> references = ReadLines(reference_directory + "/" + name + ".ref.jsonl");
  ReferenceComparison result;
  if (references.empty()) return result;
  const std::vector<Prompt> prompts = LoadPrompts(prompt_directory, task, length, prompt_limit);
  size_t prefilled = prompts.size();  // no context is prefilled yet
  for (const json& reference : references) {
    const size_t line = reference.at("line"), question = reference.at("question");
    if (line >= prompts.size()) continue;
    if (line != prefilled) {
      Attention* const attentions[] = {&attention};
      engine.Prefill(prompts[line].context, attentions);
      prefilled = line;
    }
    const Answer answer = Ask(engine, attention, prompts[line].questions.at(question));
    Compare(answer, reference,
            name + " line " + std::to_string(line) + " question " + std::to_string(question),
            result);
  }
  return result;
}

}  // namespace tinylm
