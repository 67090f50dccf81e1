#include "tests/fuzz/handlers/rewriter.h"

#include <utility>

namespace pqcached::fuzz {
namespace {

constexpr int kPasses = 100;  // after one call of Write: longer than most calls take
constexpr uint16_t kNan = 0x7e00;
constexpr size_t kNanEvery = 61;

void Store(uint16_t& to, uint16_t value) {
  std::atomic_ref(to).store(value, std::memory_order_relaxed);
}

}  // namespace

Rewriter::~Rewriter() {
  calls_ = kEnd;
  calls_.notify_one();
  thread_.join();
}

void Rewriter::SetJobs(std::vector<Job> jobs) {
  const std::lock_guard lock(mutex_);
  jobs_ = std::move(jobs);
}

void Rewriter::Write(size_t job) {
  job_ = job;
  ++calls_;
  calls_.notify_one();
}

void Rewriter::Serve() {
  for (uint32_t seen = 0;;) {
    calls_.wait(seen);
    seen = calls_;
    for (int pass = 0; pass < kPasses; ++pass) {
      if (seen == kEnd) return;
      WriteOnce(job_);
      if (const uint32_t now = calls_; now != seen) {
        seen = now;
        pass = 0;
      }
    }
  }
}

void Rewriter::WriteOnce(size_t job) {
  const std::lock_guard lock(mutex_);
  if (job >= jobs_.size()) return;
  const Job& written = jobs_[job];
  uint16_t* const memory = written.memory.data();
  const auto write = [&](const uint16_t* values) {
    for (size_t i = 0; i < written.memory.size(); ++i) Store(memory[i], values[i]);
  };
  write(written.first.data());
  for (size_t i = 0; written.writes_nan && i < written.memory.size(); i += kNanEvery) {
    Store(memory[i], kNan);
  }
  write(written.second.data());
}

}  // namespace pqcached::fuzz
