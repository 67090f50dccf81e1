#include "client/engines/llama/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>

namespace pqcached::llama {
namespace {

constexpr std::string_view kVariable = "PQCACHED_LLAMA";
constexpr const char* kDropVariable = "PQCACHED_LLAMA_DROP";

std::string Wrong(std::string_view word, std::string_view wanted) {
  return std::string(kVariable) + ": \"" + std::string(word) + "\" is not " + std::string(wanted);
}

bool ParseNumber(std::string_view text, uint64_t* number) {
  const char* const end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, *number);
  return error == std::errc() && parsed == end;
}

std::string ParseRatio(std::string_view word, std::string_view value, Settings* settings) {
  const char* const end = value.data() + value.size();
  const auto [parsed, error] = std::from_chars(value.data(), end, settings->ratio);
  const bool is_ratio =
      error == std::errc() && parsed == end && settings->ratio > 0.0 && settings->ratio <= 1.0;
  settings->selected_tokens = 0;
  return is_ratio ? "" : Wrong(word, "ratio=NUMBER above 0 and at most 1");
}

std::string ParseLevelWord(std::string_view word, std::string_view value, Settings* settings) {
  const std::optional<kernels::Level> level = kernels::ParseLevel(value);
  if (!level) return Wrong(word, "kernel_level=NAME, for example avx2");
  if (*level > kernels::BestLevel()) {
    return Wrong(word, "for this processor, whose best level is " +
                           std::string(kernels::LevelName(kernels::BestLevel())));
  }
  settings->exec.level = *level;
  return "";
}

// Numbers, with their least and largest value.
struct NumberKey {
  std::string_view name;
  uint64_t Settings::*number;
  uint64_t least;
  uint64_t most;
};
constexpr uint64_t kMostTokensOfAContext = uint64_t{1} << 30;
constexpr NumberKey kNumbers[] = {
    {"k", &Settings::selected_tokens, 1, kMostTokensOfAContext},
    {"sink_tokens", &Settings::sink_tokens, 0, kMostTokensOfAContext},
    {"rerank", &Settings::rerank, 1, 8},
    {"tail", &Settings::tail, 0, 1},
    {"window_tokens", &Settings::window_tokens, 1, kMostTokensOfAContext},
    {"min_tokens", &Settings::min_tokens, 0, kMostTokensOfAContext},
    {"deadline_ms", &Settings::deadline_ms, 1, 3'600'000},
};

std::string ParseWord(std::string_view word, Settings* settings) {
  if (word.empty()) return "";
  if (word == "exact") {
    settings->selected_tokens = 0;
    settings->ratio = 0.0;
    return "";
  }
  if (word == "offload") {
    settings->offloads = true;
    return "";
  }
  if (word == "drop") {
    settings->drops = true;
    return "";
  }
  const size_t equal = word.find('=');
  const std::string_view key = word.substr(0, equal);
  const std::string_view value = equal == word.npos ? "" : word.substr(equal + 1);
  for (const NumberKey& each : kNumbers) {
    if (key != each.name) continue;
    uint64_t number = 0;
    if (!ParseNumber(value, &number) || number < each.least || number > each.most) {
      return Wrong(word, std::string(each.name) + "=NUMBER of " + std::to_string(each.least) +
                             " to " + std::to_string(each.most));
    }
    settings->*each.number = number;
    if (key == "k") settings->ratio = 0.0;
    return "";
  }
  if (key == "ratio") return ParseRatio(word, value, settings);
  if (key == "kernel_level") return ParseLevelWord(word, value, settings);
  if (key == "index") {
    settings->is_flat = value == "flat";
    return settings->is_flat || value == "pq" ? "" : Wrong(word, "index=pq or index=flat");
  }
  if (key == "endpoint" && !value.empty()) {
    settings->endpoint = value;
    return "";
  }
  return Wrong(
      word,
      "exact, k=NUMBER, ratio=NUMBER, index=NAME, rerank=NUMBER, tail=NUMBER, sink_tokens=NUMBER, "
      "window_tokens=NUMBER, min_tokens=NUMBER, endpoint=ADDRESS, offload, "
      "drop, deadline_ms=NUMBER or kernel_level=NAME");
}

}  // namespace

std::string ParseSettings(std::string_view words, Settings* settings) {
  while (!words.empty()) {
    const size_t comma = std::min(words.find(','), words.size());
    if (std::string wrong = ParseWord(words.substr(0, comma), settings); !wrong.empty()) {
      return wrong;
    }
    words.remove_prefix(std::min(comma + 1, words.size()));
  }
  if (settings->offloads && settings->sink_tokens == 0) {
    return std::string(kVariable) + ": offload needs sink_tokens of 1 at least";
  }
  if (settings->offloads && settings->drops) {
    return std::string(kVariable) + ": offload and drop exclude each other";
  }
  return "";
}

std::string ReadSettings(Settings* settings) {
  const char* const drops = std::getenv(kDropVariable);
  if (drops != nullptr && drops != std::string_view("0") && drops != std::string_view("1")) {
    return std::string(kDropVariable) + " is \"" + drops + "\" and not 0 or 1";
  }
  settings->drops = drops != nullptr && *drops == '1';
  const char* const words = std::getenv(std::string(kVariable).c_str());
  return ParseSettings(words == nullptr ? "" : words, settings);
}

}  // namespace pqcached::llama
