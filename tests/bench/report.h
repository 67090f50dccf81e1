// Report: the command line, the header and the figures of one bench program.
#ifndef PQCACHED_TESTS_BENCH_REPORT_H_
#define PQCACHED_TESTS_BENCH_REPORT_H_

#include <optional>
#include <string>
#include <vector>

#include "tests/bench/rounds.h"

namespace pqcached::bench {

enum class Better { kHigher, kLower };

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
