// Engine: what an inference engine does with a sidecar, chosen at random, beside a plain model of what
// must be stored afterwards. Calls that fail because a worker ended are repeated until they are taken.
//
// Single-thread.
#ifndef PQCACHED_TESTS_FAULT_ENGINE_H_
#define PQCACHED_TESTS_FAULT_ENGINE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/layer.h"
#include "tests/stopwatch.h"

namespace pqcached::testing {

class Engine {
 public:
  struct Options {
    std::string endpoint;
    pqc_path_choice path = PQC_PATH_ONLY_LOCAL;
    uint32_t seed = 1;
    uint32_t timeout_ms = 5000;
    std::string cache_name = "cache";
    // Calls that may be repeated are repeated for so long.
    std::chrono::seconds patience{60};
  };

  // What was seen. All but the first three must stay 0.
  struct Counts {
    uint64_t operations = 0;
    uint64_t repeats = 0;   // of calls that a fault has ended
    uint64_t refusals = 0;  // of calls for want of memory
    uint64_t acknowledged_bytes_lost = 0;
    uint64_t wrong_rows_seen = 0;
    uint64_t calls_past_deadline = 0;  // by more than a second

    Counts& operator+=(const Counts& other);
    // That nothing was seen which must not be.
    bool clean() const {
      return acknowledged_bytes_lost == 0 && wrong_rows_seen == 0 && calls_past_deadline == 0;
    }
    std::string ToString() const;
  };

  // Throws, as all that follows, when something fails that must not.
  explicit Engine(const Options& options);

  // False: its session or its cache was refused for want of memory, and the following may not be called.
  bool has_cache() const { return cache_ != nullptr; }

  // One operation.
  void Act();
  // Compares everything that was acknowledged with what is stored.
  void Verify();

  const Counts& counts() const { return counts_; }
  Client& client() { return *client_; }

 private:
  static constexpr uint32_t kLayers = 2;
  static constexpr uint64_t kMaxTokens = 1200;
  static constexpr size_t kMaxSequences = 5;
  static constexpr uint32_t kContents = 3;

  struct Known {
    Sequence sequence;
    std::vector<uint8_t> content;  // by token: which of contents_ its rows are of
    bool indexed = false;
  };

  // Runs a call until it is taken. False: the pool is full, or the call is of no use (any more).
  bool Take(const char* name, const std::function<Status()>& call);
  Status Timed(const char* name, const std::function<Status()>& call);

  void Create();
  void Ingest(Known& known);
  void Append(Known& known);
  void Decode(Known& known);
  void Build(Known& known);
  void Fork(Known& known);
  void Truncate(Known& known);
  void Suspend(Known& known);
  void Look(Known& known);
  void Drop(size_t number);

  const Layer& Content(uint32_t layer, uint8_t content) const {
    return contents_[(content + layer) % kContents];
  }
  std::vector<LayerRows> Rows(uint8_t content, uint64_t begin, uint64_t end) const;
  // Rows of [begin, end) that are not the model's, over both layers; all when they cannot be read.
  uint64_t WrongRows(Known& known, uint64_t begin, uint64_t end);
  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

  const Options options_;
  std::minstd_rand random_;
  std::unique_ptr<const Stopwatch> stopwatch_ = std::make_unique<const Stopwatch>();
  const std::vector<Layer> contents_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Cache> cache_;
  std::vector<Known> sequences_;
  Counts counts_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENGINE_H_
