// The figures of area `gpu`, so that they are listed, too, where they cannot be measured.
#ifndef PQCACHED_TESTS_GPU_BENCH_FIGURES_H_
#define PQCACHED_TESTS_GPU_BENCH_FIGURES_H_

#include <vector>

#include "tests/bench/report.h"

namespace pqcached::bench {

std::vector<Figure> SelectFigures();
std::vector<Figure> RowFigures();
std::vector<Figure> BuildFigures();
std::vector<Figure> StackFigures();
std::vector<Figure> CacheFigures();

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_FIGURES_H_
