#include "client/engines/llama/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>

namespace pqcached::llama {
namespace {

constexpr std::string_view kVariable = "PQCACHED_LLAMA";

std::string Wrong(std::string_view word, std::string_view wanted) {
  return std::string(kVariable) + ": \"" + std::string(word) + "\" is not " + std::string(wanted);
}

std::string ParseWord(std::string_view word, Settings* settings) {
  if (word.empty() || word == "exact") return "";
  const size_t equal = word.find('=');
  const std::string_view key = word.substr(0, equal);
  const std::string_view value = equal == word.npos ? "" : word.substr(equal + 1);
  if (key == "min_tokens") {
    const char* const end = value.data() + value.size();
    const auto [parsed, error] = std::from_chars(value.data(), end, settings->min_tokens);
    if (error == std::errc() && parsed == end) return "";
    return Wrong(word, "min_tokens=NUMBER");
  }
  if (key == "kernel_level") {
    const std::optional<kernels::Level> level = kernels::ParseLevel(value);
    if (!level) return Wrong(word, "kernel_level=NAME, for example avx2");
    if (*level > kernels::BestLevel()) {
      return Wrong(word, "for this processor, whose best level is " +
                             std::string(kernels::LevelName(kernels::BestLevel())));
    }
    settings->exec.level = *level;
    return "";
  }
  return Wrong(word, "exact, min_tokens=NUMBER or kernel_level=NAME");
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
  return "";
}

std::string ReadSettings(Settings* settings) {
  const char* const words = std::getenv(std::string(kVariable).c_str());
  return words == nullptr ? "" : ParseSettings(words, settings);
}

}  // namespace pqcached::llama
