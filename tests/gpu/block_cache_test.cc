// BlockCache: whatever it holds, a step reads the rows of its tokens; across appends, roll-backs, new sequences in a
// lane, and updates on the side stream in any order that events allow. And what each policy keeps.
#include "gpu/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/device_array.h"
#include "tests/gpu/plain_block_cache.h"

namespace pqcached::gpu {
namespace {

using kernels::cuda::CachePolicy;
using kernels::cuda::DeviceRowSpan;
using kernels::cuda::kBlockSlots;
using kernels::cuda::kNotResident;
using kernels::cuda::RowLane;

constexpr size_t kRowBytes = 32;
constexpr uint32_t kLanes = 2;
constexpr uint32_t kSpanTokens = 6 * kBlockSlots;  // room of one span
constexpr uint32_t kSpans = 2;                     // of a lane
constexpr uint32_t kLaneTokens = kSpans * kSpanTokens;
constexpr uint32_t kBlocks = kLaneTokens / kBlockSlots;

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// Page-locked rows of all lanes, as the mapping of a pool would be.
class Mapping {
 public:
  Mapping() {
    if (!WhyNoDevice().empty()) return;
    void* memory = nullptr;
    EXPECT_EQ(cudaHostAlloc(&memory, size_t{kLanes} * kLaneTokens * kRowBytes, cudaHostAllocMapped),
              cudaSuccess);
    bytes_ = static_cast<std::byte*>(memory);
  }
  ~Mapping() {
    if (bytes_ == nullptr) return;
    EXPECT_EQ(cudaFreeHost(bytes_), cudaSuccess);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* Row(uint32_t lane, uint32_t token) {
    return bytes_ + (size_t{lane} * kLaneTokens + token) * kRowBytes;
  }

 private:
  std::byte* bytes_ = nullptr;
};

// A step's reads, checked once they are done.
struct PendingStep {
  std::unique_ptr<DeviceArray<std::byte>> target;
  std::vector<std::vector<std::byte>> expected;  // per lane
};

class BlockCacheTest : public DeviceTest {
 protected:
  static constexpr size_t kMaxRows = 64;

  void Start(CachePolicy policy, uint32_t cache_tokens, uint32_t max_loads) {
    cache_ = std::make_unique<BlockCache>();
    ExpectOk(cache_->Create({.lane_capacity = kLanes,
                             .block_capacity = kBlocks,
                             .cache_tokens = cache_tokens,
                             .row_stride_bytes = kRowBytes,
                             .policy = policy,
                             .max_loads = max_loads},
                            stream_));
    token_counts_.assign(kLanes, 0);
  }

  // Rows that no other token ever had.
  void Append(uint32_t lane, uint32_t count) {
    for (uint32_t i = 0; i < count && token_counts_[lane] < kLaneTokens; ++i) {
      std::byte* row = mapping_.Row(lane, token_counts_[lane]++);
      ++row_number_;
      for (size_t b = 0; b < kRowBytes; ++b) {
        row[b] = static_cast<std::byte>(row_number_ >> b % 4 * 8 & 0xFFu);
      }
    }
  }

  // One step that reads `tokens` of every lane.
  void Step(const std::vector<std::vector<uint32_t>>& tokens) {
    std::vector<RowLane> lanes;
    std::vector<DeviceRowSpan> spans;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      lanes.push_back({.span_begin = lane * kSpans, .span_end = (lane + 1) * kSpans});
      for (uint32_t span = 0; span < kSpans; ++span) {
        const uint32_t first = span * kSpanTokens;
        const uint32_t count =
            token_counts_[lane] > first ? std::min(kSpanTokens, token_counts_[lane] - first) : 0;
        spans.push_back({mapping_.Row(lane, first), count, first, first / kBlockSlots});
      }
    }
    std::vector<uint32_t> positions(kLanes * kMaxRows, 0);
    std::vector<uint32_t> counts;
    PendingStep pending;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      counts.push_back(static_cast<uint32_t>(tokens[lane].size()));
      std::vector<std::byte> expected;
      for (size_t i = 0; i < tokens[lane].size(); ++i) {
        positions[lane * kMaxRows + i] = tokens[lane][i];
        const std::byte* row = mapping_.Row(lane, tokens[lane][i]);
        expected.insert(expected.end(), row, row + kRowBytes);
      }
      pending.expected.push_back(expected);
    }
    Set(lanes_, lanes);
    Set(spans_, spans);
    Set(positions_, positions);
    Set(counts_, counts);
    pending.target = std::make_unique<DeviceArray<std::byte>>(kLanes * kMaxRows * kRowBytes);
    ASSERT_TRUE(kernels::cuda::LocateRows({.lane_capacity = kLanes,
                                           .lanes = lanes_.data(),
                                           .spans = spans_.data(),
                                           .row_stride_bytes = kRowBytes,
                                           .positions = positions_.data(),
                                           .position_stride = kMaxRows,
                                           .counts = counts_.data(),
                                           .residency = cache_->residency(),
                                           .addresses = addresses_.data(),
                                           .address_stride = kMaxRows,
                                           .row_counts = row_counts_.data()},
                                          stream_)
                    .ok());
    ASSERT_TRUE(kernels::cuda::GatherRows({.lane_capacity = kLanes,
                                           .addresses = addresses_.data(),
                                           .address_stride = kMaxRows,
                                           .row_counts = row_counts_.data(),
                                           .part_begin_bytes = 0,
                                           .part_bytes = kRowBytes,
                                           .target = pending.target->data(),
                                           .target_stride_bytes = kRowBytes},
                                          stream_)
                    .ok());
    ExpectOk(cache_->EndStep(stream_, lanes_.data(), spans_.data()));
    pending_.push_back(std::move(pending));
  }

  // Waits, then compares what all steps since the last call have read.
  void CheckReads() {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (const PendingStep& step : pending_) {
      const std::vector<std::byte> actual = step.target->Get();
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const auto first = actual.begin() + static_cast<ptrdiff_t>(lane * kMaxRows * kRowBytes);
        const auto size = static_cast<ptrdiff_t>(step.expected[lane].size());
        ASSERT_TRUE(std::equal(first, first + size, step.expected[lane].begin()))
            << "lane " << lane << " read rows of other tokens";
      }
    }
    pending_.clear();
  }

  std::vector<uint32_t> TokensOfBlocks(const std::vector<uint32_t>& blocks, uint32_t per_block) {
    std::vector<uint32_t> tokens;
    for (const uint32_t block : blocks) {
      for (uint32_t i = 0; i < per_block; ++i) tokens.push_back(block * kBlockSlots + i * 3);
    }
    return tokens;
  }

  // Blocks of lane 0 that are resident, once all is done.
  std::vector<uint32_t> ResidentBlocks() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<uint32_t> slots(kBlocks);
    EXPECT_EQ(cudaMemcpy(slots.data(), cache_->residency().cache_slots, kBlocks * sizeof(uint32_t),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    std::vector<uint32_t> blocks;
    for (uint32_t block = 0; block < kBlocks; ++block) {
      if (slots[block] != kNotResident) blocks.push_back(block);
    }
    return blocks;
  }

  // A whole step for lane 0 alone.
  void StepOfBlocks(const std::vector<uint32_t>& blocks, uint32_t per_block = 4) {
    ExpectOk(cache_->BeginStep(stream_));
    Step({TokensOfBlocks(blocks, per_block), {}});
    CheckReads();
  }

  template <typename T>
  void Set(const DeviceArray<T>& target, const std::vector<T>& values) {
    ASSERT_EQ(values.size(), target.size());
    ASSERT_EQ(cudaMemcpyAsync(target.data(), values.data(), target.bytes(), cudaMemcpyHostToDevice,
                              stream_),
              cudaSuccess);
  }

  Mapping mapping_;
  std::unique_ptr<BlockCache> cache_;
  std::vector<uint32_t> token_counts_;
  uint32_t row_number_ = 0;
  std::vector<PendingStep> pending_;
  DeviceArray<RowLane> lanes_{kLanes};
  DeviceArray<DeviceRowSpan> spans_{size_t{kLanes} * kSpans};
  DeviceArray<uint32_t> positions_{kLanes * kMaxRows};
  DeviceArray<uint32_t> counts_{kLanes};
  DeviceArray<const std::byte*> addresses_{kLanes * kMaxRows};
  DeviceArray<uint32_t> row_counts_{kLanes};
};

TEST_F(BlockCacheTest, StepsReadTheRowsOfTheirTokensWhateverHappensBetween) {
  for (const CachePolicy policy :
       {CachePolicy::kLru, CachePolicy::kLfu, CachePolicy::kFrequencyAdmission}) {
    Start(policy, 3 * kBlockSlots, 2);
    std::mt19937 random(static_cast<uint32_t>(policy));
    const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() % limit); };
    for (uint32_t lane = 0; lane < kLanes; ++lane) Append(lane, 700);
    for (uint32_t step = 0; step < 60; ++step) {
      ExpectOk(cache_->BeginStep(stream_));
      const uint32_t lane = below(kLanes);
      if (below(8) == 0) {  // another sequence in the lane: its rows lie where the old ones lay
        CheckReads();
        ExpectOk(cache_->InvalidateRange(stream_, lane, lane + 1, 0));
        token_counts_[lane] = 0;
        Append(lane, 100 + below(900));
      } else if (below(6) == 0) {  // rolled back, then other tokens
        CheckReads();
        const uint32_t kept = below(token_counts_[lane] + 1);
        ExpectOk(cache_->InvalidateRange(stream_, lane, lane + 1, kept / kBlockSlots));
        token_counts_[lane] = kept;
        Append(lane, 1 + below(200));
      } else {
        Append(lane, below(40));
      }
      std::vector<std::vector<uint32_t>> tokens(kLanes);
      for (uint32_t i = 0; i < kLanes; ++i) {
        const uint32_t centre = below(std::max(1u, token_counts_[i]));
        for (uint32_t row = 0; row < kMaxRows && token_counts_[i] > 0; ++row) {
          const uint32_t token = below(24) == 0 ? below(token_counts_[i]) : centre + below(150);
          tokens[i].push_back(std::min(token, token_counts_[i] - 1));
        }
        std::sort(tokens[i].begin(), tokens[i].end());
      }
      Step(tokens);
      if (HasFatalFailure()) return;
    }
    CheckReads();
    BlockCache::Counters counters;
    ExpectOk(cache_->Read(counters));
    EXPECT_GT(counters.hits, 0u);
    EXPECT_GT(counters.misses, 0u);
    EXPECT_GT(counters.evicted, 0u);
    EXPECT_LE(counters.evicted, counters.loaded);
    cache_.reset();
    if (HasFatalFailure()) return;
  }
}

TEST_F(BlockCacheTest, AdmitsNoBlockThatIsStillBeingFilled) {
  Start(CachePolicy::kLru, 4 * kBlockSlots, 32);
  Append(0, 2 * kBlockSlots + 100);
  StepOfBlocks({0, 1, 2});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 1}));
  Append(0, 27);
  StepOfBlocks({0, 1, 2});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 1}));
  Append(0, 1);
  StepOfBlocks({2});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 1, 2}));
}

TEST_F(BlockCacheTest, KnowsNothingOfTheSequenceBefore) {
  Start(CachePolicy::kLru, 4 * kBlockSlots, 32);
  Append(0, 4 * kBlockSlots);
  StepOfBlocks({0, 1, 2, 3});
  StepOfBlocks({0, 1, 2, 3});
  BlockCache::Counters before;
  ExpectOk(cache_->Read(before));
  EXPECT_EQ(before.hits, 16u);
  ExpectOk(cache_->BeginStep(stream_));
  ExpectOk(cache_->InvalidateRange(stream_, 0, 1, 0));
  token_counts_[0] = 0;
  Append(0, 4 * kBlockSlots);
  Step({TokensOfBlocks({0, 1, 2, 3}, 4), {}});
  CheckReads();
  BlockCache::Counters after;
  ExpectOk(cache_->Read(after));
  EXPECT_EQ(after.hits, before.hits) << "the first step of a sequence hits nothing";
}

TEST_F(BlockCacheTest, DecidesAsThePlainFormDoes) {
  for (const CachePolicy policy :
       {CachePolicy::kLru, CachePolicy::kLfu, CachePolicy::kFrequencyAdmission}) {
    constexpr uint32_t kMaxLoads = 2;
    Start(policy, 4 * kBlockSlots, kMaxLoads);
    Append(0, kLaneTokens - kBlockSlots / 2);  // the last block is not complete
    PlainBlockCache plain(
        {.policy = policy, .block_capacity = kBlocks, .slot_capacity = 4, .max_loads = kMaxLoads});
    std::mt19937 random(17);
    for (uint32_t step = 0; step < 40; ++step) {
      ExpectOk(cache_->BeginStep(stream_));
      std::vector<uint32_t> tokens;
      std::vector<uint32_t> touches(kBlocks, 0);
      const auto hot = static_cast<uint32_t>(step / 8);
      for (uint32_t i = 0; i < 12; ++i) {
        const auto any = static_cast<uint32_t>(random());
        const uint32_t block = any % 3 == 0 ? (any >> 8) % kBlocks : hot + (any >> 8) % 4;
        const uint32_t token = block * kBlockSlots + (any >> 16) % (kBlockSlots / 2);
        tokens.push_back(token);
        ++touches[block];
      }
      std::sort(tokens.begin(), tokens.end());
      Step({tokens, {}});
      CheckReads();
      plain.Update(touches, [](uint32_t block) { return block + 1 < kBlocks; });
      std::vector<uint32_t> expected;
      for (uint32_t block = 0; block < kBlocks; ++block) {
        if (plain.IsResident(block)) expected.push_back(block);
      }
      ASSERT_TRUE(ResidentBlocks() == expected)
          << "policy " << static_cast<int>(policy) << " step " << step;
    }
    cache_.reset();
  }
}

TEST_F(BlockCacheTest, LruGivesUpWhatWasUsedLongestAgo) {
  Start(CachePolicy::kLru, 2 * kBlockSlots, 32);
  Append(0, kLaneTokens);
  StepOfBlocks({0});
  StepOfBlocks({1});
  StepOfBlocks({0, 2});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 2}));
  StepOfBlocks({0, 2, 3});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 2}))
      << "all of this step: nothing gives way";
}

TEST_F(BlockCacheTest, FrequenciesAgeAndAScanDoesNotPushOutWhatIsHot) {
  for (const CachePolicy policy : {CachePolicy::kLfu, CachePolicy::kFrequencyAdmission}) {
    Start(policy, 2 * kBlockSlots, 32);
    Append(0, kLaneTokens);
    for (int i = 0; i < 10; ++i) StepOfBlocks({0, 1});
    for (uint32_t block = 2; block < 6; ++block) StepOfBlocks({block});
    EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 1})) << "hot blocks stay";
    for (int i = 0; i < 40; ++i) StepOfBlocks({7, 8});
    EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{7, 8})) << "but not for ever";
    cache_.reset();
  }
}

TEST_F(BlockCacheTest, LoadsNoMoreThanItMay) {
  Start(CachePolicy::kLru, 6 * kBlockSlots, 2);
  Append(0, kLaneTokens);
  StepOfBlocks({0, 1, 2, 3});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 1}));
  StepOfBlocks({0, 1, 2, 3});
  EXPECT_EQ(ResidentBlocks(), (std::vector<uint32_t>{0, 1, 2, 3}));
}

TEST_F(BlockCacheTest, RefusesOptionsByName) {
  const BlockCache::Options good = {
      .lane_capacity = 1, .block_capacity = 1, .row_stride_bytes = 16};
  const auto message_of = [&](auto change) {
    BlockCache::Options options = good;
    change(options);
    BlockCache cache;
    const Status status = cache.Create(options, stream_);
    EXPECT_EQ(status.code(), Code::kInvalid);
    return status.message().substr(0, status.message().find(' '));
  };
  using Options = BlockCache::Options;
  EXPECT_EQ(message_of([](Options& o) { o.lane_capacity = 0; }), "lane_capacity");
  EXPECT_EQ(message_of([](Options& o) { o.block_capacity = 0; }), "block_capacity");
  EXPECT_EQ(message_of([](Options& o) { o.cache_tokens = 100; }), "cache_tokens");
  EXPECT_EQ(message_of([](Options& o) { o.row_stride_bytes = 24; }), "row_stride_bytes");
  EXPECT_EQ(message_of([](Options& o) { o.ageing = 1.5f; }), "ageing");
  EXPECT_EQ(message_of([](Options& o) { o.max_loads = 129; }), "max_loads");
}

}  // namespace
}  // namespace pqcached::gpu
