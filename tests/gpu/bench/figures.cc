#include "tests/gpu/bench/figures.h"

#include <string>

namespace pqcached::bench {
namespace {

Figure Ratio(const char* name, Better better, double goal, const char* against) {
  return {name, "ratio", against, better, goal};
}

Figure Reported(const std::string& name, const char* unit, Better better, const char* what) {
  return {name, unit, what, better, std::nullopt};
}

constexpr const char* kDrift =
    "128K tokens, batch 1, k = 2048; drifting queries over topic runs (methods.md 6.3 e and g)";

}  // namespace

std::vector<Figure> SelectFigures() {
  return {Ratio("gpu_select_128k_over_empty_chain", Better::kLower, 3,
                "empty launches of the same number; 8 kv / 32 query heads, m=2 b=6, batch 1"),
          Ratio("gpu_select_large_share_of_hbm", Better::kHigher, 0.6,
                "device copy bandwidth, the smaller of m=2 b=6 and m=4 b=8; codes of 1 GB"),
          Ratio("gpu_select_vs_torch", Better::kHigher, 20,
                "PyTorch gather + sum + softmax + topk; 128K, m=2 b=6, batch 1")};
}

std::vector<Figure> RowFigures() {
  return {Ratio("gpu_gather_vs_pinned_copy", Better::kHigher, 0.85,
                "pinned copy; 512-byte rows, k = 2048 per head"),
          Ratio("gpu_attend_selected_vs_full_hbm", Better::kHigher, 8,
                "best of PyTorch SDPA and our split-k over all tokens in HBM; 128K, k = 2048, all "
                "hits")};
}

std::vector<Figure> BuildFigures() {
  return {Ratio("gpu_kmeans_vs_cpu", Better::kHigher, 20,
                "our CPU build, all cores; one layer, 128K, 10 iterations and codes"),
          Reported("gpu_prefill_layer_linear_ms", "ms", Better::kLower,
                   "Figure 12a: matrix products of one layer, 8K tokens, cuBLAS"),
          Reported("gpu_prefill_layer_pack_ms", "ms", Better::kLower,
                   "Figure 12a: K and V of one layer, 8K tokens, into page-locked staging"),
          Reported("gpu_prefill_layer_kmeans_ms", "ms", Better::kLower,
                   "Figure 12a: codebooks and codes of one layer, 128K tokens")};
}

std::vector<Figure> StackFigures() {
  return {
      Ratio("gpu_step_512k_over_32k", Better::kLower, 1.15,
            "itself; k = 2048, cache 4096, Llama-3.1-8B-shaped stack; queries as for the cache"),
      Ratio("gpu_tokens_per_s_at_budget_vs_full", Better::kHigher, 3,
            "full KV in HBM, attended by this repository's own kernel; 128K contexts in a fixed "
            "HBM budget, largest batch that fits each"),
      Ratio("gpu_kcache_tokens_per_s_vs_full", Better::kHigher, 1.3,
            "full KV in HBM; KCache mode, 16K, N = 128, values of 1 layer kept; likewise"),
      Reported("gpu_decode_linear_ms", "ms", Better::kLower,
               "Figure 12b: a step of 128K without attention"),
      Reported("gpu_decode_select_ms", "ms", Better::kLower,
               "Figure 12b: what tables and selection add"),
      Reported("gpu_decode_attend_ms", "ms", Better::kLower,
               "Figure 12b: what rows, attention and the block cache add")};
}

std::vector<Figure> CacheFigures() {
  std::vector<Figure> figures;
  const auto add = [&](const std::string& what) {
    figures.push_back(Reported("gpu_tpot_ms_" + what, "ms", Better::kLower, kDrift));
    figures.push_back(Reported("gpu_hit_rate_" + what, "share", Better::kHigher, kDrift));
  };
  add("cache_0");
  for (const char* policy : {"lru", "lfu", "admission"}) {
    for (const char* tokens : {"4096", "8192"}) {
      add("cache_" + std::string(tokens) + "_" + policy + "_k32");
    }
  }
  add("cache_4096_lru_k8");
  add("cache_4096_lru_k128");
  return figures;
}

}  // namespace pqcached::bench
