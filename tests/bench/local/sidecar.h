// A real pqcached for one bench program, and a model's layer to put into it: 32 query heads, 8 kv
// heads, dims 128, bf16 rows.
#ifndef PQCACHED_TESTS_BENCH_LOCAL_SIDECAR_H_
#define PQCACHED_TESTS_BENCH_LOCAL_SIDECAR_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pqcached/client.h"
#include "tests/bench/huge_buffer.h"
#include "tests/client/process.h"

namespace pqcached::bench {

inline constexpr uint32_t kKvHeads = 8;
inline constexpr uint32_t kQueryHeads = 32;
inline constexpr uint32_t kDim = 128;
inline constexpr size_t kRowBytes = 2 * kDim * sizeof(uint16_t);  // of one kv head
inline constexpr size_t kTokenBytes = kKvHeads * kRowBytes;       // of one layer
inline constexpr uint32_t kSinkTokens = 16;
inline constexpr uint32_t kWindowTokens = 64;

// Ends the program when a call failed.
void Must(pqc_status status, const char* what);

// Runs until its end.
class Sidecar {
 public:
  // Its pools are present as a whole, unless flags give another --idle-reserve-bytes.
  explicit Sidecar(const std::vector<std::string>& flags = {});

  // thread_count: of the client's kernels. path: pqc_path_choice.
  pqc_client* OpenClient(uint32_t thread_count, pqc_path_choice path = PQC_PATH_ANY) const;
  pid_t WorkerPid() const;
  // User and system seconds that the process has used, and those below it.
  double CpuSeconds() const;
  // Until the sidecar has nothing to do of its own accord, such as indexes that follow new rows.
  void WaitIdle() const;

 private:
  testing::TempFolder folder_;
  std::string endpoint_;
  testing::Process process_;
};

// Keeps the worker of a sidecar stopped: it answers no RPC.
class StoppedWorker {
 public:
  explicit StoppedWorker(const Sidecar& sidecar);
  ~StoppedWorker();
  StoppedWorker(const StoppedWorker&) = delete;
  StoppedWorker& operator=(const StoppedWorker&) = delete;

 private:
  const pid_t worker_;
};

// A cache of one group of layers.
pqc_cache* OpenCache(pqc_client* client, const char* name, uint64_t capacity_bytes,
                     const pqc_layer_group& group);
// One layer of this shape; `layers` of them.
pqc_cache* OpenCache(pqc_client* client, const char* name, uint64_t capacity_bytes,
                     uint32_t layers = 1);

// K and V of `tokens` tokens: bf16 normal numbers, the keys around some hundred directions per head, so
// that queries find near ones.
class Rows {
 public:
  explicit Rows(uint32_t tokens);

  uint32_t tokens() const { return tokens_; }
  size_t bytes() const { return size_t{tokens_} * kTokenBytes; }
  const std::byte* keys() const { return keys_.data(); }
  const std::byte* values() const { return values_.data(); }
  // As tensors [tokens, heads, dim] of the tokens from `begin` on.
  struct Pair {
    pqc_tensor keys, values;
    uint64_t shape[3];
  };
  void View(uint32_t begin, uint32_t count, Pair* pair) const;

 private:
  uint32_t tokens_;
  HugeBuffer keys_, values_;
};

// The rows again and again until `tokens` are stored in every layer below `layers`.
void Fill(pqc_sequence* sequence, const Rows& rows, uint64_t tokens, uint32_t layers = 1);

pqc_build_options QuickBuild();

// [query_heads, dim] near the keys.
std::vector<float> Queries(uint32_t seed);

pqc_selection Select(double ratio);
pqc_selection SelectCount(uint64_t tokens);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_LOCAL_SIDECAR_H_
