// Rounds: times several pieces of work side by side.
//
// Every round runs every entry once, in the same cyclic order but beginning with another one each
// time, so that what else happens on the machine hits all alike. A figure is the median over rounds
// of the ratio of two entries of the same round.
#ifndef PQCACHED_TESTS_BENCH_ROUNDS_H_
#define PQCACHED_TESTS_BENCH_ROUNDS_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace pqcached::bench {

struct Stat {
  double median = 0.0;
  double spread = 0.0;  // distance between the quartiles
  int samples = 0;
};

Stat StatOf(std::vector<double> values);

// Runs work(thread) on `threads` threads that begin together; returns the seconds until all ended.
double TimeOnThreads(int threads, const std::function<void(int thread)>& work);

class Rounds {
 public:
  // Called once per thread and round; does `units` units (tokens, heads, bytes). Rounds count up,
  // so that work can move on through memory.
  using Work = std::function<void(int thread, int round)>;

  explicit Rounds(int threads) : threads_(threads) {}

  int threads() const { return threads_; }

  // Returns the index of the entry.
  size_t Add(std::string name, double units, Work work);

  // One round to warm up, then `count` that are timed; prints a line per entry.
  void Run(int count);

  // Seconds that one thread needs for one unit.
  Stat Seconds(size_t entry) const;

  // How many times faster `entry` does a unit than `other`.
  Stat Speedup(size_t entry, size_t other) const;

 private:
  struct Entry {
    std::string name;
    double units;
    Work work;
    std::vector<double> seconds;  // per unit, one of each round
  };

  int threads_;
  std::vector<Entry> entries_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_ROUNDS_H_
