// Report: the command line, the header and the figures of one bench program.
#ifndef PQCACHED_TESTS_BENCH_REPORT_H_
#define PQCACHED_TESTS_BENCH_REPORT_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/exec.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {

enum class Better { kHigher, kLower };

// The instruction set of our code in a part of a bench: the best one, or AVX2, so that machines
// with AVX-512 show what others reach.
enum class CodeLevel { kBest, kAvx2 };

// Whether this machine can run code of the level.
bool CanRun(CodeLevel level);

// The best instruction set where CanRun(level) is false: entries are then added, but not run.
kernels::Exec ExecOf(CodeLevel level);

struct Figure {
  std::string name;
  std::string unit;
  std::string against;
  Better better = Better::kHigher;
  std::optional<double> goal;
};

class Report {
 public:
  // PROGRAM [--json FILE] [--rounds N]. Prints what of the machine decides figures, among it how
  // much time threads lose to others ("gaps"). Exits on a wrong command line.
  // `area`: of tests/figures.sh.
  Report(int argc, char** argv, int default_rounds, std::string area = "kernels");

  int rounds() const { return rounds_; }

  void Add(const Figure& figure, const Stat& stat);

  // How many times faster `entry` is than `other`. Figures of kAvx2 have no goal and "_avx2" behind
  // their name, and are absent where this machine cannot run them.
  void AddSpeedup(CodeLevel level, Figure figure, const Rounds& rounds, size_t entry, size_t other);

  // A figure that could not be measured here.
  void AddAbsent(const Figure& figure, const std::string& reason);

  // Writes the JSON file; returns the exit status of the program.
  int Finish() const;

 private:
  struct Row {
    Figure figure;
    std::optional<Stat> stat;
  };

  std::string area_;
  std::string json_path_;
  int rounds_;
  std::vector<Row> rows_;
};

// Ends the program when a result is wrong: nothing is timed that does not compute the right thing.
void Require(bool right, const char* what);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_REPORT_H_
