#include "tests/tinylm/prompts.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace tinylm {
namespace {

std::string PromptPath(const std::string& directory, const std::string& task, uint32_t length) {
  return directory + "/" + task + "_" + std::to_string(length) + ".jsonl";
}

Prompt ParsePrompt(const nlohmann::json& line) {
  Prompt prompt{.context = line.at("context").get<std::vector<uint32_t>>(), .questions = {}};
  for (const auto& question : line.at("questions")) {
    Question segments;
    for (const auto& segment : question.at("segments")) {
      segments.push_back({segment.at("input").get<std::vector<uint32_t>>(),
                          segment.at("answer").get<std::vector<uint32_t>>()});
    }
    prompt.questions.push_back(std::move(segments));
  }
  return prompt;
}

GeneratedToken PickToken(const std::vector<float>& logits) {
  const auto higher = [&](uint32_t a, uint32_t b) { return logits[a] > logits[b]; };
  uint32_t best = 0, second = 1;
  if (higher(second, best)) std::swap(best, second);
  for (uint32_t token = 2; token < logits.size(); ++token) {
    if (higher(token, best)) {
      second = std::exchange(best, token);
    } else if (higher(token, second)) {
      second = token;
    }
  }
  return {best, second, logits[best] - logits[second]};
}

}  // namespace

bool HasPrompts(const std::string& directory, const std::string& task, uint32_t length) {
  return std::filesystem::exists(PromptPath(directory, task, length));
}

std::vector<Prompt> LoadPrompts(const std::string& directory, const std::string& task,
                                uint32_t length, size_t prompt_limit) {
  const std::string path = PromptPath(directory, task, length);
  std::ifstream in(path);
  if (!in) throw std::runtime_error("cannot read " + path);
  std::vector<Prompt> prompts;
  std::string line;
  try {
    while ((prompt_limit == 0 || prompts.size() < prompt_limit) && std::getline(in, line)) {
      prompts.push_back(ParsePrompt(nlohmann::json::parse(line)));
    }
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
  return prompts;
}

Answer Ask(Engine& engine, Attention& attention, const Question& question) {
  const auto start = std::chrono::steady_clock::now();
  Answer answer;
  answer.is_right = true;
  std::vector<float> logits;
  const auto feed = [&](uint32_t token) {
    logits = engine.Decode(token, attention);
    ++answer.step_count;
  };
  for (const Segment& segment : question) {
    for (const uint32_t token : segment.input) feed(token);
    if (answer.first_logits.empty()) answer.first_logits = logits;
    for (size_t i = 0; i < segment.answer.size(); ++i) {
      answer.outputs.push_back(PickToken(logits));
      answer.is_right = answer.is_right && answer.outputs.back().token == segment.answer[i];
      // The logits after the very last token are not needed.
      const bool is_last = &segment == &question.back() && i + 1 == segment.answer.size();
      if (!is_last) feed(answer.outputs.back().token);
    }
  }
  engine.Rewind(attention);
  answer.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return answer;
}

}  // namespace tinylm
