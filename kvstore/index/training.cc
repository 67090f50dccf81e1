#include "kvstore/index/training.h"

#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/train/kmeans.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kAlignment = 64;

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Loads rows of one sub-space into consecutive samples.
class SampleLoader {
 public:
  SampleLoader(const kernels::Exec& exec, const TrainingArgs& args, kernels::DType sample_type,
               std::byte* samples)
      : exec_(exec),
        args_(args),
        dim_(kernels::SubspaceDim(args.geometry)),
        sample_type_(sample_type),
        next_(samples) {}

  void LoadRun(const std::byte* rows, uint32_t count) {
    if (count == 0) return;
    const size_t number_bytes = kernels::DTypeBytes(args_.shape.dtype);
    const kernels::PqGeometry& geometry = args_.geometry;
    kernels::KMeansLoad(
        exec_, {.source_type = args_.shape.dtype,
                .rows = rows + kernels::DimOf(geometry, args_.subspace, 0) * number_bytes,
                .row_stride = args_.shape.row_bytes,
                .row_count = count,
                .dim = dim_,
                .pair_offset_bytes = kernels::PairOffset(geometry, args_.subspace) * number_bytes,
                .sample_type = sample_type_,
                .samples = next_});
    next_ += size_t{count} * dim_ * kernels::DTypeBytes(sample_type_);
  }

 private:
  const kernels::Exec& exec_;
  const TrainingArgs& args_;
  const uint32_t dim_;
  const kernels::DType sample_type_;
  std::byte* next_;
};

// Loads `wanted` of `available` rows; every subset is equally likely (selection sampling, Knuth
// 3.4.2 S).
void LoadSample(const TrainingArgs& args, uint32_t available, uint32_t wanted,
                SampleLoader& loader) {
  uint64_t state = args.sample_seed;
  uint32_t seen = 0;
  uint32_t taken = 0;
  for (const kernels::RowSpan& span : args.rows) {
    uint32_t run_begin = 0;
    uint32_t run_count = 0;
    for (uint32_t row = 0; row < span.token_count; ++row, ++seen) {
      state = MixSeed(state, seen);
      const uint64_t draw = (state >> 32) * (available - seen) >> 32;
      if (draw >= wanted - taken) continue;
      ++taken;
      if (run_count > 0 && run_begin + run_count != row) {
        loader.LoadRun(span.rows + size_t{run_begin} * args.shape.row_bytes, run_count);
        run_count = 0;
      }
      if (run_count == 0) run_begin = row;
      ++run_count;
    }
    loader.LoadRun(span.rows + size_t{run_begin} * args.shape.row_bytes, run_count);
  }
}

// Samples in scratch memory, ready for k-means steps.
class Samples {
 public:
  Samples(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch)
      : dim_(kernels::SubspaceDim(args.geometry)),
        centroid_count_(kernels::CentroidCount(args.geometry)),
        type_(kernels::KMeansSampleType(exec)),
        available_(CountRows(args)),
        count_(args.sample_tokens == 0 ? available_ : std::min(args.sample_tokens, available_)),
        sample_bytes_(AlignUp(size_t{count_} * dim_ * kernels::DTypeBytes(type_))),
        buffer_(
            scratch.Take(sample_bytes_ + kernels::KMeansStepScratchBytes(dim_, centroid_count_))) {
    SampleLoader loader(exec, args, type_, buffer_.bytes().data());
    if (count_ < available_) {
      LoadSample(args, available_, count_, loader);
      return;
    }
    for (const kernels::RowSpan& span : args.rows) loader.LoadRun(span.rows, span.token_count);
  }

  uint32_t count() const { return count_; }
  kernels::KMeansProblem Problem(std::span<float> centroids) const {
    return {.sample_type = type_,
            .samples = buffer_.bytes().data(),
            .sample_count = count_,
            .dim = dim_,
            .centroid_count = centroid_count_,
            .centroids = centroids};
  }
  std::span<std::byte> step_scratch() const { return buffer_.bytes().subspan(sample_bytes_); }

 private:
  static uint32_t CountRows(const TrainingArgs& args) {
    uint32_t rows = 0;
    for (const kernels::RowSpan& span : args.rows) rows += span.token_count;
    return rows;
  }

  const uint32_t dim_;
  const uint32_t centroid_count_;
  const kernels::DType type_;
  const uint32_t available_;
  const uint32_t count_;
  const size_t sample_bytes_;
  const ScratchPool::Buffer buffer_;
};

}  // namespace

uint64_t MixSeed(uint64_t seed, uint64_t tag) {
  uint64_t mixed = seed + 0x9e3779b97f4a7c15u * (tag + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch) {
  const Samples samples(exec, args, scratch);
  const kernels::KMeansProblem problem = samples.Problem(args.centroids);
  if (args.first.empty()) {
    kernels::KMeansInit(problem, args.seed);
  } else {
    PQC_CHECK(args.first.size() == args.centroids.size());
    std::copy(args.first.begin(), args.first.end(), args.centroids.begin());
  }
  TrainingResult result{.trained_tokens = samples.count()};
  if (samples.count() == 0) return result;
  double last_inertia = std::numeric_limits<double>::infinity();
  while (result.iterations < args.iterations && args.keep_going()) {
    const kernels::KMeansStats stats = kernels::KMeansStep(exec, problem, samples.step_scratch());
    ++result.iterations;
    result.inertia = stats.inertia / samples.count();
    if (stats.inertia == last_inertia && stats.reseeded_count == 0) {
      result.iterations = args.iterations;  // converged: the assignment no longer changes
      break;
    }
    last_inertia = stats.inertia;
  }
  return result;
}

double MeasureInertia(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch) {
  const Samples samples(exec, args, scratch);
  if (samples.count() == 0) return 0;
  const ScratchPool::Buffer copy = scratch.Take(args.centroids.size_bytes());
  const std::span<float> moved(reinterpret_cast<float*>(copy.bytes().data()),
                               args.centroids.size());
  std::copy(args.centroids.begin(), args.centroids.end(), moved.begin());
  // KMeansStep measures the inertia before it moves the centroids.
  return kernels::KMeansStep(exec, samples.Problem(moved), samples.step_scratch()).inertia /
         samples.count();
}

}  // namespace pqcached::kvstore
