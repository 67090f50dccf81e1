// A decode step of several layers with all that gpu/ has: codes copied one layer ahead, block caches, rows that only the
// host can read; given launch by launch, and captured once and replayed. Its attention is, bit by bit, that of a plain step
// that reads codes and rows where they lie.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu/block_cache.h"
#include "gpu/graph.h"
#include "gpu/layer_codes.h"
#include "gpu/row_staging.h"
#include "kernels/base/dtype.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/select/pq_table.h"
#include "kernels/cuda/select/select.h"
#include "tests/gpu/device_array.h"

namespace pqcached::gpu {
namespace {

using kernels::DType;
using kernels::PqGeometry;
using kernels::cuda::ByteRange;
using kernels::cuda::DeviceRowSpan;
using kernels::cuda::kBlockSlots;
using kernels::cuda::RowLane;
using kernels::cuda::SelectChunk;
using kernels::cuda::SelectLane;
using kernels::cuda::TableTask;

constexpr uint32_t kLayers = 4;
constexpr uint32_t kLanes = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kDim = 32;
constexpr size_t kRowBytes = 2 * kDim * 2;
constexpr uint32_t kSpanTokens = 3 * kBlockSlots;
constexpr uint32_t kSpans = 2;  // of a lane; the second may be the host's alone
constexpr uint32_t kRoom = kSpans * kSpanTokens;
constexpr uint32_t kSink = 4;
constexpr uint32_t kWindow = 8;
constexpr uint32_t kTopK = 40;
constexpr uint32_t kStride = kSink + kTopK + kWindow;
constexpr PqGeometry kGeometry{kDim, 2, 6};
constexpr size_t kLaneCodes = 2 * kRoom;  // two planes
constexpr size_t kLayerCodes = kLanes * kLaneCodes;
constexpr uint32_t kRanges = kLanes * 2;

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// Page-locked memory that both sides use.
template <typename T>
class Pinned {
 public:
  explicit Pinned(size_t count) {
    if (WhyNoDevice().empty()) ExpectOk(buffer_.Allocate(count * sizeof(T)));
  }
  T* data() const { return static_cast<T*>(buffer_.data()); }

 private:
  PinnedBuffer buffer_;
};

// What all layers' launches read, with room for what one kind of step needs more.
struct LayerTables {
  DeviceArray<SelectChunk> chunks{kLanes};
  DeviceArray<DeviceRowSpan> spans{kLanes * kSpans};
  DeviceArray<float> tables{kLanes * kGroup * 2 * 64};
  DeviceArray<float> output{kLanes * kGroup * kDim};
  DeviceArray<float> lse{kLanes * kGroup};
};

class DecodeStepTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (!WhyNoDevice().empty()) return;
    for (size_t i = 0; i < kLayers * kLanes * kGroup * kDim; ++i) queries_.data()[i] = Random();
    std::vector<float> centroids(kLanes * 64 * kDim);
    for (float& value : centroids) value = Random();
    centroids_.Set(centroids);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      plain_.push_back(std::make_unique<LayerTables>());
      full_.push_back(std::make_unique<LayerTables>());
      caches_.push_back(std::make_unique<BlockCache>());
      ExpectOk(caches_.back()->Create({.lane_capacity = kLanes,
                                       .block_capacity = kRoom / kBlockSlots,
                                       .cache_tokens = 2 * kBlockSlots,
                                       .row_stride_bytes = kRowBytes},
                                      stream_));
    }
    ExpectOk(staging_.Create(
        {.lane_capacity = kLanes, .rows_per_lane = kStride, .row_stride_bytes = kRowBytes},
        stream_));
    std::vector<TableTask> tasks;
    for (uint32_t task = 0; task < kLayers * kLanes; ++task) {
      tasks.push_back(
          {queries_.data() + task * kGroup * kDim, centroids_.data() + task % kLanes * 64 * kDim});
    }
    tasks_.Set(tasks);
  }

  float Random() { return std::normal_distribution<float>()(random_); }

  void CreateCodes(size_t layers_in_budget) {
    codes_ = std::make_unique<LayerCodes>();
    ExpectOk(codes_->Create({.layer_count = kLayers,
                             .layer_capacity_bytes = kLayerCodes,
                             .codes_bytes = layers_in_budget * kLayerCodes,
                             .range_capacity = kRanges}));
  }

  // Tokens with random rows and codes, which the host writes into the mapping.
  void Append(uint32_t count) {
    for (uint32_t end = token_count_ + count; token_count_ < end; ++token_count_) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
          for (uint32_t i = 0; i < 2 * kDim; ++i) {
            kernels::StoreElement(DType::kF16, Row(layer, lane, token_count_), i, Random());
          }
          std::memcpy(HostRow(layer, lane, token_count_), Row(layer, lane, token_count_),
                      kRowBytes);
          for (uint32_t plane = 0; plane < 2; ++plane) {
            Codes(layer, lane)[plane * kRoom + token_count_] = static_cast<uint8_t>(random_() % 64);
          }
        }
      }
    }
    for (size_t i = 0; i < kLayers * kLanes * kGroup * kDim; ++i) queries_.data()[i] = Random();
  }

  std::byte* Row(uint32_t layer, uint32_t lane, uint32_t token) {
    return rows_.data() + ((size_t{layer} * kLanes + lane) * kRoom + token) * kRowBytes;
  }
  std::byte* HostRow(uint32_t layer, uint32_t lane, uint32_t token) {
    return host_rows_.data() + ((size_t{layer} * kLanes + lane) * kRoom + token) * kRowBytes;
  }
  uint8_t* Codes(uint32_t layer, uint32_t lane) {
    return code_planes_.data() + layer * kLayerCodes + lane * kLaneCodes;
  }

  // The tables for all tokens that there are; what was copied to resident layers before is not copied again.
  void UpdateTables(bool host_only) {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    std::vector<SelectLane> select_lanes;
    std::vector<RowLane> row_lanes;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      select_lanes.push_back({lane, lane + 1, lane, lane + 1, kTopK});
      row_lanes.push_back({.span_begin = lane * kSpans,
                           .span_end = (lane + 1) * kSpans,
                           .before = {0, kSink},
                           .after = {token_count_ - kWindow, token_count_}});
    }
    select_lanes_.Set(select_lanes);
    row_lanes_.Set(row_lanes);
    const uint32_t resident = codes_->resident_layer_count();
    std::vector<ByteRange> ranges(kLayers * kRanges);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const bool is_resident = codes_->IsResident(layer);
      const uint32_t first = is_resident ? copied_tokens_ : 0;
      std::vector<SelectChunk> chunks[2];
      std::vector<DeviceRowSpan> spans[2];
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        std::byte* copy = codes_->Memory(layer) + lane * kLaneCodes;
        for (uint32_t plane = 0; plane < 2; ++plane) {
          const uint32_t at = plane * kRoom + first;
          if (is_resident) {
            ASSERT_EQ(cudaMemcpyAsync(copy + at, Codes(layer, lane) + at, token_count_ - first,
                                      cudaMemcpyHostToDevice, stream_),
                      cudaSuccess);
            continue;
          }
          ranges[(layer - resident) * kRanges + lane * 2 + plane] = {
              reinterpret_cast<const std::byte*>(Codes(layer, lane)) + at, copy + at,
              token_count_ - first};
        }
        SelectChunk chunk = {.planes = Codes(layer, lane),
                             .stride = kRoom,
                             .slot_begin = kSink,
                             .slot_end = token_count_ - kWindow,
                             .table = lane,
                             .lane = lane};
        chunks[0].push_back(chunk);
        chunk.planes = reinterpret_cast<const uint8_t*>(copy);
        chunks[1].push_back(chunk);
        for (uint32_t span = 0; span < kSpans; ++span) {
          const uint32_t begin = span * kSpanTokens;
          const uint32_t count =
              token_count_ > begin ? std::min(kSpanTokens, token_count_ - begin) : 0;
          DeviceRowSpan entry = {Row(layer, lane, begin), count, begin, begin / kBlockSlots};
          spans[0].push_back(entry);
          if (host_only && span == 1) {
            entry.rows = HostRow(layer, lane, begin);
            entry.host_only = 1;
          }
          spans[1].push_back(entry);
        }
      }
      plain_[layer]->chunks.Set(chunks[0]);
      full_[layer]->chunks.Set(chunks[1]);
      plain_[layer]->spans.Set(spans[0]);
      full_[layer]->spans.Set(spans[1]);
    }
    ranges_.Set(ranges);
    copied_tokens_ = token_count_;
  }

  void Select(uint32_t layer, const LayerTables& tables) {
    ASSERT_TRUE(kernels::cuda::BuildTables({.geometry = kGeometry,
                                            .group_size = kGroup,
                                            .scale = 0.2f,
                                            .task_capacity = kLanes,
                                            .tasks = tasks_.data() + layer * kLanes,
                                            .tables = tables.tables.data()},
                                           stream_)
                    .ok());
    ASSERT_TRUE(kernels::cuda::PqSelect({.geometry = kGeometry,
                                         .group_size = kGroup,
                                         .candidates = {.lane_capacity = kLanes,
                                                        .chunk_capacity = kLanes,
                                                        .lanes = select_lanes_.data(),
                                                        .chunks = tables.chunks.data()},
                                         .table_capacity = kLanes,
                                         .tables = tables.tables.data(),
                                         .selection = {positions_.data(), kTopK, counts_.data()},
                                         .scratch = select_scratch_.data(),
                                         .scratch_bytes = select_scratch_.size()},
                                        stream_)
                    .ok());
  }

  void Locate(const LayerTables& tables, const BlockCache* cache) {
    ASSERT_TRUE(
        kernels::cuda::LocateRows(
            {.lane_capacity = kLanes,
             .lanes = row_lanes_.data(),
             .spans = tables.spans.data(),
             .row_stride_bytes = kRowBytes,
             .positions = positions_.data(),
             .position_stride = kTopK,
             .counts = counts_.data(),
             .residency = cache == nullptr ? kernels::cuda::BlockResidency() : cache->residency(),
             .addresses = addresses_.data(),
             .address_stride = kStride,
             .row_counts = row_counts_.data(),
             .missed_rows = cache == nullptr ? nullptr : staging_.missed_rows(),
             .missed_counts = cache == nullptr ? nullptr : staging_.missed_counts()},
            stream_)
            .ok());
  }

  void Attend(uint32_t layer, const LayerTables& tables) {
    ASSERT_TRUE(
        kernels::cuda::AttendRows({.shape = kAttendShape,
                                   .scale = 0.2f,
                                   .queries = queries_.data() + layer * kLanes * kGroup * kDim,
                                   .addresses = addresses_.data(),
                                   .address_stride = kStride,
                                   .row_counts = row_counts_.data(),
                                   .output = tables.output.data(),
                                   .lse = tables.lse.data(),
                                   .scratch = attend_scratch_.data(),
                                   .scratch_bytes = attend_scratch_.size()},
                                  stream_)
            .ok());
  }

  void GivePlainStep() {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Select(layer, *plain_[layer]);
      Locate(*plain_[layer], nullptr);
      Attend(layer, *plain_[layer]);
    }
  }

  void GiveFullStep() {
    ExpectOk(codes_->BeginStep(ranges_.data()));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      BlockCache& cache = *caches_[layer];
      ExpectOk(codes_->BeginLayer(stream_, layer));
      Select(layer, *full_[layer]);
      ExpectOk(codes_->EndLayer(stream_, layer));
      ExpectOk(cache.BeginStep(stream_));
      Locate(*full_[layer], &cache);
      ExpectOk(staging_.StageMissedRows(stream_, addresses_.data()));
      Attend(layer, *full_[layer]);
      ExpectOk(codes_->JoinSideStream(stream_));
      ExpectOk(cache.EndStep(stream_, row_lanes_.data(), full_[layer]->spans.data()));
    }
    ExpectOk(codes_->EndStep(stream_));
  }

  void FinishUpdates() {
    for (const auto& cache : caches_) ExpectOk(cache->FinishUpdate(stream_));
  }

  void ExpectSameOutputs(const std::string& when) {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_TRUE(full_[layer]->lse.Get() == plain_[layer]->lse.Get())
          << when << " layer " << layer;
      ASSERT_TRUE(full_[layer]->output.Get() == plain_[layer]->output.Get())
          << when << " layer " << layer;
    }
  }

  unsigned long long Hits() {
    unsigned long long hits = 0;
    for (const auto& cache : caches_) {
      BlockCache::Counters counters;
      ExpectOk(cache->Read(counters));
      hits += counters.hits;
    }
    return hits;
  }

  static constexpr kernels::cuda::AttendShape kAttendShape = {.dtype = DType::kF16,
                                                              .key_dim = kDim,
                                                              .value_dim = kDim,
                                                              .group_size = kGroup,
                                                              .lane_capacity = kLanes,
                                                              .row_capacity = kStride,
                                                              .split_count = 3};
  std::mt19937 random_{7};
  uint32_t token_count_ = 0;
  uint32_t copied_tokens_ = 0;
  Pinned<std::byte> rows_{size_t{kLayers} * kLanes * kRoom * kRowBytes};
  std::vector<std::byte> host_rows_ =
      std::vector<std::byte>(size_t{kLayers} * kLanes * kRoom * kRowBytes);
  Pinned<uint8_t> code_planes_{kLayers * kLayerCodes};
  Pinned<float> queries_{size_t{kLayers} * kLanes * kGroup * kDim};
  DeviceArray<float> centroids_{kLanes * 64 * kDim};
  DeviceArray<TableTask> tasks_{kLayers * kLanes};
  DeviceArray<SelectLane> select_lanes_{kLanes};
  DeviceArray<RowLane> row_lanes_{kLanes};
  DeviceArray<ByteRange> ranges_{kLayers * kRanges};
  DeviceArray<uint32_t> positions_{kLanes * kTopK};
  DeviceArray<uint32_t> counts_{kLanes};
  DeviceArray<const std::byte*> addresses_{kLanes * kStride};
  DeviceArray<uint32_t> row_counts_{kLanes};
  DeviceArray<std::byte> select_scratch_{
      kernels::cuda::PqSelectScratchBytes({kGeometry, kGroup, kLanes, kLanes, kLanes})};
  DeviceArray<std::byte> attend_scratch_{kernels::cuda::AttendScratchBytes(kAttendShape)};
  std::vector<std::unique_ptr<LayerTables>> plain_;
  std::vector<std::unique_ptr<LayerTables>> full_;
  std::unique_ptr<LayerCodes> codes_;
  std::vector<std::unique_ptr<BlockCache>> caches_;
  RowStaging staging_;
};

TEST_F(DecodeStepTest, AttendsAsAPlainStepDoesLaunchByLaunchAndCaptured) {
  for (const size_t layers_in_budget : {size_t{2}, size_t{3}, size_t{4}}) {
    CreateCodes(layers_in_budget);
    EXPECT_EQ(codes_->resident_layer_count(), layers_in_budget == 4 ? 4 : layers_in_budget - 2);
    copied_tokens_ = 0;
    token_count_ = 0;
    for (const auto& cache : caches_) {
      ExpectOk(cache->BeginStep(stream_));
      ExpectOk(cache->InvalidateRange(stream_, 0, kLanes, 0));
    }
    Append(2 * kSpanTokens - 60);
    Graph graph;
    for (int step = 0; step < 8; ++step) {
      Append(3);
      UpdateTables(/*host_only=*/step % 3 == 2);
      GivePlainStep();
      if (step < 3) {
        GiveFullStep();
      } else {
        if (step == 3) {
          FinishUpdates();
          ExpectOk(graph.Begin(stream_));
          GiveFullStep();
          FinishUpdates();
          ExpectOk(graph.End());
          EXPECT_GT(graph.node_count(), 8 * kLayers);
        }
        ExpectOk(graph.Launch(stream_));
      }
      ExpectSameOutputs("budget " + std::to_string(layers_in_budget) + " step " +
                        std::to_string(step));
      if (HasFatalFailure()) return;
    }
    // And launch by launch again.
    Append(3);
    UpdateTables(false);
    GivePlainStep();
    GiveFullStep();
    ExpectSameOutputs("after the graph");
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(Hits(), 0u) << "the caches took part";
}

TEST_F(DecodeStepTest, ACaptureThatCannotBeSaysSoAndLeavesTheStreamUsable) {
  Graph graph;
  EXPECT_EQ(graph.Launch(stream_).code(), Code::kInvalid);
  EXPECT_EQ(graph.End().code(), Code::kInvalid);
  EXPECT_EQ(graph.Begin(nullptr).code(), Code::kInvalid);
  ExpectOk(graph.Begin(stream_));
  EXPECT_EQ(graph.Begin(stream_).code(), Code::kInvalid);
  (void)cudaStreamSynchronize(stream_);
  EXPECT_FALSE(graph.End().ok());
  EXPECT_FALSE(graph.is_ready());
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
}

TEST_F(DecodeStepTest, RefusesOptionsByName) {
  const auto codes_message = [](LayerCodes::Options options) {
    LayerCodes codes;
    const Status status = codes.Create(options);
    EXPECT_EQ(status.code(), Code::kInvalid);
    return status.message().substr(0, status.message().find(' '));
  };
  EXPECT_EQ(codes_message({0, 256, 512, 1}), "layer_count");
  EXPECT_EQ(codes_message({2, 0, 512, 1}), "layer_capacity_bytes");
  EXPECT_EQ(codes_message({2, 256, 512, 0}), "range_capacity");
  EXPECT_EQ(codes_message({3, 256, 511, 1}), "codes_bytes");
  const auto staging_message = [&](RowStaging::Options options) {
    RowStaging staging;
    const Status status = staging.Create(options, stream_);
    EXPECT_EQ(status.code(), Code::kInvalid);
    return status.message().substr(0, status.message().find(' '));
  };
  EXPECT_EQ(staging_message({0, 1, 16}), "lane_capacity");
  EXPECT_EQ(staging_message({1, 0, 16}), "rows_per_lane");
  EXPECT_EQ(staging_message({1, 1, 24}), "row_stride_bytes");
}

}  // namespace
}  // namespace pqcached::gpu
