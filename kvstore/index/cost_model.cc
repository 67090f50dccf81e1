#include "kvstore/index/cost_model.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/select/cells/pq_postings.h"
#include "kernels/select/pq_select.h"
#include "kernels/train/kmeans.h"
#include "kernels/train/pq_encode.h"

namespace pqcached::kvstore {
namespace {

constexpr uint32_t kRows = 8192;  // a prefill segment: exceeds the first cache levels
constexpr int kRepeats = 3;       // the minimum is used, because disturbances only add time
constexpr char kHeading[] = "pqcached build costs 1";

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedDelete>;

AlignedBytes NewBytes(size_t size_bytes) {
  return AlignedBytes(static_cast<std::byte*>(
      ::operator new (std::max<size_t>(size_bytes, 1), std::align_val_t{64})));
}

template <typename Work>
double BestSeconds(Work work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

AlignedBytes RandomRows(const LayerShape& shape) {
  AlignedBytes rows = NewBytes(size_t{kRows} * shape.row_bytes);
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(4096);
  for (float& number : numbers) number = normal(random);
  for (uint32_t row = 0; row < kRows; ++row) {
    std::byte* const begin = rows.get() + size_t{row} * shape.row_bytes;
    const size_t offset = random() % numbers.size();
    for (uint32_t i = 0; i < shape.key_dim; ++i) {
      kernels::StoreElement(shape.dtype, begin, i, numbers[(offset + i) % numbers.size()]);
    }
  }
  return rows;
}

BuildCost Measure(const kernels::Exec& exec, const LayerShape& shape,
                  const IndexDescriptor& index) {
  const kernels::PqGeometry geometry = GeometryOf(index, shape.key_dim);
  const uint32_t dim = kernels::SubspaceDim(geometry);
  const kernels::DType sample_type = kernels::KMeansSampleType(exec);
  const AlignedBytes rows = RandomRows(shape);
  const AlignedBytes samples = NewBytes(size_t{kRows} * dim * kernels::DTypeBytes(sample_type));
  const size_t scratch_bytes =
      std::max(kernels::KMeansStepScratchBytes(dim, kernels::CentroidCount(geometry)),
               kernels::PqEncodeScratchBytes(geometry));
  const AlignedBytes scratch = NewBytes(scratch_bytes);
  std::vector<float> centroids(kernels::CentroidFloats(geometry));
  const std::span<float> part = std::span(centroids).first(centroids.size() / index.subspace_count);
  const kernels::KMeansProblem problem{.sample_type = sample_type,
                                       .samples = samples.get(),
                                       .sample_count = kRows,
                                       .dim = dim,
                                       .centroid_count = kernels::CentroidCount(geometry),
                                       .centroids = part};
  BuildCost cost;
  cost.load = BestSeconds([&] {
                kernels::KMeansLoad(exec, {.source_type = shape.dtype,
                                           .rows = rows.get(),
                                           .row_stride = shape.row_bytes,
                                           .row_count = kRows,
                                           .dim = dim,
                                           .sample_type = sample_type,
                                           .samples = samples.get()});
              }) /
              kRows;
  kernels::KMeansInit(problem, 1);
  cost.step = BestSeconds([&] {
                kernels::KMeansStep(exec, problem, {scratch.get(), scratch_bytes});
              }) /
              kRows;
  for (uint32_t i = 1; i < index.subspace_count; ++i) {
    std::copy(part.begin(), part.end(),
              centroids.begin() + static_cast<ptrdiff_t>(i * part.size()));
  }
  std::vector<uint8_t> planes(kernels::CodePlanesBytes(geometry, kRows));
  const bool cells = kernels::HasCells(geometry);
  std::vector<uint32_t> counts(cells ? kernels::CellCount(geometry) : 0);
  std::vector<uint16_t> begins(cells ? kernels::PostingBeginCount(geometry, kRows) : 0);
  std::vector<uint16_t> slots(kRows);
  cost.code = BestSeconds([&] {
                kernels::PqEncode(exec, {.geometry = geometry,
                                         .dtype = shape.dtype,
                                         .rows = rows.get(),
                                         .row_stride = shape.row_bytes,
                                         .row_count = kRows,
                                         .centroids = centroids,
                                         .planes = planes.data(),
                                         .plane_stride = kernels::PlaneStride(kRows),
                                         .first_slot = 0,
                                         .scratch = {scratch.get(), scratch_bytes}});
                if (!cells) return;
                kernels::PqCountCells(exec, {.geometry = geometry,
                                             .planes = planes.data(),
                                             .plane_stride = kernels::PlaneStride(kRows),
                                             .slot_begin = 0,
                                             .slot_end = kRows,
                                             .cell_counts = counts});
                kernels::PqBuildPostings(exec, {.geometry = geometry,
                                                .planes = planes.data(),
                                                .plane_stride = kernels::PlaneStride(kRows),
                                                .slot_begin = 0,
                                                .slot_end = kRows,
                                                .begins = begins,
                                                .slots = slots});
              }) /
              kRows;
  return cost;
}

// Replaces the file atomically. A file that cannot be written is ignored: the next process measures
// again.
void WriteFile(const std::string& file, const std::string& text) {
  const std::string fresh = file + ".new";
  {
    std::ofstream out(fresh, std::ios::trunc);
    out << text;
    if (!out.flush()) return;
  }
  std::error_code error;
  std::filesystem::rename(fresh, file, error);
  if (error) std::filesystem::remove(fresh, error);
}

bool IsCost(double seconds) { return std::isfinite(seconds) && seconds > 0 && seconds < 1; }

}  // namespace

double BuildSeconds(const BuildCost& cost, const BuildSize& size, uint32_t iterations) {
  const double heads = static_cast<double>(size.head_count) / std::max(1u, size.worker_count);
  const double training = size.sample_count * (cost.load + iterations * cost.step);
  return heads * (size.subspace_count * training + size.row_count * cost.code);
}

uint32_t IterationsWithin(const BuildCost& cost, const BuildSize& size, double seconds,
                          uint32_t most) {
  const double without = BuildSeconds(cost, size, 0);
  const double each = BuildSeconds(cost, size, 1) - without;
  if (each <= 0) return most;
  const double fit = std::floor((seconds - without) / each);
  return static_cast<uint32_t>(std::clamp(fit, 1.0, static_cast<double>(std::max(1u, most))));
}

double PrefillSeconds(const PrefillCost& cost, uint32_t token_count) {
  const double tokens = token_count;
  return cost.seconds_per_token_squared * tokens * tokens + cost.seconds_per_token * tokens +
         cost.seconds;
}

CostModel::CostModel(const kernels::Exec& exec, std::string file)
    : exec_(exec), file_(std::move(file)) {}

std::string CostModel::MachineKey(const kernels::Exec& exec) {
  std::string model = "unknown CPU";
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) != 0 || colon == std::string::npos) continue;
    model = line.substr(colon + 2);
    break;
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores, " +
         std::string(kernels::LevelName(exec.level));
}

void CostModel::Load() {
  if (loaded_) return;
  loaded_ = true;
  if (file_.empty()) return;
  std::ifstream in(file_);
  std::string heading;
  std::string machine;
  if (!std::getline(in, heading) || heading != kHeading) return;
  if (!std::getline(in, machine) || machine != MachineKey(exec_)) return;
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    uint32_t dtype, key_dim, row_bytes, subspaces, bits;
    BuildCost cost;
    if (!(fields >> dtype >> key_dim >> row_bytes >> subspaces >> bits >> cost.load >> cost.step >>
          cost.code)) {
      continue;
    }
    if (!IsCost(cost.load) || !IsCost(cost.step) || !IsCost(cost.code)) continue;
    costs_[{dtype, key_dim, row_bytes, subspaces, bits}] = cost;
  }
}

std::string CostModel::Text() const {
  std::ostringstream out;
  out << kHeading << "\n" << MachineKey(exec_) << "\n";
  for (const auto& [kind, cost] : costs_) {
    const auto& [dtype, key_dim, row_bytes, subspaces, bits] = kind;
    out << dtype << " " << key_dim << " " << row_bytes << " " << subspaces << " " << bits << " "
        << cost.load << " " << cost.step << " " << cost.code << "\n";
  }
  return out.str();
}

BuildCost CostModel::Measured(const LayerShape& shape, const IndexDescriptor& index) {
  const Kind kind{static_cast<uint32_t>(shape.dtype), shape.key_dim, shape.row_bytes,
                  index.subspace_count, index.bits};
  {
    const MutexLock lock(&mutex_);
    Load();
    if (const auto it = costs_.find(kind); it != costs_.end()) return it->second;
  }
  const BuildCost cost = Measure(exec_, shape, index);
  std::string text;
  {
    const MutexLock lock(&mutex_);
    const auto [it, added] = costs_.emplace(kind, cost);
    if (!added || file_.empty()) return it->second;
    text = Text();
  }
  WriteFile(file_, text);
  return cost;
}

}  // namespace pqcached::kvstore
