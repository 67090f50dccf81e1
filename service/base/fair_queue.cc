#include "service/base/fair_queue.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace pqcached::service {

using kvstore::SteadyTime;

FairQueue::Tenant& FairQueue::Enter(const std::string& name) {
  const auto found = tenants_.find(name);
  if (found != tenants_.end()) return found->second;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [other, tenant] : tenants_) least = std::min(least, tenant.used_seconds);
  Tenant& entered = tenants_[name];
  if (!std::isinf(least)) entered.used_seconds = least;
  return entered;
}

FairQueue::Answer FairQueue::Push(QueuedTask task) {
  if (waiting_ >= options_.max_waiting) return Answer::kFull;
  if (options_.share_of) {
    const auto found = tenants_.find(task.tenant);
    const size_t waiting = found == tenants_.end() ? 0 : found->second.waiting();
    if (waiting >= options_.share_of(task.tenant).max_waiting) return Answer::kTenantFull;
  }
  PushAlways(std::move(task));
  return Answer::kTaken;
}

void FairQueue::PushAlways(QueuedTask task) {
  Tenant& tenant = Enter(task.tenant);
  if (options_.share_of) tenant.share = options_.share_of(task.tenant);
  const uint64_t number = next_number_++;
  if (task.deadline != SteadyTime::InfiniteFuture()) {
    deadlines_.emplace(task.deadline, number, task.tenant);
  }
  std::deque<Waiting>& waiting = task.lane == Lane::kBulk ? tenant.bulk : tenant.brief;
  waiting.push_back({std::move(task), number});
  ++waiting_;
}

std::deque<FairQueue::Waiting>* FairQueue::NextOf(Tenant& tenant) const {
  if (tenant.running >= tenant.share.max_running) return nullptr;
  const bool bulk = !tenant.bulk.empty() && bulk_running_ < options_.max_bulk;
  if (tenant.brief.empty()) return bulk ? &tenant.bulk : nullptr;
  return bulk && tenant.bulk.front().number < tenant.brief.front().number ? &tenant.bulk
                                                                          : &tenant.brief;
}

FairQueue::Waiting FairQueue::Remove(std::deque<Waiting>& from,
                                     const std::deque<Waiting>::iterator& at) {
  Waiting removed = std::move(*at);
  from.erase(at);
  if (removed.task.deadline != SteadyTime::InfiniteFuture()) {
    deadlines_.erase({removed.task.deadline, removed.number, removed.task.tenant});
  }
  --waiting_;
  return removed;
}

std::optional<QueuedTask> FairQueue::Take() {
  Tenant* next = nullptr;
  std::deque<Waiting>* tasks = nullptr;
  for (auto& [name, tenant] : tenants_) {
    std::deque<Waiting>* const waiting = NextOf(tenant);
    if (waiting == nullptr) continue;
    if (next != nullptr && std::make_pair(tenant.load(), tenant.used_seconds) >=
                               std::make_pair(next->load(), next->used_seconds)) {
      continue;
    }
    next = &tenant;
    tasks = waiting;
  }
  if (next == nullptr) return std::nullopt;
  QueuedTask taken = Remove(*tasks, tasks->begin()).task;
  ++next->running;
  if (taken.lane == Lane::kBulk) ++bulk_running_;
  return taken;
}

void FairQueue::Finish(const std::string& tenant, Lane lane, absl::Duration elapsed) {
  const auto found = tenants_.find(tenant);
  --found->second.running;
  found->second.used_seconds += absl::ToDoubleSeconds(elapsed) / found->second.share.weight;
  if (lane == Lane::kBulk) --bulk_running_;
  EraseIfIdle(found);
}

void FairQueue::EraseIfIdle(Tenants::iterator at) {
  if (at->second.running == 0 && at->second.waiting() == 0) tenants_.erase(at);
}

SteadyTime FairQueue::NextDeadline() const {
  return deadlines_.empty() ? SteadyTime::InfiniteFuture() : std::get<0>(*deadlines_.begin());
}

std::vector<QueuedTask> FairQueue::TakeExpired(SteadyTime now) {
  std::vector<QueuedTask> expired;
  while (NextDeadline() <= now) {
    const uint64_t number = std::get<1>(*deadlines_.begin());
    const auto tenant = tenants_.find(std::get<2>(*deadlines_.begin()));
    for (std::deque<Waiting>* waiting : {&tenant->second.brief, &tenant->second.bulk}) {
      const auto at = std::find_if(waiting->begin(), waiting->end(),
                                   [&](const Waiting& each) { return each.number == number; });
      if (at == waiting->end()) continue;
      expired.push_back(Remove(*waiting, at).task);
      break;
    }
    EraseIfIdle(tenant);
  }
  return expired;
}

std::pair<size_t, uint32_t> FairQueue::CountsOf(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return {0, 0};
  return {found->second.waiting(), found->second.running};
}

}  // namespace pqcached::service
