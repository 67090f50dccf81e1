#include "kvstore/training.h"

#include <limits>

#include "kernels/kmeans.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kAlignment = 64;

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Loads rows of one sub-space, one after the other.
class SampleLoader {
 public:
  SampleLoader(const kernels::Exec& exec, const TrainingArgs& args, kernels::DType sample_type,
               std::byte* samples)
      : exec_(exec),
        args_(args),
        dim_(args.shape.key_dim / args.index.subspace_count),
        sample_type_(sample_type),
        next_(samples) {}

  void LoadRun(const std::byte* rows, uint32_t count) {
    if (count == 0) return;
    kernels::KMeansLoad(exec_, {.source_type = args_.shape.dtype,
                                .rows = rows + size_t{args_.subspace} * dim_ *
                                                   kernels::DTypeBytes(args_.shape.dtype),
                                .row_stride = args_.shape.row_bytes,
                                .row_count = count,
                                .dim = dim_,
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

// Loads `wanted` of `available` rows, each subset as likely as any other (selection sampling,
// Knuth 3.4.2 S).
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

}  // namespace

uint64_t MixSeed(uint64_t seed, uint64_t tag) {
  uint64_t mixed = seed + 0x9e3779b97f4a7c15u * (tag + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

TrainingResult Train(const kernels::Exec& exec, const TrainingArgs& args, ScratchPool& scratch) {
  uint32_t available = 0;
  for (const kernels::RowSpan& span : args.rows) available += span.token_count;
  const bool all = args.sample_tokens == 0 || args.sample_tokens >= available;
  const uint32_t sample_count = all ? available : args.sample_tokens;

  const uint32_t dim = args.shape.key_dim / args.index.subspace_count;
  const uint32_t centroid_count = 1u << args.index.bits;
  const kernels::DType sample_type = kernels::KMeansSampleType(exec);
  const size_t sample_bytes =
      AlignUp(size_t{sample_count} * dim * kernels::DTypeBytes(sample_type));
  const size_t step_bytes = kernels::KMeansStepScratchBytes(dim, centroid_count);
  const ScratchPool::Buffer buffer = scratch.Take(sample_bytes + step_bytes);
  const std::span<std::byte> step_scratch = buffer.bytes().subspan(sample_bytes, step_bytes);

  SampleLoader loader(exec, args, sample_type, buffer.bytes().data());
  if (all) {
    for (const kernels::RowSpan& span : args.rows) loader.LoadRun(span.rows, span.token_count);
  } else {
    LoadSample(args, available, sample_count, loader);
  }
  const kernels::KMeansProblem problem{.sample_type = sample_type,
                                       .samples = buffer.bytes().data(),
                                       .sample_count = sample_count,
                                       .dim = dim,
                                       .centroid_count = centroid_count,
                                       .centroids = args.centroids};
  kernels::KMeansInit(problem, args.seed);
  TrainingResult result{.trained_tokens = sample_count};
  double last_inertia = std::numeric_limits<double>::infinity();
  if (sample_count == 0) return result;
  while (result.iterations < args.iterations && args.go_on()) {
    const kernels::KMeansStats stats = kernels::KMeansStep(exec, problem, step_scratch);
    ++result.iterations;
    result.inertia = stats.inertia / sample_count;
    if (stats.inertia == last_inertia && stats.reseeded_count == 0) {
      result.iterations = args.iterations;  // the assignment stands still
      break;
    }
    last_inertia = stats.inertia;
  }
  return result;
}

}  // namespace pqcached::kvstore
