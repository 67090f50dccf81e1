// Stored rows that are copied back into an engine's memory, by one thread, beside a plain copy of as
// many bytes to the same place: contiguous, and in blocks of 16 tokens.
#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <vector>

#include "pqcached/load.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTokens = 16 << 10;
constexpr uint32_t kLayers = 4;
constexpr uint32_t kBlockTokens = 16;
constexpr uint64_t kBlocks = kTokens / kBlockTokens;
constexpr size_t kPartBytes = size_t{kTokens} * kTokenBytes / 2;  // K or V of a layer

// An engine's KV memory of all layers, [tokens, heads, dim] or [blocks, 16, heads, dim].
class Engine {
 public:
  explicit Engine(bool paged) : paged_(paged), blocks_(kBlocks) {
    std::iota(blocks_.begin(), blocks_.end(), 0);
    std::shuffle(blocks_.begin(), blocks_.end(), std::mt19937(1));
    table_ = PQC_INIT(pqc_block_table);
    table_.blocks = blocks_.data();
    table_.block_count = kBlocks;
    table_.block_tokens = kBlockTokens;
    table_.token_count = kTokens;
    for (uint32_t i = 0; i < 2 * kLayers; ++i) parts_.emplace_back(kPartBytes);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      pqc_layer_rows rows = PQC_INIT(pqc_layer_rows);
      rows.layer = layer;
      rows.keys = TensorOf(parts_[2 * layer]);
      rows.values = TensorOf(parts_[2 * layer + 1]);
      layers_.push_back(rows);
    }
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void Load(pqc_sequence* sequence) {
    Must(pqc_load(sequence, {0, kTokens}, layers_.data(), kLayers), "pqc_load");
  }
  void CopyFrom(const Engine& other) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      std::memcpy(parts_[i].data(), other.parts_[i].data(), kPartBytes);
    }
  }
  // Checks the tokens of all layers against the rows that were stored.
  void Check(const Rows& rows) const {
    constexpr size_t kTokenPart = kTokenBytes / 2;
    for (uint32_t token = 0; token < kTokens; ++token) {
      const size_t from = size_t{token % rows.tokens()} * kTokenPart;
      const size_t to =
          paged_ ? size_t{blocks_[token / kBlockTokens]} * kBlockTokens + token % kBlockTokens
                 : token;
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const std::byte* keys = parts_[2 * layer].data() + to * kTokenPart;
        const std::byte* values = parts_[2 * layer + 1].data() + to * kTokenPart;
        Require(std::memcmp(keys, rows.keys() + from, kTokenPart) == 0 &&
                    std::memcmp(values, rows.values() + from, kTokenPart) == 0,
                "the rows that were stored");
      }
    }
  }

 private:
  pqc_tensor TensorOf(HugeBuffer& memory) {
    static constexpr uint64_t kContiguous[] = {kTokens, kKvHeads, kDim};
    static constexpr uint64_t kPaged[] = {kBlocks, kBlockTokens, kKvHeads, kDim};
    pqc_tensor tensor = PQC_INIT(pqc_tensor);
    tensor.ptr = memory.data();
    tensor.dtype = PQC_BF16;
    tensor.ndim = paged_ ? 4 : 3;
    tensor.shape = paged_ ? kPaged : kContiguous;
    tensor.block_table = paged_ ? &table_ : nullptr;
    return tensor;
  }

  const bool paged_;
  std::vector<uint32_t> blocks_;
  pqc_block_table table_;
  std::deque<HugeBuffer> parts_;  // K and V of each layer
  std::vector<pqc_layer_rows> layers_;
};

int Main(int argc, char** argv) {
  Report report(argc, argv, 15, "engine");
  const Rows rows(4 << 10);
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(PQC_THREADS_CALLER);
  Require(pqc_client_path(client) == PQC_PATH_LOCAL, "the local path");
  pqc_cache* cache = OpenCache(client, "load", uint64_t{1} << 30, kLayers);
  pqc_sequence* sequence = nullptr;
  Must(pqc_sequence_create(cache, &sequence), "pqc_sequence_create");
  Fill(sequence, rows, kTokens, kLayers);
  sidecar.WaitIdle();

  Engine contiguous(false), paged(true), source(false);
  Rounds rounds(1);
  const double bytes = 2.0 * kLayers * kPartBytes;
  const size_t copy =
      rounds.Add("plain copy", bytes, [&](int, int) { contiguous.CopyFrom(source); });
  const size_t load =
      rounds.Add("load, contiguous", bytes, [&](int, int) { contiguous.Load(sequence); });
  const size_t blocks =
      rounds.Add("load, blocks of 16", bytes, [&](int, int) { paged.Load(sequence); });
  rounds.Run(report.rounds());
  contiguous.Load(sequence);
  contiguous.Check(rows);
  paged.Check(rows);
  report.Add(
      {"load_vs_copy", "ratio", "memcpy of the same bytes to the same contiguous memory, 1 thread",
       Better::kHigher, 0.9},
      rounds.Speedup(load, copy));
  report.Add({"load_blocks_vs_copy", "ratio",
              "the same, to blocks of 16 tokens in any order, 1 thread", Better::kHigher, 0.9},
             rounds.Speedup(blocks, copy));
  pqc_sequence_drop(sequence);
  pqc_cache_close(cache);
  pqc_client_close(client);
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
