// Rewriter: a thread that changes 16-bit numbers in shared memory while calls read them, as a
// client may.
#ifndef PQCACHED_TESTS_FUZZ_HANDLERS_REWRITER_H_
#define PQCACHED_TESTS_FUZZ_HANDLERS_REWRITER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace pqcached::fuzz {

class Rewriter {
 public:
  // Memory, and the numbers that are written there in turn; both lists are as long as the memory.
  struct Job {
    std::span<uint16_t> memory;
    std::vector<uint16_t> first;
    std::vector<uint16_t> second;
    bool writes_nan = false;  // in between
  };

  Rewriter() : thread_([this] { Serve(); }) {}
  ~Rewriter();
  Rewriter(const Rewriter&) = delete;
  Rewriter& operator=(const Rewriter&) = delete;

  // Replaces all jobs. Afterwards the memory of the earlier ones is not written any more.
  void SetJobs(std::vector<Job> jobs);
  // Has the job written again and again for a while.
  void Write(size_t job);

 private:
  static constexpr uint32_t kEnd = ~0u;

  void Serve();
  void WriteOnce(size_t job);

  std::mutex mutex_;
  std::vector<Job> jobs_;            // under mutex_
  std::atomic<uint32_t> calls_ = 0;  // of Write; kEnd ends the thread
  std::atomic<size_t> job_ = 0;
  std::thread thread_;
};

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_HANDLERS_REWRITER_H_
