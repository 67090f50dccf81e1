#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/train/kmeans.h"
#include "kernels/train/pq_encode.h"
#include "kernels/train/rotate.h"
#include "kvstore/read/indexes/pq.h"
#include "kvstore/read/indexes/seeds.h"

namespace pqcached::kvstore {
namespace {

kernels::PqGeometry GeometryOf(const TrainingArgs& args) {
  return kvstore::GeometryOf(*args.codebook);
}

// Returns the centroids [2^b, key_dim / m] of the task's sub-space.
std::span<float> CentroidsOf(const CodebookHeader& codebook, const TrainingArgs& args) {
  const std::span<const float> all = Centroids(codebook, args.kv_head);
  const size_t floats = all.size() / codebook.index.subspace_count;
  return {const_cast<float*>(all.data()) + args.task * floats, floats};
}

constexpr uint32_t kRotatedRows = 192;  // at once

// Loads rows of one sub-space into consecutive samples.
class SampleLoader {
 public:
  static size_t ScratchBytes(const TrainingArgs& args) {
    if (!IsWeighted(args.codebook->index)) return 0;
    const size_t dim = kernels::SubspaceDim(GeometryOf(args));
    return PaddedBytes(kRotatedRows * dim * sizeof(float)) +
           kernels::RotateScratchBytes(args.shape.key_dim);
  }

  // `scratch`: ScratchBytes.
  SampleLoader(const kernels::Exec& exec, const TrainingArgs& args, kernels::DType sample_type,
               std::byte* samples, std::span<std::byte> scratch)
      : exec_(exec),
        args_(args),
        dim_(kernels::SubspaceDim(GeometryOf(args))),
        sample_type_(sample_type),
        scratch_(scratch),
        next_(samples) {}

  void LoadRun(const std::byte* rows, uint32_t count) {
    if (count == 0) return;
    if (IsWeighted(args_.codebook->index)) return LoadRotated(rows, count);
    const size_t number_bytes = kernels::DTypeBytes(args_.shape.dtype);
    const kernels::PqGeometry geometry = GeometryOf(args_);
    kernels::KMeansLoad(
        exec_, {.source_type = args_.shape.dtype,
                .rows = rows + kernels::DimOf(geometry, args_.task, 0) * number_bytes,
                .row_stride = args_.shape.row_bytes,
                .row_count = count,
                .dim = dim_,
                .pair_offset_bytes = kernels::PairOffset(geometry, args_.task) * number_bytes,
                .sample_type = sample_type_,
                .samples = next_});
    next_ += size_t{count} * dim_ * kernels::DTypeBytes(sample_type_);
  }

 private:
  void LoadRotated(const std::byte* rows, uint32_t count) {
    const size_t block_bytes = kRotatedRows * size_t{dim_} * sizeof(float);
    for (uint32_t first = 0; first < count; first += kRotatedRows) {
      const uint32_t block = std::min(kRotatedRows, count - first);
      kernels::RotateRows(exec_, {.dtype = args_.shape.dtype,
                                  .rows = rows + size_t{first} * args_.shape.row_bytes,
                                  .row_stride = args_.shape.row_bytes,
                                  .row_count = block,
                                  .dim = args_.shape.key_dim,
                                  .map = KeyMapsOf(*args_.codebook, args_.kv_head).keys,
                                  .first_output = args_.task * dim_,
                                  .output_count = dim_,
                                  .outputs = reinterpret_cast<float*>(scratch_.data()),
                                  .scratch = scratch_.subspan(PaddedBytes(block_bytes))});
      kernels::KMeansLoad(exec_, {.source_type = kernels::DType::kF32,
                                  .rows = scratch_.data(),
                                  .row_stride = dim_ * sizeof(float),
                                  .row_count = block,
                                  .dim = dim_,
                                  .sample_type = sample_type_,
                                  .samples = next_});
      next_ += size_t{block} * dim_ * kernels::DTypeBytes(sample_type_);
    }
  }

  const kernels::Exec& exec_;
  const TrainingArgs& args_;
  const uint32_t dim_;
  const kernels::DType sample_type_;
  const std::span<std::byte> scratch_;
  std::byte* next_;
};

// Loads `wanted` of `available` rows; every subset is equally likely (selection sampling, Knuth
// 3.4.2 S).
void LoadSample(const TrainingArgs& args, uint32_t available, uint32_t wanted,
                SampleLoader& loader) {
  uint64_t state = args.seed;
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

uint32_t CountRows(const TrainingArgs& args) {
  uint32_t rows = 0;
  for (const kernels::RowSpan& span : args.rows) rows += span.token_count;
  return rows;
}

uint32_t CountSamples(const TrainingArgs& args) {
  const uint32_t available = CountRows(args);
  return args.sample_tokens == 0 ? available : std::min(args.sample_tokens, available);
}

// Samples in scratch memory, ready for k-means steps.
class Samples {
 public:
  static size_t SizeBytes(const kernels::Exec& exec, const TrainingArgs& args) {
    return SampleBytes(exec, args) + SampleLoader::ScratchBytes(args);
  }

  Samples(const kernels::Exec& exec, const TrainingArgs& args, std::span<std::byte> scratch)
      : dim_(kernels::SubspaceDim(GeometryOf(args))),
        centroid_count_(kernels::CentroidCount(GeometryOf(args))),
        type_(kernels::KMeansSampleType(exec)),
        count_(CountSamples(args)),
        samples_(scratch.data()),
        step_scratch_(scratch.subspan(SizeBytes(exec, args))) {
    SampleLoader loader(exec, args, type_, scratch.data(),
                        scratch.subspan(SampleBytes(exec, args)));
    if (const uint32_t available = CountRows(args); count_ < available) {
      LoadSample(args, available, count_, loader);
      return;
    }
    for (const kernels::RowSpan& span : args.rows) loader.LoadRun(span.rows, span.token_count);
  }

  uint32_t count() const { return count_; }
  kernels::KMeansProblem Problem(std::span<float> centroids) const {
    return {.sample_type = type_,
            .samples = samples_,
            .sample_count = count_,
            .dim = dim_,
            .centroid_count = centroid_count_,
            .centroids = centroids};
  }
  std::span<std::byte> step_scratch() const { return step_scratch_; }

 private:
  static size_t SampleBytes(const kernels::Exec& exec, const TrainingArgs& args) {
    return PaddedBytes(size_t{CountSamples(args)} * kernels::SubspaceDim(GeometryOf(args)) *
                       kernels::DTypeBytes(kernels::KMeansSampleType(exec)));
  }

  const uint32_t dim_;
  const uint32_t centroid_count_;
  const kernels::DType type_;
  const uint32_t count_;
  const std::byte* const samples_;
  const std::span<std::byte> step_scratch_;
};

size_t StepScratchBytes(const TrainingArgs& args) {
  return kernels::KMeansStepScratchBytes(kernels::SubspaceDim(GeometryOf(args)),
                                         kernels::CentroidCount(GeometryOf(args)));
}

}  // namespace

uint32_t PqIndex::TrainingTasks(const IndexDescriptor& index) const { return index.subspace_count; }

size_t PqIndex::TrainScratchBytes(const kernels::Exec& exec, const TrainingArgs& args) const {
  // MeasureInertia copies the centroids in front.
  return PaddedBytes(CentroidsOf(*args.codebook, args).size_bytes()) +
         Samples::SizeBytes(exec, args) + StepScratchBytes(args);
}

TrainingResult PqIndex::Train(const kernels::Exec& exec, const TrainingArgs& args,
                              std::span<std::byte> scratch) const {
  const Samples samples(exec, args, scratch);
  const std::span<float> centroids = CentroidsOf(*args.codebook, args);
  const kernels::KMeansProblem problem = samples.Problem(centroids);
  // Centroids of sub-spaces that were cut in another way are no better than random rows.
  if (args.first == nullptr || args.first->paired_dims != args.codebook->paired_dims) {
    kernels::KMeansInit(problem, MixSeed(args.seed, args.task));
  } else {
    const std::span<const float> first = CentroidsOf(*args.first, args);
    PQC_CHECK(first.size() == centroids.size());
    std::copy(first.begin(), first.end(), centroids.begin());
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

double PqIndex::MeasureInertia(const kernels::Exec& exec, const TrainingArgs& args,
                               std::span<std::byte> scratch) const {
  const std::span<const float> centroids = CentroidsOf(*args.codebook, args);
  const Samples samples(exec, args, scratch.subspan(PaddedBytes(centroids.size_bytes())));
  if (samples.count() == 0) return 0;
  const std::span<float> moved(reinterpret_cast<float*>(scratch.data()), centroids.size());
  std::copy(centroids.begin(), centroids.end(), moved.begin());
  // KMeansStep measures the inertia before it moves the centroids.
  return kernels::KMeansStep(exec, samples.Problem(moved), samples.step_scratch()).inertia /
         samples.count();
}

size_t PqIndex::EncodeScratchBytes(const IndexDescriptor& index, const LayerShape& shape) const {
  const size_t plain = kernels::PqEncodeScratchBytes(kvstore::GeometryOf(index, shape.key_dim));
  if (!IsWeighted(index)) return plain;
  return PaddedBytes(kRotatedRows * size_t{shape.key_dim} * sizeof(float)) +
         std::max(plain, kernels::RotateScratchBytes(shape.key_dim));
}

void PqIndex::Encode(const kernels::Exec& exec, const EncodeArgs& args,
                     std::span<std::byte> scratch) const {
  const uint32_t dim = args.shape.key_dim;
  kernels::PqEncodeArgs encode{.geometry = kvstore::GeometryOf(*args.codebook),
                               .dtype = args.shape.dtype,
                               .rows = args.rows,
                               .row_stride = args.shape.row_bytes,
                               .row_count = args.slots.end - args.slots.begin,
                               .centroids = Centroids(*args.codebook, args.kv_head),
                               .planes = const_cast<uint8_t*>(Planes(*args.data, args.kv_head)),
                               .plane_stride = args.data->plane_stride_bytes,
                               .first_slot = args.slots.begin,
                               .scratch = scratch};
  if (!IsWeighted(args.codebook->index)) return kernels::PqEncode(exec, encode);
  const std::span<std::byte> work =
      scratch.subspan(PaddedBytes(kRotatedRows * size_t{dim} * sizeof(float)));
  encode.dtype = kernels::DType::kF32;
  encode.rows = scratch.data();
  encode.row_stride = dim * sizeof(float);
  encode.scratch = work;
  for (uint32_t slot = args.slots.begin; slot < args.slots.end; slot += kRotatedRows) {
    encode.first_slot = slot;
    encode.row_count = std::min(kRotatedRows, args.slots.end - slot);
    kernels::RotateRows(exec,
                        {.dtype = args.shape.dtype,
                         .rows = args.rows + size_t{slot - args.slots.begin} * args.shape.row_bytes,
                         .row_stride = args.shape.row_bytes,
                         .row_count = encode.row_count,
                         .dim = dim,
                         .map = KeyMapsOf(*args.codebook, args.kv_head).keys,
                         .first_output = 0,
                         .output_count = dim,
                         .outputs = reinterpret_cast<float*>(scratch.data()),
                         .scratch = work});
    kernels::PqEncode(exec, encode);
  }
}

}  // namespace pqcached::kvstore
