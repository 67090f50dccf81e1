// QuietTenant decodes a token every few milliseconds: an Append of its rows and a TopK of the next
// query, as an engine with one slow request does. It records how long each call takes.
//
// Single-thread.
#ifndef PQCACHED_TESTS_FAULT_TENANTS_QUIET_TENANT_H_
#define PQCACHED_TESTS_FAULT_TENANTS_QUIET_TENANT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/layer.h"
#include "tests/stopwatch.h"

namespace pqcached::testing {

// Milliseconds of each call.
struct Latencies {
  std::vector<double> append;
  std::vector<double> top_k;
};

// The value that a hundredth of the samples exceeds. REQUIRES: there is a sample
double P99(std::vector<double> samples);

class QuietTenant {
 public:
  static constexpr uint32_t kTimeoutMs = 10000;

  // Stores a prompt and builds its index; throws when a call fails.
  QuietTenant(const std::string& endpoint, pqc_path_choice path);

  // Decodes for so long, and at least a few tokens, after the prompt.
  void Decode(std::chrono::milliseconds duration, Latencies& latencies);

  uint64_t calls() const { return calls_; }
  uint64_t calls_past_deadline() const { return calls_past_deadline_; }  // by more than a second
  // Reasons of the calls that failed.
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  template <class Call>
  void Timed(std::vector<double>& milliseconds, const Call& call);

  const Layer layer_;
  Client client_;
  Cache cache_;
  Sequence sequence_;
  std::unique_ptr<const Stopwatch> stopwatch_ = std::make_unique<const Stopwatch>();
  uint64_t calls_ = 0;
  uint64_t calls_past_deadline_ = 0;
  std::vector<std::string> failures_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_TENANTS_QUIET_TENANT_H_
