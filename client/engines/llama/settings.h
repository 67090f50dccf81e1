// Settings of the plug-in: the environment variable PQCACHED_LLAMA, words separated by commas.
//
//   exact             attends to everything (default)
//   min_tokens=4096   leaves shorter contexts to ggml
//   kernel_level=avx2 limits the instruction set
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_SETTINGS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_SETTINGS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/base/exec.h"

namespace pqcached::llama {

struct Settings {
  uint64_t min_tokens = 4096;
  kernels::Exec exec;
};

// Parses the words. Returns what is wrong, with the word and what it may be, or an empty text.
std::string ParseSettings(std::string_view words, Settings* settings);

// Reads the environment.
std::string ReadSettings(Settings* settings);

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_SETTINGS_H_
