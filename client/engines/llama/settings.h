// Settings of the plug-in: the environment variable PQCACHED_LLAMA, words separated by commas.
//
//   exact               attends to everything (default)
//   k=2048              attends to sink, window and 2048 selected tokens
//   ratio=0.1           likewise to a tenth of the context, sink and window included
//   index=pq            selects by product quantization (default), or index=flat by exact scores
//   rerank=2            has twice as many tokens proposed, and takes the best by exact scores
//   tail=1              estimates what is not selected (default with ratio), or tail=0
//   sink_tokens=16, window_tokens=64
//   endpoint=unix:///run/pqcached/pqcached.sock   the sidecar, which k and ratio need
//   min_tokens=4096     leaves shorter contexts to ggml
//   offload             lets the application offload tokens (application/pqcached_llama.h)
//   drop                gives the memory of stored rows back (dropped_rows.h), as does
//                       PQCACHED_LLAMA_DROP=1 in the environment
//   deadline_ms=2000    a graph fails when offloaded tokens cannot be read for so long
//   kernel_level=avx2   limits the instruction set
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_SETTINGS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_SETTINGS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/base/exec.h"

namespace pqcached::llama {

struct Settings {
  bool selects() const { return selected_tokens > 0 || ratio > 0.0; }
  // Returns whether attention estimates the tokens that are not selected.
  bool estimates_tail() const {
    return selects() && ratio < 1.0 && (tail == kTailByBudget ? ratio > 0.0 : tail == 1);
  }
  bool offloads_or_drops() const { return offloads || drops; }
  bool uses_sidecar() const { return selects() || offloads_or_drops(); }

  uint64_t selected_tokens = 0;  // k
  double ratio = 0.0;
  bool is_flat = false;
  uint64_t rerank = 1;
  static constexpr uint64_t kTailByBudget = 2;
  uint64_t tail = kTailByBudget;
  uint64_t sink_tokens = 16;
  uint64_t window_tokens = 64;
  std::string endpoint = "unix:///run/pqcached/pqcached.sock";
  uint64_t min_tokens = 4096;
  bool offloads = false;
  bool drops = false;
  uint64_t deadline_ms = 2000;
  kernels::Exec exec;
};

// Parses the words. Returns what is wrong, with the word and what it may be, or an empty text.
std::string ParseSettings(std::string_view words, Settings* settings);

// Reads the environment.
std::string ReadSettings(Settings* settings);

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_SETTINGS_H_
