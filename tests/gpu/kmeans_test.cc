// Encoding and k-means on the device against the reference.
#include "kernels/cuda/kmeans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/train/kmeans.h"
#include "kernels/train/pq_encode.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels::cuda {
namespace {

class KMeansDeviceTest : public DeviceTest {};

double Distance(const double* sample, const float* centroid, uint32_t dim) {
  double sum = 0.0;
  for (uint32_t i = 0; i < dim; ++i) {
    const double difference = sample[i] - double{centroid[i]};
    sum += difference * difference;
  }
  return sum;
}

TEST_F(KMeansDeviceTest, EncodesToNearestCentroids) {
  for (const PqGeometry geometry :
       {PqGeometry{64, 2, 6}, PqGeometry{128, 1, 8}, PqGeometry{32, 4, 4}, PqGeometry{36, 2, 5},
        PqGeometry{64, 2, 6, 64}, PqGeometry{128, 4, 8, 64}, PqGeometry{32, 4, 4, 24}}) {
    for (const DType dtype : kAllDTypes) {
      // Two tasks of different lengths, slots behind others.
      const uint32_t row_counts[] = {129, 63};
      constexpr uint32_t kFirstSlot = 5;
      const std::vector<float> centroids = RandomFloats(2 * CentroidFloats(geometry), 7);
      const DeviceArray<float> device_centroids(centroids);
      std::vector<RowData> rows;
      std::vector<std::unique_ptr<DeviceArray<std::byte>>> memory;
      std::vector<std::unique_ptr<DeviceArray<uint8_t>>> planes;
      std::vector<EncodeTask> tasks;
      const size_t plane_stride = 160;
      for (uint32_t task = 0; task < 2; ++task) {
        rows.push_back(MakeRows(dtype, geometry.key_dim + 8, row_counts[task], 1, 20 + task));
        memory.push_back(std::make_unique<DeviceArray<std::byte>>(rows[task].bytes));
        planes.push_back(std::make_unique<DeviceArray<uint8_t>>(
            std::vector<uint8_t>(PlaneCount(geometry) * plane_stride, 0xEE)));
        tasks.push_back({.rows = memory[task]->data(),
                         .centroids = device_centroids.data() + task * CentroidFloats(geometry),
                         .planes = planes[task]->data(),
                         .plane_stride = plane_stride,
                         .row_count = row_counts[task],
                         .first_slot = kFirstSlot});
      }
      const DeviceArray<EncodeTask> device_tasks(tasks);
      Finish(PqEncode({.geometry = geometry,
                       .dtype = dtype,
                       .row_stride_bytes = rows[0].stride_bytes,
                       .row_capacity = 129,
                       .task_capacity = 2,
                       .tasks = device_tasks.data()},
                      stream_));
      for (uint32_t task = 0; task < 2; ++task) {
        const std::vector<uint8_t> actual = planes[task]->Get();
        const uint32_t dim = SubspaceDim(geometry);
        for (uint32_t row = 0; row < row_counts[task]; ++row) {
          for (uint32_t subspace = 0; subspace < geometry.subspace_count; ++subspace) {
            const float* own = centroids.data() + task * CentroidFloats(geometry) +
                               (size_t{subspace} * dim << geometry.bits);
            std::vector<double> numbers;
            for (uint32_t i = 0; i < dim; ++i) {
              numbers.push_back(rows[task].Values(row)[DimOf(geometry, subspace, i)]);
            }
            const double* sample = numbers.data();
            double least = Distance(sample, own, dim);
            for (uint32_t c = 1; c < CentroidCount(geometry); ++c) {
              least = std::min(least, Distance(sample, own + size_t{c} * dim, dim));
            }
            const uint32_t code =
                GetCode(geometry, actual.data(), plane_stride, subspace, kFirstSlot + row);
            ASSERT_LT(code, CentroidCount(geometry));
            ASSERT_LE(Distance(sample, own + size_t{code} * dim, dim), least + 1e-3)
                << "task " << task << " row " << row;
          }
        }
        for (uint32_t plane = 0; plane < PlaneCount(geometry); ++plane) {
          for (uint32_t slot = 0; slot < plane_stride; ++slot) {
            const bool written = slot >= kFirstSlot && slot < kFirstSlot + row_counts[task];
            if (!written) {
              ASSERT_EQ(actual[plane * plane_stride + slot], 0xEE) << "slot " << slot;
            }
          }
        }
      }
    }
  }
}

TEST_F(KMeansDeviceTest, GivesTiesToTheLowestIndex) {
  const PqGeometry geometry = {32, 1, 4};
  const std::vector<float> centroids(CentroidFloats(geometry), 1.0f);  // all equal
  const DeviceArray<float> device_centroids(centroids);
  const RowData rows = MakeRows(DType::kF32, 32, 3, 1, 1);
  const DeviceArray<std::byte> memory(rows.bytes);
  DeviceArray<uint8_t> planes(3);
  const DeviceArray<EncodeTask> tasks(
      std::vector<EncodeTask>{{memory.data(), device_centroids.data(), planes.data(), 3, 3, 0}});
  Finish(PqEncode({.geometry = geometry,
                   .dtype = DType::kF32,
                   .row_stride_bytes = rows.stride_bytes,
                   .row_capacity = 3,
                   .task_capacity = 1,
                   .tasks = tasks.data()},
                  stream_));
  EXPECT_EQ(planes.Get(), std::vector<uint8_t>(3, 0));
}

struct StepShape {
  uint32_t sample_count = 0;
  uint32_t dim = 0;
  uint32_t centroid_count = 0;
};

// Steps of two tasks beside the reference: as long as nothing ties, both move the same way.
class KMeansStepDeviceTest : public DeviceTest {
 protected:
  void ExpectMatches(const StepShape& shape, bool clustered) {
    constexpr uint32_t kTasks = 2;
    RowData rows = MakeRows(DType::kF32, kTasks * shape.dim, shape.sample_count, 1, 3);
    if (clustered) MakeFewDistinct(rows, shape);
    const DeviceArray<std::byte> memory(rows.bytes);
    std::vector<std::vector<float>> samples(kTasks);
    std::vector<std::vector<float>> expected(kTasks);
    std::vector<KMeansTask> tasks;
    std::vector<std::unique_ptr<DeviceArray<float>>> centroids;
    for (uint32_t task = 0; task < kTasks; ++task) {
      for (uint32_t sample = 0; sample < shape.sample_count; ++sample) {
        for (uint32_t i = 0; i < shape.dim; ++i) {
          samples[task].push_back(static_cast<float>(rows.Values(sample)[task * shape.dim + i]));
        }
      }
      expected[task].resize(size_t{shape.centroid_count} * shape.dim);
      KMeansInit(Problem(shape, samples[task], expected[task]), 5 + task);
      centroids.push_back(std::make_unique<DeviceArray<float>>(expected[task]));
      tasks.push_back({memory.data() + task * shape.dim * sizeof(float), centroids[task]->data()});
    }
    const DeviceArray<KMeansTask> device_tasks(tasks);
    DeviceArray<cuda::KMeansStats> stats(kTasks);
    DeviceArray<std::byte> scratch(
        cuda::KMeansStepScratchBytes(shape.sample_count, shape.centroid_count, kTasks));
    for (int step = 0; step < 3; ++step) {
      Finish(cuda::KMeansStep({.dtype = DType::kF32,
                               .row_stride_bytes = rows.stride_bytes,
                               .sample_count = shape.sample_count,
                               .dim = shape.dim,
                               .centroid_count = shape.centroid_count,
                               .task_count = kTasks,
                               .tasks = device_tasks.data(),
                               .stats = stats.data(),
                               .scratch = scratch.data(),
                               .scratch_bytes = scratch.size()},
                              stream_));
      const std::vector<cuda::KMeansStats> actual = stats.Get();
      for (uint32_t task = 0; task < kTasks; ++task) {
        const kernels::KMeansStats reference = Step(shape, samples[task], expected[task]);
        ASSERT_NEAR(actual[task].inertia, reference.inertia, 1e-3 * (1.0 + reference.inertia));
        ASSERT_EQ(actual[task].empty_count, reference.empty_count) << "step " << step;
        ASSERT_EQ(actual[task].reseeded_count, reference.reseeded_count) << "step " << step;
        const std::vector<float> moved = centroids[task]->Get();
        for (size_t i = 0; i < moved.size(); ++i) {
          ASSERT_NEAR(moved[i], expected[task][i], 1e-4f) << "step " << step << " element " << i;
        }
      }
    }
  }

 private:
  static KMeansProblem Problem(const StepShape& shape, const std::vector<float>& samples,
                               std::vector<float>& centroids) {
    return {.sample_type = DType::kF32,
            .samples = reinterpret_cast<const std::byte*>(samples.data()),
            .sample_count = shape.sample_count,
            .dim = shape.dim,
            .centroid_count = shape.centroid_count,
            .centroids = centroids};
  }

  static kernels::KMeansStats Step(const StepShape& shape, const std::vector<float>& samples,
                                   std::vector<float>& centroids) {
    const size_t bytes = kernels::KMeansStepScratchBytes(shape.dim, shape.centroid_count);
    const std::unique_ptr<void, void (*)(void*)> memory(
        std::aligned_alloc(64, (bytes + 63) / 64 * 64), &std::free);
    return kernels::KMeansStep({Level::kReference}, Problem(shape, samples, centroids),
                               {static_cast<std::byte*>(memory.get()), bytes});
  }

  // Fewer values than centroids: some clusters stay empty.
  static void MakeFewDistinct(RowData& rows, const StepShape& shape) {
    for (uint32_t sample = 0; sample < shape.sample_count; ++sample) {
      for (uint32_t i = 0; i < 2 * shape.dim; ++i) {
        rows.Set(sample, i, static_cast<float>((sample % 11 * 37 + i * 5) % 23));
      }
    }
  }
};

TEST_F(KMeansStepDeviceTest, MovesAsTheReference) {
  for (const StepShape shape : {StepShape{500, 32, 16}, StepShape{300, 7, 64},
                                StepShape{129, 100, 16}, StepShape{700, 16, 256}}) {
    ExpectMatches(shape, false);
    if (HasFatalFailure()) return;
  }
}

TEST_F(KMeansStepDeviceTest, LeavesAndPlacesEmptyClustersAsTheReference) {
  ExpectMatches({200, 8, 16}, true);
  if (HasFatalFailure()) return;
  ExpectMatches({5, 8, 16}, false);
  if (HasFatalFailure()) return;
  ExpectMatches({1, 3, 16}, false);
}

TEST_F(KMeansStepDeviceTest, RefusesWhatIsOutOfRange) {
  cuda::KMeansStepArgs args;
  args.dim = 32;
  args.centroid_count = 17;
  EXPECT_FALSE(cuda::KMeansStep(args, stream_).ok());
  args.centroid_count = 16;
  args.task_count = 1;
  EXPECT_FALSE(cuda::KMeansStep(args, stream_).ok()) << "no scratch";
  cuda::PqEncodeArgs encode;
  encode.geometry = {32, 3, 4};
  EXPECT_FALSE(cuda::PqEncode(encode, stream_).ok());
}

}  // namespace
}  // namespace pqcached::kernels::cuda
