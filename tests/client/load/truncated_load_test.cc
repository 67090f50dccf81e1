// Loads of a sequence that is truncated, and gets other rows, between two of their layers.
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "pqcached/client.hpp"
#include "pqcached/operation.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;

constexpr uint64_t kTokens = 700;
// More than a remote load reads ahead: the change meets layers that are not read yet.
constexpr uint32_t kLayers = 6;
constexpr size_t kKeyElements = kTokens * Layer::kKvHeads * Layer::kKeyDim;
constexpr size_t kValueElements = kTokens * Layer::kKvHeads * Layer::kValueDim;

// Memory whose first writer stops until Release: one at a time.
class HeldMemory {
 public:
  explicit HeldMemory(size_t size_bytes) : size_bytes_(size_bytes) {
    begin_ = static_cast<std::byte*>(
        mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(begin_, MAP_FAILED);
    held_ = this;
    struct sigaction action = {};
    action.sa_sigaction = &OnFault;
    action.sa_flags = SA_SIGINFO;
    EXPECT_EQ(sigaction(SIGSEGV, &action, &former_), 0);
  }
  ~HeldMemory() {
    sigaction(SIGSEGV, &former_, nullptr);
    held_ = nullptr;
    munmap(begin_, size_bytes_);
  }
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;

  std::byte* data() const { return begin_; }
  void AwaitWriter() const {
    while (!has_writer_) poll(nullptr, 0, 1);
  }
  void Release() { released_ = true; }

 private:
  static void OnFault(int, siginfo_t* info, void*) {
    HeldMemory* const held = held_;
    const auto* const address = static_cast<const std::byte*>(info->si_addr);
    if (!held || address < held->begin_ || address >= held->begin_ + held->size_bytes_) {
      signal(SIGSEGV, SIG_DFL);  // the instruction is repeated, and ends the process
      return;
    }
    held->has_writer_ = true;
    while (!held->released_) poll(nullptr, 0, 1);
    mprotect(held->begin_, held->size_bytes_, PROT_READ | PROT_WRITE);
  }

  static inline std::atomic<HeldMemory*> held_ = nullptr;
  const size_t size_bytes_;
  std::byte* begin_ = nullptr;
  struct sigaction former_ = {};
  std::atomic<bool> has_writer_ = false, released_ = false;
};

void Ingest(Sequence& sequence, const Layer& rows) {
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(sequence.Ingest(number, 0, rows.keys(0, kTokens), rows.values(0, kTokens)));
  }
}

struct Loaded {
  Status status;
  Status first_layer;
  std::vector<std::vector<float>> values;  // per layer
};

class TruncatedLoadTest
    : public ::testing::TestWithParam<std::tuple<pqc_path_choice, /*by_other=*/bool>> {
 protected:
  // Loads the first `token_count` tokens of all layers, and calls change(sequence), with one of the
  // handles, when the first layer is there and before the second one has all its rows.
  template <class Change>
  Loaded LoadDuring(uint64_t token_count, const Change& change) {
    Sequence sequence = Must(cache_.CreateSequence());
    Ingest(sequence, old_);
    Sequence other = Must(other_cache_.Attach(sequence.id()));
    HeldMemory held(kKeyElements * sizeof(float));
    std::vector<float> keys[kLayers];
    Loaded loaded;
    std::vector<LayerRows> layers;
    for (uint32_t number = 0; number < kLayers; ++number) {
      keys[number].assign(kKeyElements, 0.0f);
      loaded.values.emplace_back(kValueElements, 0.0f);
    }
    for (uint32_t number = 0; number < kLayers; ++number) {
      const std::byte* const key = number == 1 ? held.data() : AsBytes(keys[number]);
      layers.push_back({number,
                        Tensor(key, PQC_F32, {token_count, Layer::kKvHeads, Layer::kKeyDim}),
                        Tensor(AsBytes(loaded.values[number]), PQC_F32,
                               {token_count, Layer::kKvHeads, Layer::kValueDim})});
    }
    Operation load = Must(Operation::Load(sequence, {0, token_count}, layers));
    held.AwaitWriter();
    change(by_other() ? other : sequence);
    held.Release();
    loaded.status = load.Wait();
    loaded.first_layer = load.WaitLayers(1);
    return loaded;
  }
  // Expects that a layer has values of `rows`.
  void ExpectValues(const Loaded& loaded, uint32_t layer, uint64_t token_count, const Layer& rows) {
    const float* const expected = rows.value(0, 0);
    const size_t count = token_count * Layer::kKvHeads * Layer::kValueDim;
    EXPECT_TRUE(std::equal(expected, expected + count, loaded.values[layer].begin()))
        << "layer " << layer;
  }

  static const std::byte* AsBytes(const std::vector<float>& elements) {
    return reinterpret_cast<const std::byte*>(elements.data());
  }
  pqc_path_choice path() const { return std::get<0>(GetParam()); }
  bool by_other() const { return std::get<1>(GetParam()); }

  const Layer old_{kTokens, 1};
  const Layer new_{kTokens, 2};
  Daemon daemon_{{"--segment-tokens", "512", "--tail-tokens", "512"}};
  Client client_ = daemon_.OpenClient("default", path());
  Client other_client_ = daemon_.OpenClient("default", path());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1, 2, 3, 4, 5})));
  Cache other_cache_ = Must(other_client_.OpenCache(SpecOf("cache", {0, 1, 2, 3, 4, 5})));
};

TEST_P(TruncatedLoadTest, OldAndNewRowsAreNotMixed) {
  const Loaded loaded = LoadDuring(kTokens, [&](Sequence& sequence) {
    MustBeOk(sequence.Truncate(0));
    Ingest(sequence, new_);
  });
  EXPECT_EQ(loaded.status.code(), PQC_ABORTED) << loaded.status.ToString();
  EXPECT_GT(loaded.status.retry_ms(), 0u);
  MustBeOk(loaded.first_layer);
  ExpectValues(loaded, 0, kTokens, old_);
}

TEST_P(TruncatedLoadTest, RowsThatHaveGoneAreNoRangeError) {
  const Loaded loaded =
      LoadDuring(kTokens, [&](Sequence& sequence) { MustBeOk(sequence.Truncate(kTokens / 2)); });
  EXPECT_EQ(loaded.status.code(), PQC_ABORTED) << loaded.status.ToString();
  EXPECT_GT(loaded.status.retry_ms(), 0u);
  ExpectValues(loaded, 0, kTokens, old_);
}

TEST_P(TruncatedLoadTest, NewRowsBehindTheOldOnesDoNotMatter) {
  constexpr uint64_t kLoaded = 600;
  const Loaded loaded = LoadDuring(kLoaded, [&](Sequence& sequence) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, kTokens, new_.keys(0, 100), new_.values(0, 100)));
    }
  });
  MustBeOk(loaded.status);
  for (uint32_t number = 0; number < kLayers; ++number) {
    ExpectValues(loaded, number, kLoaded, old_);
  }
}

TEST_P(TruncatedLoadTest, ATruncationBehindTheLoadIsNoFailureOfItsOwnHandle) {
  constexpr uint64_t kLoaded = 600;
  const Loaded loaded =
      LoadDuring(kLoaded, [](Sequence& sequence) { MustBeOk(sequence.Truncate(kLoaded)); });
  const bool may_fail = path() == PQC_PATH_ONLY_REMOTE || by_other();
  if (may_fail && loaded.status.code() == PQC_ABORTED) return;
  MustBeOk(loaded.status);
  for (uint32_t number = 0; number < kLayers; ++number) {
    ExpectValues(loaded, number, kLoaded, old_);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Paths, TruncatedLoadTest,
    ::testing::Combine(::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                       ::testing::Bool()),
    [](const auto& of) {
      return std::string(std::get<0>(of.param) == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote") +
             (std::get<1>(of.param) ? "ByOther" : "ByItself");
    });

}  // namespace
}  // namespace pqcached
