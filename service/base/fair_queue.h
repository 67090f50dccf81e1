// FairQueue holds tasks that wait for a thread, and decides which one starts next, so that a tenant
// with many tasks does not delay the tasks of another tenant.
//
// The next task is one of the tenant that has the fewest running tasks for its weight; among
// equals, of the tenant whose tasks have used the least time for its weight. A tenant that has been
// idle begins with the time of the least busy one, so idleness earns no credit. The tasks of one
// tenant start in order, except that bulk tasks (rows of long prompts) wait while they occupy their
// share of all threads.
//
// Thread-compatible. Taking a task is linear in the number of tenants that have tasks.
#ifndef PQCACHED_SERVICE_BASE_FAIR_QUEUE_H_
#define PQCACHED_SERVICE_BASE_FAIR_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "kvstore/clock.h"

namespace pqcached::service {

enum class Lane { kBrief, kBulk };

// What one tenant may use.
struct TenantShare {
  double weight = 1;  // > 0; a tenant of weight 2 gets twice the threads of one of weight 1
  uint32_t max_running = std::numeric_limits<uint32_t>::max();
  size_t max_waiting = std::numeric_limits<size_t>::max();
};

struct QueuedTask {
  std::string tenant;  // empty: the sidecar itself
  Lane lane = Lane::kBrief;
  std::function<void()> run;
  // Called instead of `run` when no thread has taken the task by `deadline`.
  kvstore::SteadyTime deadline = kvstore::SteadyTime::InfiniteFuture();
  std::function<void()> expire = {};
};

class FairQueue {
 public:
  struct Options {
    size_t max_waiting = std::numeric_limits<size_t>::max();
    uint32_t max_bulk = std::numeric_limits<uint32_t>::max();  // bulk tasks that may run at once
    std::function<TenantShare(const std::string& tenant)> share_of = {};  // empty: no limits
  };
  enum class Answer { kTaken, kFull, kTenantFull };

  explicit FairQueue(Options options) : options_(std::move(options)) {}

  // Adds the task, unless max_waiting tasks wait already, or the tenant's share of them.
  Answer Push(QueuedTask task);
  // Adds the task even past the limits.
  void PushAlways(QueuedTask task);

  // Removes the next task, which runs from then on; nothing when no task may start. Each task that
  // was taken is followed by one Finish.
  std::optional<QueuedTask> Take();
  // Notes that a task has ended after it has used a thread for `elapsed`.
  void Finish(const std::string& tenant, Lane lane, absl::Duration elapsed);

  // Returns the earliest deadline of the tasks that wait.
  kvstore::SteadyTime NextDeadline() const;
  // Removes the tasks whose deadline is not after `now`.
  std::vector<QueuedTask> TakeExpired(kvstore::SteadyTime now);

  // Returns the number of tasks of a tenant that wait, and that run.
  std::pair<size_t, uint32_t> CountsOf(const std::string& tenant) const;

 private:
  struct Waiting {
    QueuedTask task;
    uint64_t number = 0;  // order of arrival
  };
  struct Tenant {
    std::deque<Waiting> brief;
    std::deque<Waiting> bulk;
    TenantShare share;
    uint32_t running = 0;
    double used_seconds = 0;  // of threads, divided by the weight

    size_t waiting() const { return brief.size() + bulk.size(); }
    double load() const { return running / share.weight; }
  };
  using Tenants = std::map<std::string, Tenant>;

  Tenant& Enter(const std::string& name);
  // Returns the tenant's tasks of which the first is next; null when none may start.
  std::deque<Waiting>* NextOf(Tenant& tenant) const;
  Waiting Remove(std::deque<Waiting>& from, const std::deque<Waiting>::iterator& at);
  void EraseIfIdle(Tenants::iterator at);

  const Options options_;
  Tenants tenants_;                                                             // that have tasks
  std::set<std::tuple<kvstore::SteadyTime, uint64_t, std::string>> deadlines_;  // number, tenant
  size_t waiting_ = 0;
  uint32_t bulk_running_ = 0;
  uint64_t next_number_ = 0;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_FAIR_QUEUE_H_
