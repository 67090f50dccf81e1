// Messages of the plug-in, among those of llama.cpp.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_LOG_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_LOG_H_

#include <cstdio>
#include <string>

namespace pqcached::llama {

// Prints one line.
inline void Log(const std::string& line) {
  std::fprintf(stderr, "ggml-pqcached: %s\n", line.c_str());
}

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_LOG_H_
