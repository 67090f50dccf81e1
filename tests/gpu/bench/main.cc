// bench_gpu: the figures of area `gpu`; where there is no device, all of them as absent, with the reason.
//
//   bench_gpu [--json FILE] [--rounds N]
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <set>
#include <string>

#include "tests/bench/report.h"
#include "tests/gpu/bench/figures.h"

#if defined(PQCACHED_BENCH_CUDA)
#include "tests/gpu/bench/bench.h"
#endif

namespace pqcached::bench {
namespace {

#if defined(PQCACHED_BENCH_CUDA)

struct Section {
  std::vector<Figure> figures;
  void (*run)(Bench&);
};

void Run(const Section& section, Bench& bench, Report& report) {
  std::set<std::string> added;
  bench.add = [&](const std::string& name, const Stat& stat) {
    for (const Figure& figure : section.figures) {
      if (figure.name != name) continue;
      report.Add(figure, stat);
      added.insert(name);
      return;
    }
    Require(false, "the name of a figure");
  };
  std::string reason = "not measured";
  try {
    section.run(bench);
  } catch (const std::exception& failure) {
    reason = failure.what();
    (void)cudaGetLastError();
  }
  for (const Figure& figure : section.figures) {
    if (!added.contains(figure.name)) report.AddAbsent(figure, reason);
  }
  // On the emulation nothing may be missing but what needs PyTorch.
  if (!bench.smoke) return;
  for (const Figure& figure : section.figures) {
    Require(added.contains(figure.name) || figure.name == "gpu_select_vs_torch", reason.c_str());
  }
}

int Main(int argc, char** argv) {
  Bench bench;
#if defined(PQCACHED_CUDA_EMULATION)
  bench.smoke = true;
#endif
  Report report(argc, argv, bench.smoke ? 1 : 15, "gpu");
  const std::vector<Section> sections = {{SelectFigures(), BenchSelect},
                                         {RowFigures(), BenchRows},
                                         {BuildFigures(), BenchBuild},
                                         {StackFigures(), BenchStack},
                                         {CacheFigures(), BenchCache}};
  bench.rounds = report.rounds();
  if (const gpu::Status found = gpu::FindDevice(0, bench.device); !found.ok()) {
    for (const Section& section : sections) {
      for (const Figure& figure : section.figures) {
        report.AddAbsent(figure, "not run: no CUDA device: " + found.message());
      }
    }
    return report.Finish();
  }
  std::printf("%s, %u multiprocessors, reads the pool %s\n", bench.device.name.c_str(),
              bench.device.multiprocessor_count,
              bench.device.registers_read_only ? "in place" : "through the host only");
  Check(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking), "creating a stream");
  for (const Section& section : sections) Run(section, bench, report);
  Check(cudaStreamDestroy(bench.stream), "destroying the stream");
  return report.Finish();
}

#else

int Main(int argc, char** argv) {
  Report report(argc, argv, 1, "gpu");
  for (const auto& figures :
       {SelectFigures(), RowFigures(), BuildFigures(), StackFigures(), CacheFigures()}) {
    for (const Figure& figure : figures) report.AddAbsent(figure, "not run: built without nvcc");
  }
  return report.Finish();
}

#endif

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  (void)std::signal(SIGPIPE, SIG_IGN);  // a PyTorch that has ended is a figure that is absent
  try {
    return pqcached::bench::Main(argc, argv);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "error: %s\n", failure.what());
    return 1;
  }
}
