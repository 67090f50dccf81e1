// Memory pressure, as clients and operators meet it; drain and self-test; streams that stand still.
#include <gmock/gmock.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "kvstore/read/refusal.h"
#include "service/handlers/self_test.h"
#include "tests/service/rpc/lifecycle_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;

// A segment of 128 tokens: two layers, two kv heads, 64 KiB each.
constexpr uint64_t kSegmentBytes = uint64_t{4} << 16;

class PressureTest : public LifecycleTest {
 protected:
  template <typename Request, typename Response>
  grpc::Status Admin(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                     const Request& request, Response* response) {
    return (client_->admin().*method)(client_->Context().get(), request, response);
  }
  template <typename Request, typename Response>
  grpc::Status Kv(grpc::Status (v1::KvCache::Stub::*method)(grpc::ClientContext*, const Request&,
                                                            Response*),
                  const Request& request, Response* response) {
    return (client_->kv().*method)(client_->Context().get(), request, response);
  }

  uint64_t OpenPool(uint64_t segments, uint64_t quota_segments = 0) {
    v1::OpenCacheRequest request = CacheRequest();
    request.set_capacity_bytes(segments * kSegmentBytes);
    request.set_quota_bytes(quota_segments * kSegmentBytes);
    *request.mutable_default_index() = Flat();
    v1::OpenCacheResponse response;
    const grpc::Status status = Kv(&v1::KvCache::Stub::OpenCache, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.cache_id();
  }
  static std::vector<uint32_t> Ids(uint32_t count) {
    std::vector<uint32_t> ids(count);
    for (uint32_t i = 0; i < count; ++i) ids[i] = i * 5 + 3;
    return ids;
  }
  v1::CreateSequenceResponse Create(uint64_t cache_id, const std::vector<uint32_t>& ids) {
    v1::CreateSequenceRequest request;
    request.set_cache_id(cache_id);
    request.mutable_token_ids()->Add(ids.begin(), ids.end());
    v1::CreateSequenceResponse response;
    const grpc::Status status = Kv(&v1::KvCache::Stub::CreateSequence, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  grpc::Status Append(grpc::ClientContext* context, uint64_t sequence_id, uint64_t tokens) {
    v1::AppendRequest request;
    v1::SequenceAppend* item = request.add_items();
    item->set_sequence_id(sequence_id);
    for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, 0, tokens);
    v1::AppendResponse response;
    return client_->kv().Append(context, request, &response);
  }
  grpc::Status Append(uint64_t sequence_id, uint64_t tokens) {
    return Append(client_->Context().get(), sequence_id, tokens);
  }
  grpc::Status Drop(uint64_t sequence_id) {
    v1::DropSequenceRequest request;
    request.set_sequence_id(sequence_id);
    v1::DropSequenceResponse response;
    return Kv(&v1::KvCache::Stub::DropSequence, request, &response);
  }
  grpc::Status Evict(uint64_t sequence_id) {
    v1::EvictRequest request;
    request.set_sequence_id(sequence_id);
    v1::EvictResponse response;
    return Admin(&v1::Admin::Stub::Evict, request, &response);
  }
  grpc::Status Pin(uint64_t sequence_id, uint64_t ttl_ms) {
    v1::PinRequest request;
    request.set_sequence_id(sequence_id);
    request.set_ttl_ms(ttl_ms);
    v1::PinResponse response;
    return Admin(&v1::Admin::Stub::Pin, request, &response);
  }
  v1::SequenceDescription Describe(uint64_t sequence_id) {
    v1::DescribeSequenceRequest request;
    request.set_sequence_id(sequence_id);
    v1::DescribeSequenceResponse response;
    const grpc::Status status = Admin(&v1::Admin::Stub::DescribeSequence, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.sequence();
  }
  v1::FetchBlocksResponse Rows(uint64_t sequence_id, uint64_t tokens) {
    v1::FetchBlocksRequest request;
    request.set_sequence_id(sequence_id);
    request.set_layer(kLayers[0]);
    request.add_ranges()->set_end(tokens);
    v1::FetchBlocksResponse response;
    const grpc::Status status = Kv(&v1::KvCache::Stub::FetchBlocks, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  v1::AdmitResponse Admit(uint64_t cache_id, uint64_t tokens, uint64_t output = 0) {
    v1::AdmitRequest request;
    request.set_cache_id(cache_id);
    request.set_token_count(tokens);
    request.set_output_token_count(output);
    v1::AdmitResponse response;
    const grpc::Status status = Kv(&v1::KvCache::Stub::Admit, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  std::unique_ptr<TestClient> client_;
};

TEST_F(PressureTest, RetainedTokensServeOthersUntilMemoryIsShort) {
  Start();
  client_ = Connect();
  const uint64_t cache_id = OpenPool(8);
  const uint64_t first = Create(cache_id, Ids(300)).sequence_id();
  ASSERT_TRUE(Append(first, 300).ok());
  ASSERT_TRUE(Drop(first).ok());
  v1::StatsResponse stats = Stats(*client_);
  EXPECT_EQ(stats.cached_prefix_count(), 1u);
  EXPECT_EQ(stats.pool_used_bytes(), 2 * kSegmentBytes);
  const v1::CreateSequenceResponse again = Create(cache_id, Ids(300));
  EXPECT_EQ(again.token_count(), 256u);
  ASSERT_TRUE(Drop(again.sequence_id()).ok());

  EXPECT_EQ(Admit(cache_id, 6 * 128).verdict(), v1::VERDICT_FITS_NOW);
  EXPECT_TRUE(Admit(cache_id, 1).fits_now());
  const v1::AdmitResponse after = Admit(cache_id, 6 * 128, 1);
  EXPECT_EQ(after.verdict(), v1::VERDICT_AFTER_EVICTION);
  EXPECT_EQ(after.bytes_to_evict(), kSegmentBytes);
  EXPECT_EQ(after.needed_bytes(), 7 * kSegmentBytes);
  ASSERT_TRUE(Append(Create(cache_id, {}).sequence_id(), 7 * 128).ok());
  const v1::AdmitResponse later = Admit(cache_id, 7 * 128);
  EXPECT_EQ(later.verdict(), v1::VERDICT_LATER);
  EXPECT_GT(later.shortfall_bytes(), 0u);
  EXPECT_GT(later.retry_after_ms(), 0u);
  EXPECT_EQ(Admit(cache_id, 9 * 128).verdict(), v1::VERDICT_NEVER);
  stats = Stats(*client_);
  EXPECT_EQ(stats.evicted_bytes(), kSegmentBytes);
  EXPECT_EQ(stats.matched_tokens(), 256u);
  EXPECT_EQ(stats.prompt_tokens(), 512u);
  EXPECT_GT(stats.memory_available_bytes(), 0u);
}

TEST_F(PressureTest, ExhaustionTellsTheShortfallAndWhenToRepeat) {
  Start();
  client_ = Connect();
  const uint64_t cache_id = OpenPool(4, /*quota_segments=*/2);
  const uint64_t sequence_id = Create(cache_id, {}).sequence_id();
  const auto context = client_->Context();
  const grpc::Status status = Append(context.get(), sequence_id, 3 * 128);
  EXPECT_TRUE(Failed(status, StatusCode::RESOURCE_EXHAUSTED, "items[0]", "quota_bytes is"));
  EXPECT_THAT(RefusedBy(status).text, HasSubstr(std::to_string(kSegmentBytes) + " bytes short"));
  EXPECT_EQ(RefusedBy(status).retry_ms, kvstore::kRetryMemory);
  EXPECT_TRUE(Append(sequence_id, 2 * 128).ok());
}

// The control group of a machine that is files, as the kernel would show it.
class FakeGroup {
 public:
  explicit FakeGroup(std::filesystem::path root) : root_(std::move(root)) {
    std::filesystem::create_directories(root_ / "proc/self");
    std::filesystem::create_directories(root_ / "sys/fs/cgroup");
    Write("proc/self/cgroup", "0::/\n");
    Write("sys/fs/cgroup/cgroup.controllers", "memory\n");
    Set(uint64_t{1} << 40, 0);
  }
  void Set(uint64_t max_bytes, uint64_t used_bytes) {
    Write("sys/fs/cgroup/memory.current", std::to_string(used_bytes) + "\n");
    Write("sys/fs/cgroup/memory.max", std::to_string(max_bytes) + "\n");
  }

 private:
  // Renamed into place: whoever reads meanwhile sees the old or the new number.
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(root_ / "new") << text;
    std::filesystem::rename(root_ / "new", root_ / path);
  }

  const std::filesystem::path root_;
};

TEST_F(PressureTest, ALimitThatIsLoweredWhileServingIsFollowedAndARaisedOneHeals) {
  FakeGroup group(directory_ / "machine");
  memory_root_ = directory_ / "machine";
  Start([](Config& config) {
    config.memory_check_interval = absl::Milliseconds(5);
    config.max_retained_share = 1;
  });
  client_ = Connect();
  const uint64_t cache_id = OpenPool(8);
  const uint64_t retained = Create(cache_id, Ids(513)).sequence_id();
  ASSERT_TRUE(Append(retained, 513).ok());
  ASSERT_TRUE(Drop(retained).ok());
  const uint64_t used = Create(cache_id, {}).sequence_id();
  ASSERT_TRUE(Append(used, 128).ok());
  EXPECT_EQ(Stats(*client_).pool_used_bytes(), 5 * kSegmentBytes);
  const v1::FetchBlocksResponse rows = Rows(used, 128);

  const auto await_limit = [&](const auto& wanted) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!wanted(Admit(cache_id, 1).limit_bytes())) {
      ASSERT_LT(std::chrono::steady_clock::now(), until);
    }
  };
  await_limit([](uint64_t bytes) { return bytes == 8 * kSegmentBytes; });
  constexpr uint64_t kMax = uint64_t{1} << 30;
  group.Set(kMax, kMax + 8 * kSegmentBytes);  // beyond it by all that the pool has
  await_limit([](uint64_t bytes) { return bytes < 5 * kSegmentBytes; });
  EXPECT_EQ(Stats(*client_).cached_prefix_count(), 0u);
  EXPECT_EQ(Stats(*client_).evicted_bytes(), 4 * kSegmentBytes);
  EXPECT_LT(Stats(*client_).memory_available_bytes(), kSegmentBytes);
  const uint64_t next = Create(cache_id, {}).sequence_id();
  const auto context = client_->Context();
  const grpc::Status refused = Append(context.get(), next, 4 * 128);
  EXPECT_TRUE(Failed(refused, StatusCode::RESOURCE_EXHAUSTED, "items[0]", "memory is short: "));
  EXPECT_THAT(RefusedBy(refused).text, HasSubstr("sys/fs/cgroup/memory.max"));
  EXPECT_THAT(RefusedBy(refused).text, HasSubstr(" bytes short"));
  EXPECT_EQ(RefusedBy(refused).retry_ms, kvstore::kRetryMemory);
  EXPECT_EQ(Stats(*client_).pool_used_bytes(), kSegmentBytes) << "refused, and nothing changed";

  group.Set(uint64_t{1} << 40, 0);
  await_limit([](uint64_t bytes) { return bytes == 8 * kSegmentBytes; });
  const grpc::Status taken = Append(next, 4 * 128);
  EXPECT_TRUE(taken.ok()) << taken.error_message();
  EXPECT_EQ(Rows(used, 128).SerializeAsString(), rows.SerializeAsString());
}

TEST_F(PressureTest, OperatorsPinAndEvict) {
  Start();
  client_ = Connect();
  const uint64_t sequence_id = Create(OpenPool(8), Ids(200)).sequence_id();
  ASSERT_TRUE(Append(sequence_id, 200).ok());
  EXPECT_EQ(Describe(sequence_id).pin_left_seconds(), 0);
  ASSERT_TRUE(Pin(sequence_id, 3'600'000).ok());
  EXPECT_GT(Describe(sequence_id).pin_left_seconds(), 3500);
  EXPECT_EQ(Stats(*client_).pinned_count(), 1u);
  EXPECT_TRUE(Failed(Evict(sequence_id), StatusCode::FAILED_PRECONDITION, "sequence_id", "pinned"));
  ASSERT_TRUE(Pin(sequence_id, 0).ok());
  EXPECT_TRUE(Evict(sequence_id).ok());
  EXPECT_TRUE(
      Failed(Append(sequence_id, 1), StatusCode::NOT_FOUND, "items[0].sequence_id", "was evicted"));
  EXPECT_TRUE(Failed(Evict(sequence_id), StatusCode::NOT_FOUND, "sequence_id"));
  EXPECT_TRUE(Failed(Pin(sequence_id, 1), StatusCode::NOT_FOUND, "sequence_id"));
  EXPECT_TRUE(Failed(Pin(sequence_id, uint64_t{1} << 63), StatusCode::INVALID_ARGUMENT, "ttl_ms"));
  EXPECT_EQ(Stats(*client_).pool_used_bytes(), 0u);
}

TEST_F(PressureTest, AQuotaAboveTheCapacityIsRefused) {
  Start();
  client_ = Connect();
  v1::OpenCacheRequest request = CacheRequest();
  request.set_quota_bytes(request.capacity_bytes() + 1);
  v1::OpenCacheResponse response;
  EXPECT_TRUE(Failed(Kv(&v1::KvCache::Stub::OpenCache, request, &response),
                     StatusCode::INVALID_ARGUMENT, "quota_bytes"));
}

TEST_F(PressureTest, TenantsKeepToTheirQuotas) {
  Start([](Config& config) {
    config.tenant_quotas["small"] = {.guaranteed_bytes = 0, .max_bytes = 4 * kSegmentBytes};
  });
  client_ = Connect("small");
  v1::OpenCacheRequest request = CacheRequest();
  request.set_capacity_bytes(5 * kSegmentBytes);
  v1::OpenCacheResponse response;
  EXPECT_TRUE(Failed(Kv(&v1::KvCache::Stub::OpenCache, request, &response),
                     StatusCode::RESOURCE_EXHAUSTED, "capacity_bytes", "quota of tenant small"));
  OpenPool(4);
}

TEST_F(PressureTest, ADrainTurnsNewWorkAwayAndLetsTheRestGoOn) {
  Start();
  client_ = Connect();
  const uint64_t cache_id = OpenPool(8);
  const uint64_t sequence_id = Create(cache_id, {}).sequence_id();
  v1::DrainRequest request;
  v1::DrainResponse response;
  ASSERT_TRUE(Admin(&v1::Admin::Stub::Drain, request, &response).ok());
  EXPECT_TRUE(response.draining());
  EXPECT_EQ(response.session_count(), 1u);
  EXPECT_EQ(response.sequence_count(), 1u);
  EXPECT_EQ(response.calls_in_flight(), 0u);
  EXPECT_TRUE(Stats(*client_).draining());

  v1::CreateSequenceRequest create;
  create.set_cache_id(cache_id);
  v1::CreateSequenceResponse created;
  EXPECT_TRUE(Failed(Kv(&v1::KvCache::Stub::CreateSequence, create, &created),
                     StatusCode::UNAVAILABLE, "", "draining"));
  v1::IngestResponse ingested;
  const auto context = client_->Context();
  const auto writer = client_->kv().Ingest(context.get(), &ingested);
  EXPECT_TRUE(Failed(writer->Finish(), StatusCode::UNAVAILABLE, "", "draining"));
  EXPECT_TRUE(Append(sequence_id, 10).ok());
  Connect();  // operators look on, and clients of a worker before go on with their sessions

  request.set_resume(true);
  ASSERT_TRUE(Admin(&v1::Admin::Stub::Drain, request, &response).ok());
  EXPECT_FALSE(response.draining());
  EXPECT_TRUE(Kv(&v1::KvCache::Stub::CreateSequence, create, &created).ok());
  Connect();
}

TEST_F(PressureTest, TheSelfTestComparesEveryInstructionSet) {
  Start();
  client_ = Connect();
  v1::SelfTestResponse response;
  ASSERT_TRUE(Admin(&v1::Admin::Stub::SelfTest, v1::SelfTestRequest(), &response).ok());
  EXPECT_TRUE(response.passed()) << response.DebugString();
  EXPECT_EQ(static_cast<size_t>(response.checks_size()), 4 * kernels::AvailableLevels().size());
  EXPECT_EQ(Stats(*client_).cache_count(), 0u);  // of its own store alone
}

TEST(SelfTest, EndsEarlyWhenNobodyWaits) {
  for (const SelfTestCheck& check : RunSelfTest([] { return false; })) {
    EXPECT_EQ(check.status.code(), absl::StatusCode::kCancelled) << check.name;
  }
}

TEST_F(PressureTest, AnIngestThatSendsNothingIsCutOff) {
  Start([](Config& config) { config.stream_timeout = absl::Milliseconds(200); });
  client_ = Connect();
  const uint64_t sequence_id = Create(OpenPool(8), {}).sequence_id();
  const auto context = client_->Context();
  v1::IngestResponse response;
  const auto writer = client_->kv().Ingest(context.get(), &response);
  v1::IngestRequest request;
  request.mutable_header()->set_sequence_id(sequence_id);
  writer->Write(request);
  request.mutable_chunk()->set_first_position(0);
  *request.mutable_chunk()->mutable_rows() = RowsOf(kLayers[0], 0, 200);
  writer->Write(request);
  EXPECT_TRUE(Failed(writer->Finish(), StatusCode::DEADLINE_EXCEEDED, "stream_timeout"));
  AwaitWriters(*client_, sequence_id, 0);
  EXPECT_EQ(Stats(*client_).pool_used_bytes(), 0u);
}

}  // namespace
}  // namespace pqcached::service
