// Indexes whose sub-spaces keep rotary pairs together, against indexes of permuted keys.
#include <algorithm>
#include <optional>

#include "kvstore/clock.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/reader.h"
#include "kvstore/records/root_records.h"
#include "tests/kvstore/brute_force.h"
#include "tests/kvstore/index/nearest.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::DecodedKeys;
using testing::DecodeKeys;
using testing::ExpectNearest;
using testing::Floats;
using testing::kTenant;
using testing::LayerModel;
using testing::MemoryKeeper;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

constexpr uint32_t kLayer = 3;
constexpr uint8_t kNone = 1, kInterleaved = 3;  // of Rope::layout

CacheSpec SpecWith(uint8_t rope_layout, uint32_t rotary_dim) {
  CacheSpec spec = SmallSpec();
  spec.groups[0].rope = {.layout = rope_layout, .theta = 1e4, .rotary_dim = rotary_dim};
  return spec;
}

IndexDescriptor Contiguous(IndexDescriptor index) {
  index.layout = SubspaceLayout::kContiguous;
  return index;
}

// The dims of a key in the order of the sub-spaces, by the definition of the layout.
std::vector<uint32_t> PairOrder(uint32_t key_dim, uint32_t subspaces, uint32_t rotary_dim) {
  const uint32_t dim = key_dim / subspaces;
  std::vector<uint32_t> order;
  for (uint32_t begin = 0; begin < key_dim; begin += dim) {
    for (uint32_t i = 0; i < dim; ++i) {
      const uint32_t paired = begin / 2 + i % (dim / 2) + (i < dim / 2 ? 0 : rotary_dim / 2);
      order.push_back(begin < rotary_dim ? paired : begin + i);
    }
  }
  return order;
}

void Permute(std::vector<float>& keys, const std::vector<uint32_t>& order) {
  std::vector<float> key(order.size());
  for (size_t begin = 0; begin < keys.size(); begin += order.size()) {
    for (size_t i = 0; i < order.size(); ++i) key[i] = keys[begin + order[i]];
    std::copy(key.begin(), key.end(), keys.begin() + static_cast<ptrdiff_t>(begin));
  }
}

// Decoded keys and the model's, both in the order of the sub-spaces.
struct Ordered {
  LayerModel model;
  DecodedKeys decoded;
};

Ordered Order(TestSequence& sequence, const IndexDescriptor& index, uint32_t rotary_dim) {
  const LayerModel& model = sequence.layer(kLayer);
  Ordered ordered{model, DecodeKeys(sequence.store(), sequence.id(), model, index)};
  const auto order = PairOrder(model.group.key_dim, index.subspace_count, rotary_dim);
  Permute(ordered.model.keys, order);
  Permute(ordered.decoded.data, order);
  return ordered;
}

// Logits of all tokens for a fixed query.
std::vector<float> Logits(TestSequence& sequence, const IndexDescriptor& index) {
  const LayerModel& model = sequence.layer(kLayer);
  std::mt19937_64 random(9);
  const Floats query =
      testing::RandomFloats(random, {1, model.group.query_heads, model.group.key_dim});
  const auto scores = sequence.store().Score(
      kTenant, sequence.id(),
      {.layer = kLayer, .query_position = model.tokens - 1, .queries = query.view()}, index,
      {0, model.tokens});
  EXPECT_TRUE(scores.ok()) << scores.status();
  return scores.ok() ? scores->logits : std::vector<float>();
}

TEST(PairLayout, CodesAreThoseOfTheNearestCentroidsOfWholePairs) {
  struct Case {
    IndexDescriptor index;
    uint32_t rotary_dim;
  };
  for (const auto& [index, rotary_dim] :
       {Case{Pq(2, 4), 32}, {Pq(4, 5), 32}, {Pq(4, 8), 16}, {Pq(8, 4), 24}, {Pq(16, 4), 4}}) {
    SCOPED_TRACE(::testing::Message() << NameOf(index) << " rotary_dim " << rotary_dim);
    TestSequence sequence(SpecWith(Rope::kHalf, rotary_dim));
    sequence.Ingest(256);
    sequence.Build(index);
    sequence.Append(40);  // coded under the same codebook
    const Ordered ordered = Order(sequence, index, rotary_dim);
    ExpectNearest(ordered.model, index, ordered.decoded, {0, 296}, {0, 296});
  }
}

// A cache with permuted keys and no rope has the same centroids, codes, logits and selections.
TEST(PairLayout, AnIndexEqualsThatOfPermutedKeys) {
  const IndexDescriptor index = Pq(4, 6);
  const auto order = PairOrder(32, 4, 32);
  TestSequence paired(SpecWith(Rope::kHalf, 32));
  TestSequence permuted(SpecWith(kNone, 0));
  LayerModel& model = paired.layer(kLayer);
  auto ingest = permuted.store().BeginIngest(kTenant, permuted.id());
  ASSERT_TRUE(ingest.ok());
  paired.Ingest(700);  // two generations of codebooks
  for (const LayerModel& layer : paired.layers()) {
    Floats keys{.shape = {700, layer.group.kv_heads, 32}, .data = layer.keys};
    const Floats values{.shape = {700, layer.group.kv_heads, layer.group.value_dim},
                        .data = layer.values};
    Permute(keys.data, order);
    ASSERT_TRUE((*ingest)
                    ->Write(0, {.layer = layer.group.layers.front(),
                                .keys = keys.view(),
                                .values = values.view()})
                    .ok());
  }
  ASSERT_TRUE((*ingest)->Commit().ok());
  paired.Build(index);
  permuted.Build(index);
  for (int round = 0; round < 5; ++round) {
    const Floats query = paired.RandomQuery(model);
    Floats moved = query;
    Permute(moved.data, order);
    const auto select = [&](TestSequence& sequence, const Floats& queries) {
      return sequence.store().TopK(
          kTenant, sequence.id(),
          {.layer = kLayer, .query_position = 699, .queries = queries.view()},
          {.index = index, .budget_ratio = 0.2});
    };
    const auto of_pairs = select(paired, query);
    const auto of_permuted = select(permuted, moved);
    ASSERT_TRUE(of_pairs.ok() && of_permuted.ok()) << of_pairs.status() << of_permuted.status();
    EXPECT_GT(of_pairs->positions.size(), 0u);
    EXPECT_EQ(of_pairs->positions, of_permuted->positions);
  }
}

TEST(PairLayout, OnlyPairsOfHalvesAreKeptTogether) {
  const auto logits = [](uint8_t rope_layout, uint32_t rotary_dim, const IndexDescriptor& index) {
    TestSequence sequence(SpecWith(rope_layout, rotary_dim));
    sequence.Ingest(300);
    sequence.Build(index);
    return Logits(sequence, index);
  };
  const IndexDescriptor index = Pq(2, 4);
  const std::vector<float> contiguous = logits(Rope::kHalf, 32, Contiguous(index));
  EXPECT_NE(logits(Rope::kHalf, 32, index), contiguous);
  EXPECT_EQ(logits(0, 32, index), contiguous);
  EXPECT_EQ(logits(kNone, 32, index), contiguous);
  EXPECT_EQ(logits(kInterleaved, 32, index), contiguous);
  EXPECT_EQ(logits(Rope::kHalf, 0, index), contiguous);
  EXPECT_EQ(logits(Rope::kHalf, 16, index), contiguous);  // in one sub-space anyway
  EXPECT_EQ(logits(Rope::kHalf, 24, index), contiguous);  // no multiple of a sub-space
  EXPECT_EQ(logits(Rope::kHalf, 32, Pq(1, 4)), logits(Rope::kHalf, 32, Contiguous(Pq(1, 4))));
}

TEST(PairLayout, TheLayoutIsAPartOfTheIndex) {
  TestSequence sequence(SpecWith(Rope::kHalf, 32));
  sequence.Ingest(300);
  sequence.Build(Pq(2, 4));
  const auto scored = [&](const IndexDescriptor& index) {
    const LayerModel& model = sequence.layer(kLayer);
    const Floats query = sequence.RandomQuery(model);
    return sequence.store()
        .Score(kTenant, sequence.id(),
               {.layer = kLayer, .query_position = 299, .queries = query.view()}, index, {0, 300})
        .status();
  };
  EXPECT_EQ(scored(Contiguous(Pq(2, 4))).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(scored(Contiguous(Pq(2, 4))).message()),
              ::testing::HasSubstr("no index pq m=2 b=4 contiguous"));
  sequence.Build(Contiguous(Pq(2, 4)));
  EXPECT_TRUE(scored(Contiguous(Pq(2, 4))).ok());
  EXPECT_NE(Logits(sequence, Pq(2, 4)), Logits(sequence, Contiguous(Pq(2, 4))));
  IndexDescriptor unknown = Pq(2, 4);
  unknown.layout = SubspaceLayout{3};
  EXPECT_EQ(FieldOf(scored(unknown)), "index.pq.layout");
  IndexDescriptor flat;
  flat.layout = SubspaceLayout::kContiguous;
  EXPECT_EQ(scored(flat).code(), absl::StatusCode::kInvalidArgument);
}

// Codebooks that are trained ahead, warm starts, recodings, and merges of the segments of decoding.
TEST(PairLayout, AnIncrementalIndexKeepsPairsTogether) {
  const IndexDescriptor index = Pq(4, 4);
  StoreOptions options = SmallOptions();
  options.merge_segments = 2;
  TestSequence sequence(SpecWith(Rope::kHalf, 32), options);
  sequence.NewSequence(
      {.session = "session", .live_index = LiveIndex{.index = index, .iterations = 3}});
  for (int chunk = 0; chunk < 8; ++chunk) {
    sequence.Ingest(90);
    ASSERT_TRUE(sequence.store().WaitIdle(SteadyTime::InfiniteFuture()));
  }
  ASSERT_TRUE(sequence.store().ClosePrefill(kTenant, sequence.id()).ok());
  sequence.Build(index);
  for (int chunk = 0; chunk < 6; ++chunk) {
    sequence.Append(64);
    ASSERT_TRUE(sequence.store().WaitIdle(SteadyTime::InfiniteFuture()));
  }
  const Ordered ordered = Order(sequence, index, 32);
  // A generation spans 256 tokens at least; its codes are those of centroids that it uses.
  const auto& decoded = ordered.decoded;
  ExpectNearest(ordered.model, index, decoded, {0, 128}, {0, 128});
  ExpectNearest(ordered.model, index, decoded, {1024, 1104}, {1024, 1104});
}

class PairRecovery : public ::testing::Test {
 protected:
  // Opens the store, and the cache with this rope.
  void Open(const CacheSpec& spec) {
    store_.reset();
    StoreOptions options = SmallOptions();
    options.keeper = &keeper_;
    auto created = Store::Create(options);
    ASSERT_TRUE(created.ok()) << created.status();
    store_ = *std::move(created);
    const auto cache = store_->OpenCache(kTenant, spec);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_id_ = cache->cache_id;
  }
  void Make(uint32_t tokens, const IndexDescriptor& index) {
    const auto id = store_->CreateSequence(kTenant, cache_id_, {.session = "session"});
    ASSERT_TRUE(id.ok()) << id.status();
    id_ = id->sequence_id;
    Append(tokens);
    const absl::Status built =
        store_->BuildIndex(kTenant, id_, {.index = index, .iterations = 3}, {});
    ASSERT_TRUE(built.ok()) << built;
  }
  void Append(uint32_t tokens) {
    std::vector<Floats> parts;
    for (int layer = 0; layer < 2; ++layer) {
      parts.push_back(testing::RandomFloats(random_, {tokens, 2, 32}));
      parts.push_back(testing::RandomFloats(random_, {tokens, 2, 40}));
    }
    const std::vector<LayerRows> rows = {
        {.layer = 1, .keys = parts[0].view(), .values = parts[1].view()},
        {.layer = 3, .keys = parts[2].view(), .values = parts[3].view()}};
    const auto count = store_->Append(kTenant, id_, tokens_, rows);
    ASSERT_TRUE(count.ok()) << count.status();
    tokens_ += tokens;
  }
  std::vector<float> Logits(const IndexDescriptor& index, uint32_t begin, uint32_t end) {
    std::mt19937_64 random(4);
    const Floats query = testing::RandomFloats(random, {1, 4, 32});
    const auto scores = store_->Score(
        kTenant, id_, {.layer = 3, .query_position = tokens_ - 1, .queries = query.view()}, index,
        {begin, end});
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->logits : std::vector<float>();
  }

  MemoryKeeper keeper_;
  std::unique_ptr<Store> store_;
  std::mt19937_64 random_{3};
  uint64_t cache_id_ = 0, id_ = 0;
  uint32_t tokens_ = 0;
};

TEST_F(PairRecovery, PairsAreFoundAgain) {
  Open(SpecWith(Rope::kHalf, 32));
  Make(300, Pq(2, 4));
  const std::vector<float> before = Logits(Pq(2, 4), 0, 300);
  Open(SpecWith(Rope::kHalf, 32));
  EXPECT_EQ(store_->Recovery().dropped_records, 0u);
  EXPECT_EQ(Logits(Pq(2, 4), 0, 300), before);
}

// What an earlier version left: contiguous codebooks in a cache whose rope names pairs.
TEST_F(PairRecovery, CodebooksOfAnEarlierVersionStayContiguous) {
  Open(SpecWith(kNone, 32));
  Make(300, Pq(2, 4));
  const std::vector<float> before = Logits(Pq(2, 4), 0, 300);
  Append(60);
  const std::vector<float> appended = Logits(Pq(2, 4), 300, 360);
  ASSERT_TRUE(store_->TruncateSequence(kTenant, id_, 300).ok());
  tokens_ = 300;
  store_.reset();
  {
    auto root = RootRecords::Open(kernels::Exec{}, keeper_);
    ASSERT_TRUE(root.ok()) << root.status();
    CacheRecord cache = (*root)->caches().front();
    cache.spec.groups[0].rope.layout = Rope::kHalf;
    (*root)->RemoveCache(cache.cache_id);
    ASSERT_TRUE((*root)->AddCache(cache).ok());
  }
  const FileDescriptor kept = keeper_.Take(RootRecords::kMemoryName);
  const auto root = Mapping::Map(kept, SizeOf(kept), Mapping::Access::kReadWrite);
  ASSERT_TRUE(root.ok());
  constexpr size_t kVersionsOffset = 8 + 3 * 16;  // in the header of root_records.cc
  auto* const versions = reinterpret_cast<uint64_t*>(root->data() + kVersionsOffset);
  ASSERT_EQ(static_cast<uint32_t>(versions[0]), kLayoutVersion);
  versions[0] += kOldestExtentVersion - uint64_t{kLayoutVersion};
  versions[1] = ~versions[0];

  Open(SpecWith(Rope::kHalf, 32));
  if (HasFatalFailure()) return;
  EXPECT_EQ(static_cast<uint32_t>(versions[0]), kLayoutVersion);
  EXPECT_EQ(store_->Recovery().dropped_records, 0u);
  EXPECT_EQ(Logits(Pq(2, 4), 0, 300), before);
  random_.seed(3);
  for (int layer = 0; layer < 2; ++layer) {
    testing::RandomFloats(random_, {300, 2, 32});
    testing::RandomFloats(random_, {300, 2, 40});
  }
  Append(60);  // the same rows, coded under the old codebook
  EXPECT_EQ(Logits(Pq(2, 4), 300, 360), appended);
  // A new sequence of the same cache has pairs.
  tokens_ = 0;
  random_.seed(3);
  Make(300, Pq(2, 4));
  EXPECT_NE(Logits(Pq(2, 4), 0, 300), before);
}

}  // namespace
}  // namespace pqcached::kvstore
