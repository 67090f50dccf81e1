#include "tests/bench/report.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

namespace pqcached::bench {
namespace {

// Share of its time that a thread which only reads the clock does not run, in gaps beyond 20 us.
double LostShare(int threads) {
  std::vector<double> lost(static_cast<size_t>(threads));
  const double seconds = TimeOnThreads(threads, [&](int thread) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    const auto end = begin + std::chrono::milliseconds(200);
    double gaps = 0.0;
    for (auto last = begin; last < end;) {
      const auto now = Clock::now();
      const double gap = std::chrono::duration<double>(now - last).count();
      if (gap > 20e-6) gaps += gap;
      last = now;
    }
    lost[static_cast<size_t>(thread)] = gaps;
  });
  return *std::max_element(lost.begin(), lost.end()) / seconds;
}

// The benches need no library for this little JSON.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c) & 0xFFu);
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += (static_cast<unsigned char>(c) < ' ') ? std::string(escape) : std::string(1, c);
  }
  return quoted + '"';
}

std::string NumberText(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

std::string NumberOrNull(const std::optional<Stat>& stat, double Stat::*member) {
  return stat ? NumberText((*stat).*member) : "null";
}

}  // namespace

bool CanRun(CodeLevel level) {
  return level == CodeLevel::kBest || kernels::HasLevel(kernels::Level::kAvx2);
}

kernels::Exec ExecOf(CodeLevel level) {
  if (level == CodeLevel::kBest || !CanRun(level)) return {};
  return {kernels::Level::kAvx2};
}

Report::Report(int argc, char** argv, int default_rounds, std::string area)
    : area_(std::move(area)), rounds_(default_rounds) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json_path_ = argv[++i];
    } else if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      rounds_ = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: %s [--json FILE] [--rounds N]\n", argv[0]);
      std::exit(2);
    }
  }
  const std::string_view level = kernels::LevelName(kernels::BestLevel());
  std::printf("level %.*s, %d rounds; time lost in gaps: %.1f %% of 1 thread, %.1f %% of 2\n",
              static_cast<int>(level.size()), level.data(), rounds_, LostShare(1) * 100,
              LostShare(2) * 100);
}

void Report::Add(const Figure& figure, const Stat& stat) {
  std::string goal;
  if (figure.goal) {
    const bool met = figure.better == Better::kHigher ? stat.median >= *figure.goal
                                                      : stat.median <= *figure.goal;
    char text[64];
    std::snprintf(text, sizeof text, "goal %g %s", *figure.goal, met ? "met" : "MISSED");
    goal = text;
  }
  std::printf("%-44s %10.4g %-6s +- %-8.3g %s\n", figure.name.c_str(), stat.median,
              figure.unit.c_str(), stat.spread, goal.c_str());
  std::fflush(stdout);
  rows_.push_back({figure, stat});
}

void Report::AddSpeedup(CodeLevel level, Figure figure, const Rounds& rounds, size_t entry,
                        size_t other) {
  if (level == CodeLevel::kAvx2) {
    figure.name += "_avx2";
    figure.against += "; our code limited to AVX2";
    figure.goal.reset();
  }
  if (CanRun(level)) {
    Add(figure, rounds.Speedup(entry, other));
  } else {
    AddAbsent(figure, "no AVX2");
  }
}

void Report::AddAbsent(const Figure& figure, const std::string& reason) {
  std::printf("%-44s %10s %s\n", figure.name.c_str(), "-", reason.c_str());
  Figure absent = figure;
  absent.against += ": " + reason;
  rows_.push_back({absent, std::nullopt});
}

int Report::Finish() const {
  if (json_path_.empty()) return 0;
  std::ofstream file(json_path_);
  file << "[";
  for (const Row& row : rows_) {
    const Figure& figure = row.figure;
    const bool higher = figure.better == Better::kHigher;
    file << (&row == rows_.data() ? "\n" : ",\n") << " {\"area\": " << Quoted(area_)
         << ", \"name\": " << Quoted(figure.name)
         << ", \"value\": " << NumberOrNull(row.stat, &Stat::median)
         << ", \"unit\": " << Quoted(figure.unit)
         << ", \"better\": " << Quoted(higher ? "higher" : "lower")
         << ", \"goal\": " << (figure.goal ? NumberText(*figure.goal) : "null")
         << ", \"against\": " << Quoted(figure.against)
         << ", \"samples\": " << (row.stat ? std::to_string(row.stat->samples) : "null")
         << ", \"spread\": " << NumberOrNull(row.stat, &Stat::spread) << "}";
  }
  file << "\n]\n";
  if (!file.flush()) {
    std::fprintf(stderr, "error: cannot write %s\n", json_path_.c_str());
    return 1;
  }
  return 0;
}

void Require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "error: wrong result: %s\n", what);
  std::exit(1);
}

}  // namespace pqcached::bench
