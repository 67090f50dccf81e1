#ifndef PQCACHED_TESTS_TINYLM_STEPS_H_
#define PQCACHED_TESTS_TINYLM_STEPS_H_

// Decode steps against the sidecar: for one sequence, or for several in lockstep as a batch.
//
// A step begins with the first layer that attends and ends with the rows of its token. No call
// waits for an RPC when the client maps the sidecar's memory: rows of finished steps are sent in
// the background.

#include <pqcached/client.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tinylm {

// Query of one sequence for one layer.
struct StepQuery {
  pqc_sequence* sequence = nullptr;
  uint32_t position = 0;
  uint32_t layer = 0;
  uint32_t query_heads = 0;
  uint32_t head_dim = 0;
  const float* q = nullptr;  // [query_heads, head_dim]
  pqc_selection selection;   // the same for the whole batch
  float* o = nullptr;        // [query_heads, head_dim], written
  float* lse = nullptr;      // [query_heads], written
};

// K and V of the step's token in one layer: [kv_heads, head_dim].
struct StepRows {
  uint32_t layer = 0;
  std::vector<float> k, v;
};

// Failures are std::runtime_error.
class Steps {
 public:
  virtual ~Steps() = default;
  // Returns how many tokens were selected, per kv head.
  virtual uint32_t Attend(const StepQuery& query) = 0;
  // `rows` has one entry per stored layer.
  virtual void End(pqc_sequence* sequence, uint32_t position, uint32_t kv_heads,
                   const std::vector<StepRows>& rows) = 0;
};

// Steps of one sequence. Single-thread.
class SingleSteps : public Steps {
 public:
  explicit SingleSteps(pqc_client* client) : client_(client) {}
  ~SingleSteps() override { pqc_step_abandon(step_); }

  uint32_t Attend(const StepQuery& query) override;
  void End(pqc_sequence* sequence, uint32_t position, uint32_t kv_heads,
           const std::vector<StepRows>& rows) override;

 private:
  pqc_client* client_;
  pqc_step* step_ = nullptr;
};

// Steps of several sequences whose threads make the same calls in the same order: the last one to
// call does the work for all of them. A finished sequence leaves, and the others continue without
// it.
//
// Thread-safe.
class BatchSteps : public Steps {
 public:
  BatchSteps(pqc_client* client, uint32_t member_count)
      : client_(client), member_count_(member_count) {}
  ~BatchSteps() override { pqc_step_abandon(step_); }

  uint32_t Attend(const StepQuery& query) override;
  void End(pqc_sequence* sequence, uint32_t position, uint32_t kv_heads,
           const std::vector<StepRows>& rows) override;
  // Removes a member that attends no more. Every member calls it once.
  void Leave();

  uint32_t largest_batch() const { return largest_batch_; }

 private:
  struct Ending {
    pqc_sequence* sequence;
    uint32_t position;
    uint32_t kv_heads;
    const std::vector<StepRows>* rows;
  };

  // Waits until all members have called; the last one does the work of all.
  void WaitForMembers(std::unique_lock<std::mutex>& lock);
  void DoAll();
  void AttendAll();
  void EndAll();
  void BeginStep(const std::vector<pqc_step_item>& items, const pqc_selection* selection);

  pqc_client* client_;
  std::mutex mutex_;
  std::condition_variable met_;
  uint32_t member_count_, waiting_count_ = 0, largest_batch_ = 0;
  uint64_t meeting_ = 0;
  std::vector<const StepQuery*> queries_;
  std::vector<Ending> endings_;
  std::vector<pqc_sequence*> order_;  // of the items of the step in progress
  std::vector<uint32_t> counts_;      // of the last attention, by item
  std::string error_;                 // of the last meeting
  pqc_step* step_ = nullptr;
};

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_STEPS_H_
