#include "tests/bench/rounds.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

namespace pqcached::bench {

Stat StatOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double share) {
    const double place = share * static_cast<double>(values.size() - 1);
    const size_t below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
  };
  return {quantile(0.5), quantile(0.75) - quantile(0.25), static_cast<int>(values.size())};
}

double TimeOnThreads(int threads, const std::function<void(int thread)>& work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back([&, thread] {
      ready.fetch_add(1);
      while (!go.load()) {
      }
      work(thread);
    });
  }
  while (ready.load() < threads - 1) {
  }
  const auto begin = std::chrono::steady_clock::now();
  go.store(true);
  work(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

size_t Rounds::Add(std::string name, double units, Work work) {
  entries_.push_back({std::move(name), units, std::move(work), {}});
  return entries_.size() - 1;
}

void Rounds::Run(int count) {
  for (int round = -1; round < count; ++round) {
    for (size_t i = 0; i < entries_.size(); ++i) {
      Entry& entry = entries_[(i + static_cast<size_t>(round + 1)) % entries_.size()];
      const double seconds =
          TimeOnThreads(threads_, [&](int thread) { entry.work(thread, round + 1); });
      if (round >= 0) entry.seconds.push_back(seconds / entry.units);
    }
  }
  for (const Entry& entry : entries_) {
    const Stat stat = StatOf(entry.seconds);
    std::printf("  %d thread%s  %-36s %12.4g us a unit, best %.4g; %.4g ms a round\n", threads_,
                threads_ == 1 ? " " : "s", entry.name.c_str(), stat.median * 1e6,
                *std::min_element(entry.seconds.begin(), entry.seconds.end()) * 1e6,
                stat.median * entry.units * 1e3);
  }
  std::fflush(stdout);
}

Stat Rounds::Seconds(size_t entry) const { return StatOf(entries_[entry].seconds); }

Stat Rounds::Speedup(size_t entry, size_t other) const {
  std::vector<double> ratios;
  for (size_t i = 0; i < entries_[entry].seconds.size(); ++i) {
    ratios.push_back(entries_[other].seconds[i] / entries_[entry].seconds[i]);
  }
  return StatOf(std::move(ratios));
}

}  // namespace pqcached::bench
