// The real libpqcached_gpu on a machine without a device, or without a driver: a status that says so, and no crash when
// the process ends. On a machine with a device there is nothing to see here.
#include <gtest/gtest.h>

#include <string>

#include "pqcached/gpu.h"
#include "tests/client/layer.h"
#include "tests/client/local/store_client.h"
#include "tests/skip.h"

namespace pqcached {
namespace {

TEST(NoDeviceTest, TheRealLibraryLoadsAndSaysWhatIsMissing) {
  testing::Sidecar sidecar(testing::SmallSegments());
  pqc_client* const client = testing::OpenStoreHandle(sidecar, {.thread_count = 1});
  const uint32_t layers[] = {0};
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = layers;
  group.layer_count = 1;
  group.kv_heads = 2;
  group.query_heads = 4;
  group.key_dim = group.value_dim = 64;
  group.dtype = PQC_F16;
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  spec.name = spec.model_fingerprint = "cache";
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = 16 << 20;
  pqc_cache* cache = nullptr;
  ASSERT_EQ(pqc_cache_open(client, &spec, &cache), PQC_OK) << pqc_last_error();
  pqc_gpu_options options = PQC_INIT(pqc_gpu_options);
  options.token_capacity = 1024;
  options.gpu_library_path = PQCACHED_GPU_LIBRARY;
  pqc_gpu* gpu = nullptr;
  const pqc_status status = pqc_gpu_open(cache, &options, &gpu);
  const std::string reason = pqc_last_error();
  pqc_gpu_close(gpu);
  pqc_cache_close(cache);
  pqc_client_close(client);
  if (status == PQC_OK) PQC_SKIP("no_gpu") << "there is a device";
  EXPECT_EQ(status, PQC_FAILED_PRECONDITION) << reason;
  EXPECT_TRUE(reason.starts_with("no device support: ")) << reason;
}

}  // namespace
}  // namespace pqcached
