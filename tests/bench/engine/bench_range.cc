// Exact attention over the stored rows of a sequence, as a client computes it: a chunk of a prefill
// beside the same kernel over the engine's own contiguous copy of the rows, one query beside a plain
// read of the rows, and the share of the machine's multiply peak.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/attend/attend_range.h"
#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "tests/bench/engine/multiply_peak.h"
#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kChunk = 512;
constexpr uint32_t kPrefix = 32 << 10;       // beside the engine's copy
constexpr uint32_t kLongPrefix = 128 << 10;  // for the share of the peak, and for one query
constexpr uint32_t kGroup = kQueryHeads / kKvHeads;
constexpr double kMacsPerLogit = 2 * kDim;  // of the key and of the value
const float kScale = 1.0f / std::sqrt(static_cast<float>(kDim));

// Queries of a chunk, numbers of bf16 as those of a model in bf16 are.
std::vector<uint16_t> ChunkQueries(uint32_t tokens) {
  std::vector<uint16_t> queries;
  for (uint32_t token = 0; token < tokens; ++token) {
    for (const float value : Queries(token)) queries.push_back(kernels::F32ToBf16(value));
  }
  return queries;
}

pqc_query QueryOf(const std::vector<uint16_t>& queries, uint32_t position, uint64_t (*shape)[3]) {
  const uint64_t row = uint64_t{kQueryHeads} * kDim;
  (*shape)[0] = queries.size() / row;
  (*shape)[1] = kQueryHeads;
  (*shape)[2] = kDim;
  pqc_query query = PQC_INIT(pqc_query);
  query.query_position = position;
  query.queries.ptr = const_cast<uint16_t*>(queries.data());
  query.queries.dtype = PQC_BF16;
  query.queries.ndim = 3;
  query.queries.shape = *shape;
  return query;
}

// A sequence of one layer behind which queries stand.
class Stored {
 public:
  Stored(pqc_cache* cache, const Rows& rows, uint32_t tokens) : tokens_(tokens) {
    Must(pqc_sequence_create(cache, &sequence_), "pqc_sequence_create");
    Fill(sequence_, rows, tokens);
  }
  ~Stored() { pqc_sequence_drop(sequence_); }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  void Attend(const std::vector<uint16_t>& queries, std::vector<float>* output,
              std::vector<float>* lse) {
    uint64_t shape[3];
    const pqc_query query = QueryOf(queries, tokens_, &shape);
    output->resize(queries.size());
    lse->resize(queries.size() / kDim);
    pqc_attention out = PQC_INIT(pqc_attention);
    out.output = output->data();
    out.output_capacity = output->size();
    out.lse = lse->data();
    out.lse_capacity = lse->size();
    Must(pqc_attend_range(sequence_, &query, {0, tokens_}, &out), "pqc_attend_range");
  }

 private:
  uint32_t tokens_;
  pqc_sequence* sequence_ = nullptr;
};

// The engine's own copy of the rows: [kv_heads, tokens, 2 * dim], contiguous on huge pages.
class OwnCopy {
 public:
  OwnCopy(const Rows& rows, uint32_t tokens)
      : tokens_(tokens), bytes_(size_t{tokens} * kTokenBytes) {
    for (uint32_t token = 0; token < tokens; ++token) {
      const size_t from = (size_t{token % rows.tokens()} * kKvHeads) * kRowBytes / 2;
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        std::byte* row = bytes_.data() + (size_t{head} * tokens + token) * kRowBytes;
        std::memcpy(row, rows.keys() + from + head * kRowBytes / 2, kRowBytes / 2);
        std::memcpy(row + kRowBytes / 2, rows.values() + from + head * kRowBytes / 2,
                    kRowBytes / 2);
      }
    }
  }

  // Attends as an engine with the kernel would: tile by tile, a kv head at a time, on all threads
  // that call it with the same counter.
  void Attend(const std::vector<uint16_t>& queries, std::atomic<uint32_t>* next,
              std::vector<float>* output, std::vector<float>* lse) const {
    const auto chunk = static_cast<uint32_t>(queries.size() / (kQueryHeads * kDim));
    const uint32_t tile = kernels::kMaxRangeHeads / kGroup;
    const uint32_t tiles = (chunk + tile - 1) / tile;
    std::vector<float> tile_queries, tile_output, tile_lse;
    std::vector<std::byte> scratch;
    for (uint32_t task = (*next)++; task < kKvHeads * tiles; task = (*next)++) {
      const uint32_t kv_head = task / tiles, first = task % tiles * tile;
      const uint32_t tokens = std::min(tile, chunk - first);
      const size_t heads = size_t{tokens} * kGroup;
      tile_queries.resize(heads * kDim);
      tile_output.resize(heads * kDim);
      tile_lse.resize(heads);
      for (size_t i = 0; i < heads; ++i) {
        const uint16_t* from = &queries[At(first, kv_head, i) * kDim];
        for (uint32_t d = 0; d < kDim; ++d)
          tile_queries[i * kDim + d] = kernels::Bf16ToF32(from[d]);
      }
      const kernels::AttendRangeShape shape{.dtype = kernels::DType::kBf16,
                                            .key_dim = kDim,
                                            .value_dim = kDim,
                                            .row_stride_bytes = kRowBytes,
                                            .group_size = kGroup,
                                            .token_count = tokens};
      scratch.resize(kernels::AttendRangeScratchBytes(shape));
      const kernels::RowSpan span{.rows = bytes_.data() + size_t{kv_head} * tokens_ * kRowBytes,
                                  .token_count = tokens_};
      kernels::AttendRange({}, {.shape = shape,
                                .scale = kScale,
                                .query_position = tokens_ + first,
                                .queries = tile_queries,
                                .spans = {&span, 1},
                                .output = tile_output,
                                .lse = tile_lse,
                                .scratch = scratch});
      for (size_t i = 0; i < heads; ++i) {
        const size_t to = At(first, kv_head, i);
        std::copy_n(&tile_output[i * kDim], kDim, &(*output)[to * kDim]);
        (*lse)[to] = tile_lse[i];
      }
    }
  }

  // Reads the rows, part by part, on all threads that call it with the same counter.
  uint64_t Read(std::atomic<uint32_t>* next) const {
    constexpr uint32_t kParts = 32;
    const size_t part = bytes_.size() / kParts / 64 * 64;
    uint64_t sum = 0;
    for (uint32_t i = (*next)++; i < kParts; i = (*next)++) {
      sum += StreamRead(bytes_.data() + i * part, part);
    }
    return sum;
  }

 private:
  // Row of query i of a tile in [tokens, query_heads].
  static size_t At(uint32_t first, uint32_t kv_head, size_t i) {
    return (first + i / kGroup) * kQueryHeads + kv_head * kGroup + i % kGroup;
  }

  uint32_t tokens_;
  HugeBuffer bytes_;
};

void RequireEqual(const std::vector<float>& ours, const std::vector<float>& own) {
  Require(ours.size() == own.size(), "the sizes are equal");
  for (size_t i = 0; i < ours.size(); ++i) {
    Require(std::abs(ours[i] - own[i]) <= 1e-3f, "both compute the same");
  }
}

// Runs work() on `threads` threads, this one included.
void OnThreads(int threads, const auto& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&] { work(); });
  work();
  for (std::thread& other : others) other.join();
}

double SecondsOf(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Interleaved rounds of two pieces of work; returns the ratios `second` over `first`.
Stat Ratios(int rounds, const auto& first, const auto& second) {
  std::vector<double> ratios;
  first();
  second();
  for (int round = 0; round < rounds; ++round) {
    const double of_first = SecondsOf(first);
    ratios.push_back(SecondsOf(second) / of_first);
  }
  return StatOf(ratios);
}

int Main(int argc, char** argv) {
  Report report(argc, argv, 9, "engine");
  const int threads = MachineThreads();
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(static_cast<uint32_t>(threads));
  pqc_cache* cache = OpenCache(client, "range", size_t{2} << 30);
  const Rows rows(8 << 10);
  std::vector<float> output, lse;

  const std::vector<uint16_t> chunk = ChunkQueries(kChunk);
  {
    Stored stored(cache, rows, kPrefix);
    const OwnCopy copy(rows, kPrefix);
    sidecar.WaitIdle();
    std::vector<float> own_output(chunk.size()), own_lse(chunk.size() / kDim);
    const auto ours = [&] { stored.Attend(chunk, &output, &lse); };
    const auto own = [&] {
      std::atomic<uint32_t> next = 0;
      OnThreads(threads, [&] { copy.Attend(chunk, &next, &own_output, &own_lse); });
    };
    const Stat ratio = Ratios(report.rounds(), ours, own);
    RequireEqual(output, own_output);
    report.Add({"prefix_attend_vs_local", "x",
                "the same kernel over the engine's own contiguous copy; chunk of 512 over 32K",
                Better::kHigher, 0.8},
               ratio);
  }

  Stored stored(cache, rows, kLongPrefix);
  {
    const OwnCopy copy(rows, kLongPrefix);
    sidecar.WaitIdle();
    const std::vector<uint16_t> one = ChunkQueries(1);
    std::atomic<uint64_t> sum = 0;
    const Stat ratio = Ratios(
        report.rounds(), [&] { stored.Attend(one, &output, &lse); },
        [&] {
          std::atomic<uint32_t> next = 0;
          OnThreads(threads, [&] { sum += copy.Read(&next); });
        });
    std::vector<float> own_output(one.size()), own_lse(one.size() / kDim);
    std::atomic<uint32_t> tasks = 0;
    copy.Attend(one, &tasks, &own_output, &own_lse);
    RequireEqual(output, own_output);
    report.Add({"exact_decode_vs_stream", "x", "a plain read of the same rows; one query over 128K",
                Better::kHigher, 0.6},
               ratio);
  }
  const double macs = double{kChunk} * kQueryHeads * kLongPrefix * kMacsPerLogit;
  double peak = 0;  // the best of all rounds, because the machine may be busy in some
  std::vector<double> speeds;
  for (int round = 0; round < std::max(1, report.rounds() / 3); ++round) {
    peak = std::max(peak, MultiplyPeak(threads));
    speeds.push_back(macs / SecondsOf([&] { stored.Attend(chunk, &output, &lse); }));
  }
  std::vector<double> shares;
  for (const double speed : speeds) {
    std::printf("chunk of %u over %u: %.0f of %.0f G multiply-adds/s\n", kChunk, kLongPrefix,
                speed / 1e9, peak / 1e9);
    shares.push_back(speed / peak);
  }
  const bool bf16 = kernels::BestLevel() == kernels::Level::kAvx512Bf16;
  report.Add({"prefix_attend_peak_share", "x",
              bf16 ? "the machine's bf16 multiply peak; chunk of 512 over 128K"
                   : "the machine's fp32 multiply peak; chunk of 512 over 128K",
              Better::kHigher, std::nullopt},
             StatOf(shares));
  pqc_cache_close(cache);
  pqc_client_close(client);
  return report.Finish();
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) { return pqcached::bench::Main(argc, argv); }
