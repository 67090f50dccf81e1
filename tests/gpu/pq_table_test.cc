// BuildTables on the device against the reference.
#include "kernels/cuda/select/pq_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/select/pq_table.h"
#include "tests/gpu/device_array.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels::cuda {
namespace {

class PqTableDeviceTest : public DeviceTest {};

TEST_F(PqTableDeviceTest, MatchesReferenceForTasksOfSeveralLanes) {
  for (const PqGeometry geometry :
       {PqGeometry{128, 2, 6}, PqGeometry{96, 4, 8}, PqGeometry{64, 1, 4}, PqGeometry{32, 16, 5},
        PqGeometry{72, 4, 6}}) {
    for (const uint32_t group_size : {1u, 4u, 7u}) {
      constexpr uint32_t kTasks = 3;
      const std::vector<float> queries = RandomFloats(kTasks * group_size * geometry.key_dim, 1);
      const std::vector<float> centroids = RandomFloats(kTasks * CentroidFloats(geometry), 2);
      const DeviceArray<float> device_queries(queries);
      const DeviceArray<float> device_centroids(centroids);
      // Codebooks of one layer may be cut in different ways.
      const auto paired_dims = [&](uint32_t task) {
        return task == 1 ? 0
                         : PairedDims(geometry, geometry.key_dim - task * SubspaceDim(geometry));
      };
      std::vector<TableTask> tasks;
      for (uint32_t task = 0; task < kTasks; ++task) {
        tasks.push_back({device_queries.data() + task * group_size * geometry.key_dim,
                         device_centroids.data() + task * CentroidFloats(geometry),
                         paired_dims(task)});
      }
      tasks.push_back({});
      const DeviceArray<TableTask> device_tasks(tasks);
      const size_t task_floats = group_size * TableFloats(geometry);
      DeviceArray<float> tables(tasks.size() * task_floats);
      Finish(BuildTables({.geometry = geometry,
                          .group_size = group_size,
                          .scale = 0.125f,
                          .task_capacity = static_cast<uint32_t>(tasks.size()),
                          .tasks = device_tasks.data(),
                          .tables = tables.data()},
                         stream_));
      const std::vector<float> actual = tables.Get();
      for (uint32_t task = 0; task < kTasks; ++task) {
        std::vector<float> expected(task_floats);
        const std::span<const float> all_queries = queries;
        const std::span<const float> all_centroids = centroids;
        PqGeometry cut = geometry;
        cut.paired_dims = paired_dims(task);
        kernels::BuildTables({Level::kReference},
                             {.geometry = cut,
                              .group_size = group_size,
                              .queries = all_queries.subspan(task * group_size * geometry.key_dim,
                                                             group_size * geometry.key_dim),
                              .scale = 0.125f,
                              .centroids = all_centroids.subspan(task * CentroidFloats(geometry),
                                                                 CentroidFloats(geometry)),
                              .tables = expected});
        for (size_t i = 0; i < task_floats; ++i) {
          ASSERT_NEAR(actual[task * task_floats + i], expected[i], 1e-4f) << task << " " << i;
        }
      }
    }
  }
}

TEST_F(PqTableDeviceTest, RefusesWhatIsOutOfRange) {
  EXPECT_FALSE(BuildTables({.geometry = {128, 3, 6}, .group_size = 1}, stream_).ok());
  EXPECT_FALSE(BuildTables({.geometry = {128, 2, 6}, .group_size = 65}, stream_).ok());
  EXPECT_TRUE(BuildTables({.geometry = {128, 2, 6}, .group_size = 1}, stream_).ok()) << "no tasks";
}

}  // namespace
}  // namespace pqcached::kernels::cuda
