// Merges: rows and codes of the run, counts and lists against a recount, drift, and what fails.
#include "kvstore/index/merge.h"

#include <cstring>
#include <memory>
#include <vector>

#include "kvstore/index/layer_build.h"
#include "kvstore/index/live_index.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::CacheParts;
using testing::Pq;
using testing::SmallOptions;
using testing::SmallSpec;

const IndexDescriptor kIndex = Pq(2, 5);  // 1024 cells: counted in segments of 512 slots and more
constexpr uint32_t kSlots = 512;
constexpr uint32_t kIterations = 4;

class MergeTest : public ::testing::Test {
 protected:
  MergeTest() {
    auto pool = Pool::Create({.capacity_bytes = size_t{8} << 20});
    EXPECT_TRUE(pool.ok());
    cache_ =
        std::make_shared<const Cache>(1, "default", SmallSpec(), *std::move(pool), parts_.shared());
  }

  uint32_t layer_count() const { return cache_->layers.size(); }
  const StoredLayers::Layer& layer(uint32_t slot) const { return cache_->layers.layers[slot]; }

  // A closed segment behind the ones before, `tokens` of random rows around `center` in it.
  SegmentEntry Fill(uint32_t tokens, float center) {
    const NewSegment wanted{parts_.counters.next_segment_id++, next_position_, kSlots};
    auto created = CreateSegments(*cache_->pool, cache_->layers, {&wanted, 1}, {});
    EXPECT_TRUE(created.ok()) << created.status();
    SegmentEntry entry = std::move(created->front());
    std::normal_distribution<float> normal(center, 1);
    for (uint32_t slot = 0; slot < layer_count(); ++slot) {
      for (uint32_t head = 0; head < layer(slot).shape.kv_heads; ++head) {
        auto* rows = reinterpret_cast<float*>(entry.rows->rows(layer(slot).first_head + head));
        const size_t floats = size_t{tokens} * layer(slot).shape.row_bytes / sizeof(float);
        for (size_t i = 0; i < floats; ++i) rows[i] = normal(random_);
      }
    }
    next_position_ += tokens;
    entry.closed = true;
    entry.token_end = next_position_;
    return entry;
  }

  // Per layer slot, trained on the entry's rows.
  std::vector<std::shared_ptr<const Codebook>> Train(const SegmentEntry& entry,
                                                     uint32_t codebook_generation) {
    std::vector<std::shared_ptr<const Codebook>> codebooks;
    const SegmentTokens tokens{entry.rows, {entry.rows->first_position(), entry.token_end}};
    for (uint32_t slot = 0; slot < layer_count(); ++slot) {
      auto codebook = *NewCodebook(*cache_, slot, kIndex, codebook_generation);
      TrainLayer(*cache_,
                 {.layer_slot = slot,
                  .index = kIndex,
                  .segments = {&tokens, 1},
                  .iterations = kIterations,
                  .seed = 1,
                  .keep_going = [] { return true; }},
                 *codebook);
      codebooks.push_back(std::move(codebook));
    }
    return codebooks;
  }

  void Code(SegmentEntry& entry, const std::vector<std::shared_ptr<const Codebook>>& codebooks) {
    auto index = std::make_shared<const SegmentIndex>(cache_->layers, kIndex);
    for (uint32_t slot = 0; slot < layer_count(); ++slot) {
      auto coded =
          CodeLayer(*cache_, slot, *entry.rows, entry.token_end - entry.rows->first_position(),
                    kSink, codebooks[slot]);
      ASSERT_TRUE(coded.ok()) << coded.status();
      index = index->With(slot, *std::move(coded));
    }
    entry.indexes = {index};
  }

  MergeSpec Spec(const std::vector<SegmentEntry>& run) const {
    return {.run = run,
            .sink_tokens = kSink,
            .sample_tokens = 2 * kSlots,
            .iterations = kIterations,
            .seed = 3,
            .new_generation = 9,
            .drift_ratio = 1.25,
            .keep_going = [] { return true; }};
  }

  kernels::PqGeometry geometry(uint32_t slot) const {
    return GeometryOf(kIndex, layer(slot).shape.key_dim);
  }
  uint32_t CodeAt(const SegmentEntry& entry, uint32_t slot, uint32_t head, uint32_t subspace,
                  uint32_t at) const {
    const IndexDataHeader& header = entry.indexes[0]->header(slot);
    return kernels::GetCode(geometry(slot), Planes(header, head), header.plane_stride_bytes,
                            subspace, at);
  }

  // Rows are those of the run, in order.
  void ExpectRows(const SegmentEntry& merged, const std::vector<SegmentEntry>& run) const {
    EXPECT_TRUE(merged.closed);
    EXPECT_EQ(merged.token_end, run.back().token_end);
    for (uint32_t slot = 0; slot < layer_count(); ++slot) {
      const size_t row_bytes = layer(slot).shape.row_bytes;
      for (uint32_t head = 0; head < layer(slot).shape.kv_heads; ++head) {
        const std::byte* next = merged.rows->rows(layer(slot).first_head + head);
        for (const SegmentEntry& entry : run) {
          const size_t bytes = row_bytes * (entry.token_end - entry.rows->first_position());
          ASSERT_EQ(std::memcmp(next, entry.rows->rows(layer(slot).first_head + head), bytes), 0);
          next += bytes;
        }
      }
    }
  }

  // Every slot has the code of a nearest centroid of the codebook that the layer names.
  void ExpectNearest(const SegmentEntry& merged) const {
    const uint32_t tokens = merged.token_end - merged.rows->first_position();
    for (uint32_t slot = 0; slot < layer_count(); ++slot) {
      const uint32_t dim = kernels::SubspaceDim(geometry(slot));
      for (uint32_t head = 0; head < layer(slot).shape.kv_heads; ++head) {
        const std::span<const float> centroids =
            Centroids(merged.indexes[0]->codebook(slot)->header(), head);
        const auto distance = [&](const float* key, uint32_t subspace, uint32_t code) {
          double sum = 0;
          const float* centroid = &centroids[((size_t{subspace} << kIndex.bits) + code) * dim];
          for (uint32_t i = 0; i < dim; ++i) {
            const double apart = double{key[subspace * dim + i]} - double{centroid[i]};
            sum += apart * apart;
          }
          return sum;
        };
        for (uint32_t at = 0; at < tokens; ++at) {
          const auto* key = reinterpret_cast<const float*>(
              merged.rows->rows(layer(slot).first_head + head) + at * layer(slot).shape.row_bytes);
          for (uint32_t subspace = 0; subspace < kIndex.subspace_count; ++subspace) {
            const double own = distance(key, subspace, CodeAt(merged, slot, head, subspace, at));
            for (uint32_t code = 0; code < (1u << kIndex.bits); ++code) {
              ASSERT_LE(own, distance(key, subspace, code) + 1e-3) << "slot " << at;
            }
          }
        }
      }
    }
  }

  // Counts and posting lists say what a recount of the codes says.
  void ExpectCounted(const SegmentEntry& merged) const {
    const uint32_t begin = merged.rows->first_position();
    const uint32_t sink_end = std::max(kSink, begin) - begin;
    const uint32_t end = merged.token_end - begin;
    for (uint32_t slot = 0; slot < layer_count(); ++slot) {
      const IndexDataHeader& header = merged.indexes[0]->header(slot);
      ASSERT_EQ(header.cell_count, 1u << (kIndex.subspace_count * kIndex.bits));
      ASSERT_EQ(header.counted_begin, sink_end);
      ASSERT_EQ(header.counted_end.load(), end);
      for (uint32_t head = 0; head < layer(slot).shape.kv_heads; ++head) {
        std::vector<std::vector<uint16_t>> cells(header.cell_count);
        for (uint32_t at = sink_end; at < end; ++at) {
          cells[kernels::GetCell(geometry(slot), Planes(header, head), header.plane_stride_bytes,
                                 at)]
              .push_back(static_cast<uint16_t>(at - sink_end));
        }
        const uint32_t* counts = CellCounts(header, head);
        const uint16_t* begins = PostingBegins(header, head);  // one page
        const uint16_t* slots = PostingSlots(header, head);
        for (uint32_t cell = 0; cell < header.cell_count; ++cell) {
          ASSERT_EQ(counts[cell], cells[cell].size()) << "cell " << cell;
          ASSERT_EQ(begins[cell + 1] - begins[cell], static_cast<int>(counts[cell]));
          ASSERT_TRUE(std::equal(cells[cell].begin(), cells[cell].end(), slots + begins[cell]));
        }
      }
    }
  }

  static constexpr uint32_t kSink = 20;
  CacheParts parts_{SmallOptions(), 2};
  std::shared_ptr<const Cache> cache_;
  std::mt19937_64 random_{5};
  uint32_t next_position_ = 0;
};

TEST_F(MergeTest, UnderOneCodebookCodesAreCopiedAndCountedAnew) {
  std::vector<SegmentEntry> run;
  for (const uint32_t tokens : {kSlots, 300u, 1u, 129u}) run.push_back(Fill(tokens, 0));
  const auto codebooks = Train(run.front(), 4);
  for (SegmentEntry& entry : run) Code(entry, codebooks);
  const auto merged = MergeSegments(*cache_, Spec(run));
  ASSERT_TRUE(merged.ok()) << merged.status();
  ExpectRows(*merged, run);
  for (uint32_t slot = 0; slot < layer_count(); ++slot) {
    EXPECT_EQ(merged->indexes[0]->codebook(slot), codebooks[slot]);
    for (const SegmentEntry& entry : run) {
      const uint32_t first = entry.rows->first_position();
      for (uint32_t position = first; position < entry.token_end; ++position) {
        for (uint32_t subspace = 0; subspace < kIndex.subspace_count; ++subspace) {
          ASSERT_EQ(CodeAt(*merged, slot, 1, subspace, position),
                    CodeAt(entry, slot, 1, subspace, position - first));
        }
      }
    }
  }
  ExpectCounted(*merged);
}

TEST_F(MergeTest, UnderSeveralCodebooksAllIsCodedByTheNewest) {
  std::vector<SegmentEntry> run = {Fill(kSlots, 0), Fill(kSlots, 0)};
  Code(run[0], Train(run[0], 1));
  const auto newest = Train(run[1], 2);
  Code(run[1], newest);
  const auto merged = MergeSegments(*cache_, Spec(run));
  ASSERT_TRUE(merged.ok()) << merged.status();
  ExpectRows(*merged, run);
  for (uint32_t slot = 0; slot < layer_count(); ++slot) {
    EXPECT_EQ(merged->indexes[0]->codebook(slot), newest[slot]);
  }
  ExpectNearest(*merged);
  ExpectCounted(*merged);
}

TEST_F(MergeTest, KeysThatHaveDriftedGetAFreshCodebook) {
  std::vector<SegmentEntry> run = {Fill(kSlots, 0), Fill(kSlots, 0)};
  const auto stale = Train(run[0], 1);
  next_position_ = 0;
  run = {Fill(kSlots, 4), Fill(kSlots, 4)};
  for (SegmentEntry& entry : run) Code(entry, stale);
  MergeSpec spec = Spec(run);
  const auto merged = MergeSegments(*cache_, spec);
  ASSERT_TRUE(merged.ok()) << merged.status();
  ExpectRows(*merged, run);
  for (uint32_t slot = 0; slot < layer_count(); ++slot) {
    const CodebookHeader& fresh = merged->indexes[0]->codebook(slot)->header();
    EXPECT_EQ(fresh.codebook_generation, spec.new_generation);
    EXPECT_EQ(fresh.trained_token_count, 2 * kSlots - kSink);
    EXPECT_LT(fresh.inertia, 1.5 * stale[slot]->header().inertia);  // as good as the old one was
  }
  ExpectNearest(*merged);
  ExpectCounted(*merged);
  spec.drift_ratio = 1e9;
  const auto kept = MergeSegments(*cache_, spec);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->indexes[0]->codebook(0), stale[0]);
}

TEST_F(MergeTest, DriftIsMoreThanItsShareOfTheTrainedInertia) {
  const SegmentEntry entry = Fill(kSlots, 0);
  const auto codebook = Train(entry, 1).front();
  const double inertia = codebook->header().inertia;
  EXPECT_FALSE(HasDrifted(1.25 * inertia, *codebook, 1.25));
  EXPECT_TRUE(HasDrifted(1.26 * inertia, *codebook, 1.25));
}

TEST_F(MergeTest, GivenUpOrWithoutRoomItLeavesNothing) {
  std::vector<SegmentEntry> run = {Fill(kSlots, 0), Fill(kSlots, 0)};
  const auto codebooks = Train(run.front(), 1);
  for (SegmentEntry& entry : run) Code(entry, codebooks);
  const size_t used_bytes = cache_->pool->usage().used_bytes;
  for (int calls = 0; calls < 3; ++calls) {
    MergeSpec spec = Spec(run);
    spec.keep_going = [left = calls]() mutable { return left-- > 0; };
    EXPECT_EQ(MergeSegments(*cache_, spec).status().code(), absl::StatusCode::kCancelled) << calls;
    EXPECT_EQ(cache_->pool->usage().used_bytes, used_bytes);
  }
  std::vector<std::vector<Extent>> filled;
  for (;;) {
    const size_t bytes = kMinExtentBytes;
    auto extents = cache_->pool->Allocate({&bytes, 1});
    if (!extents.ok()) break;
    filled.push_back(*std::move(extents));
  }
  const size_t full_bytes = cache_->pool->usage().used_bytes;
  EXPECT_EQ(MergeSegments(*cache_, Spec(run)).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache_->pool->usage().used_bytes, full_bytes);
}

}  // namespace
}  // namespace pqcached::kvstore
