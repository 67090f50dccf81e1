// Sequences that are exported as segment images and imported again: what comes back is what was
// there, and what is there already is shared.
#include <atomic>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <tuple>

#include "absl/cleanup/cleanup.h"
#include "kvstore/clock.h"
#include "kvstore/read/indexes/index_types.h"
#include "tests/kvstore/content.h"
#include "tests/kvstore/image/images_fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ContentRows;
using testing::ExpectContent;
using testing::Floats;
using testing::HeaderOf;
using testing::ImageDirectory;
using testing::IngestContent;
using testing::kTenant;
using testing::LayerModel;
using testing::MemoryKeeper;
using testing::NumberedContent;
using testing::Pq;
using testing::RandomFloats;
using testing::ReadFile;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;
using testing::TestSequence;

IndexDescriptor IndexOfType(const std::string& type) {
  IndexDescriptor index;
  if (type == "pq") return Pq(2, 4);
  if (type == "flat") return index;
  const IndexArgument samples{.name = "samples", .value_name = {}, .number = 64};
  const std::span<const IndexArgument> arguments(&samples, type == "graph" ? 1 : 0);
  const Refusal made = MakeIndex(type, arguments, "index", &index);
  EXPECT_TRUE(made.ok()) << made.message();
  return index;
}

ImportedSequence MustImport(Store& store, uint64_t cache_id, const ImagePlace& place) {
  const auto imported = store.ImportSequence(kTenant, cache_id, place);
  EXPECT_TRUE(imported.ok()) << imported.status();
  return imported.ok() ? *imported : ImportedSequence();
}

// Queries of every 4th token, which graphs are built from.
void AddSamples(TestSequence& source, uint32_t tokens) {
  std::vector<uint64_t> positions;
  for (uint32_t i = 0; i < tokens; i += 4) positions.push_back(i);
  auto ingest = source.store().BeginIngest(kTenant, source.id());
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  for (const LayerModel& model : source.layers()) {
    if (model.group.kind != LayerKind::kSelected) continue;
    const Floats queries = RandomFloats(
        source.random(), {positions.size(), model.group.query_heads, model.group.key_dim});
    const absl::Status added = (*ingest)->AddSamples(
        {.layer = model.group.layers.front(), .positions = positions, .queries = queries.view()});
    ASSERT_TRUE(added.ok()) << added;
  }
  ASSERT_TRUE((*ingest)->Commit().ok());
}

// The rows of a sequence of another store, as those of the source.
void ExpectRows(Store& store, uint64_t id, std::span<const LayerModel> layers) {
  for (const LayerModel& model : layers) {
    const auto rows = store.FetchBlocks(kTenant, id, model.group.layers.front(), {0, model.tokens},
                                        RowPart::kRow);
    ASSERT_TRUE(rows.ok()) << rows.status();
    ASSERT_EQ(testing::ToFloats(*rows), model.Rows(0, model.tokens));
  }
}

using Case = std::tuple<kernels::DType, std::string>;

class RoundTrip : public ::testing::TestWithParam<Case> {
 protected:
  static CacheSpec Spec() {
    CacheSpec spec = SmallSpec();
    spec.groups[0].dtype = std::get<0>(GetParam());
    spec.groups.push_back({.kind = LayerKind::kFull,
                           .layers = {5},
                           .kv_heads = 1,
                           .query_heads = 2,
                           .key_dim = 64,
                           .value_dim = 64,
                           .dtype = kernels::DType::kBf16});
    return spec;
  }
};

TEST_P(RoundTrip, KeepsRowsIndexesAndSelections) {
  const std::string& type = std::get<1>(GetParam());
  const IndexDescriptor index = IndexOfType(type);
  const ImageDirectory images;
  TestSequence source(Spec());
  source.Ingest(300);
  if (type == "graph") AddSamples(source, 300);
  if (type != "flat") source.Build(index);
  source.Append(50);  // an open tail
  const auto exported = source.store().ExportSequence(kTenant, source.id(), images.place("one"));
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(exported->token_count, 350u);
  EXPECT_EQ(images.names(), std::vector<std::string>{"one"});

  TestSequence target(Spec(), SmallOptions(), /*seed=*/2);
  const ImportedSequence imported =
      MustImport(target.store(), target.cache_id(), images.place("one"));
  EXPECT_EQ(imported.token_count, 350u);
  EXPECT_EQ(imported.shared_tokens, 0u);
  EXPECT_EQ(imported.image_count, exported->image_count);
  ExpectRows(target.store(), imported.sequence_id, source.layers());
  const auto info = target.store().DescribeSequence(kTenant, imported.sequence_id);
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->indexes.size(), type == "flat" ? 0u : 1u);
  for (const LayerInfo& layer : info->layers) {
    for (const LayerState state : layer.index_states) EXPECT_EQ(state, LayerState::kReady);
  }
  // Graphs are walked where there are 32 tokens for each one that is wanted.
  const bool has_tail = type == "clusters";
  const Selection selection{.index = index,
                            .budget_kind = has_tail ? BudgetKind::kRetrieved : BudgetKind::kCount,
                            .tail_estimate = has_tail,
                            .budget_count = type == "graph" ? 8u : 40u};
  for (int i = 0; i < 8; ++i) {
    const Floats query = source.RandomQuery(source.layer(3));
    const Query wanted{.layer = 3, .query_position = 349, .queries = query.view()};
    const auto attend = [&](Store& store, uint64_t id) {
      return store.Attend(kTenant, id, wanted, selection, /*want_positions=*/true);
    };
    const auto theirs = attend(source.store(), source.id());
    const auto ours = attend(target.store(), imported.sequence_id);
    ASSERT_TRUE(theirs.ok()) << theirs.status();
    ASSERT_TRUE(ours.ok()) << ours.status();
    EXPECT_EQ(ours->selected.positions, theirs->selected.positions);
    EXPECT_EQ(ours->output, theirs->output);
    EXPECT_EQ(ours->lse, theirs->lse);
  }
}

INSTANTIATE_TEST_SUITE_P(Images, RoundTrip,
                         ::testing::Combine(::testing::Values(kernels::DType::kF16,
                                                              kernels::DType::kBf16,
                                                              kernels::DType::kF32),
                                            ::testing::Values("flat", "pq", "graph", "clusters")),
                         [](const ::testing::TestParamInfo<Case>& one) {
                           return std::string(kernels::DTypeName(std::get<0>(one.param))) + "_" +
                                  std::get<1>(one.param);
                         });

TEST(Images, ImportedTailIsWrittenOn) {
  const ImageDirectory images;
  TestSequence source;
  source.Ingest(256);
  source.Build(Pq(2, 4));
  source.Append(30);
  ASSERT_TRUE(source.store().ExportSequence(kTenant, source.id(), images.place("one")).ok());
  SharingStore target;
  const ImportedSequence imported = MustImport(*target.store, target.cache_id, images.place("one"));
  const auto info = target.Describe(imported.sequence_id);
  EXPECT_EQ(info.segments.back().state, SegmentState::kOpen);
  const CreatedSequence fork = target.Fork(imported.sequence_id);
  const Content more = NumberedContent(5, 200);
  const auto appended = AppendContent(*target.store, fork.sequence_id, target.group, 286, more);
  ASSERT_TRUE(appended.ok()) << appended.status();
  EXPECT_EQ(*appended, 486u);
  ExpectRows(*target.store, fork.sequence_id, source.layers());
}

// The fork's first tokens lie in a segment that its parent goes on to write.
TEST(Images, ForkIsExportedWithItsOwnTokens) {
  const ImageDirectory images;
  SharingStore world;
  const CreatedSequence parent = world.Create();
  const Content content = NumberedContent(1, 400);
  const auto first = std::span(content).first(200);
  ASSERT_TRUE(IngestContent(*world.store, parent.sequence_id, world.group, 0, first).ok());
  ASSERT_TRUE(world.store->BuildIndex(kTenant, parent.sequence_id, {.index = Pq(2, 4)}, {}).ok());
  const Content tail = NumberedContent(2, 40);
  ASSERT_TRUE(AppendContent(*world.store, parent.sequence_id, world.group, 200, tail).ok());
  const CreatedSequence fork = world.Fork(parent.sequence_id, 220);
  ASSERT_TRUE(
      AppendContent(*world.store, parent.sequence_id, world.group, 240, NumberedContent(3, 300))
          .ok());
  const Content own = NumberedContent(4, 50);
  ASSERT_TRUE(AppendContent(*world.store, fork.sequence_id, world.group, 220, own).ok());
  const auto exported =
      world.store->ExportSequence(kTenant, fork.sequence_id, images.place("fork"));
  ASSERT_TRUE(exported.ok()) << exported.status();
  SharingStore target;
  const ImportedSequence imported =
      MustImport(*target.store, target.cache_id, images.place("fork"));
  Content whole(first.begin(), first.end());
  whole.insert(whole.end(), tail.begin(), tail.begin() + 20);
  whole.insert(whole.end(), own.begin(), own.end());
  EXPECT_EQ(imported.token_count, whole.size());
  ExpectContent(*target.store, imported.sequence_id, target.group, whole);
  EXPECT_EQ(target.Describe(imported.sequence_id).indexes.size(), 1u);
}

// A segment is closed as soon as one layer goes beyond its end; other layers still write it.
TEST(Images, SegmentThatSomeLayersStillWriteHasNoCodes) {
  const ImageDirectory images;
  SharingStore source;
  const CreatedSequence created = source.Create();
  const Content content = NumberedContent(1, 600);
  const auto first = std::span(content).first(300);
  ASSERT_TRUE(IngestContent(*source.store, created.sequence_id, source.group, 0, first).ok());
  ASSERT_TRUE(source.store->BuildIndex(kTenant, created.sequence_id, {.index = Pq(2, 4)}, {}).ok());
  const std::span<const uint64_t> rest = content;
  const ContentRows more(rest.subspan(300), source.group);
  const ContentRows few(rest.subspan(300, 10), source.group);
  auto ingest = source.store->BeginIngest(kTenant, created.sequence_id);
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  ASSERT_TRUE((*ingest)->Write(300, more.layers[0]).ok());
  ASSERT_TRUE((*ingest)->Write(300, few.layers[1]).ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  const CreatedSequence fork = source.Fork(created.sequence_id);
  for (const uint64_t id : {created.sequence_id, fork.sequence_id}) {
    const std::string name = "sequence-" + std::to_string(id);
    const auto exported = source.store->ExportSequence(kTenant, id, images.place(name));
    ASSERT_TRUE(exported.ok()) << exported.status();
    EXPECT_EQ(exported->token_count, 310u);
    const std::string last =
        ReadFile(images.file(name, ImageName(static_cast<uint32_t>(exported->image_count) - 1)));
    EXPECT_EQ(HeaderOf(last).has_codes, 0);
    EXPECT_EQ(HeaderOf(ReadFile(images.file(name, ImageName(0)))).has_codes, 1);
    SharingStore target;
    const ImportedSequence imported =
        MustImport(*target.store, target.cache_id, images.place(name));
    ExpectContent(*target.store, imported.sequence_id, target.group, std::span(content).first(310));
    EXPECT_EQ(target.Describe(imported.sequence_id).indexes.size(), 1u);
  }
}

TEST(Images, SharesWhatIsThereAlready) {
  const ImageDirectory images;
  std::vector<uint32_t> ids(600);
  std::iota(ids.begin(), ids.end(), 7u);
  const Content content = ContentOf(ids);
  SharingStore source;
  const CreatedSequence created = source.Create(ids);
  ASSERT_TRUE(IngestContent(*source.store, created.sequence_id, source.group, 0, content).ok());
  ASSERT_TRUE(source.store->BuildIndex(kTenant, created.sequence_id, {.index = Pq(2, 4)}, {}).ok());
  ASSERT_TRUE(source.store->ExportSequence(kTenant, created.sequence_id, images.place("one")).ok());

  SharingStore target;
  const ImportedSequence imported = MustImport(*target.store, target.cache_id, images.place("one"));
  EXPECT_EQ(imported.shared_tokens, 0u);
  EXPECT_EQ(target.Match(ids), 512u);
  const size_t once = target.used_bytes();
  // All but the last tokens, which are no whole step of 128, are there: 600 = 4 * 128 + 88.
  const ImportedSequence again = MustImport(*target.store, target.cache_id, images.place("one"));
  EXPECT_EQ(again.shared_tokens, 512u);
  EXPECT_EQ(again.image_count, 1u);
  EXPECT_LT(target.used_bytes() - once, once / 2);
  ExpectContent(*target.store, again.sequence_id, target.group, content);
  // A prompt with these tokens begins with the imported ones.
  const CreatedSequence next = target.Create(ids);
  EXPECT_EQ(next.token_count, 512u);
  ExpectContent(*target.store, next.sequence_id, target.group, std::span(content).first(512));
  // In the store that they come from, too; and nothing is shared without their index.
  EXPECT_EQ(MustImport(*source.store, source.cache_id, images.place("one")).shared_tokens, 512u);
  SharingStore plain;
  const CreatedSequence unindexed = plain.Create(ids);
  ASSERT_TRUE(IngestContent(*plain.store, unindexed.sequence_id, plain.group, 0, content).ok());
  EXPECT_EQ(MustImport(*plain.store, plain.cache_id, images.place("one")).shared_tokens, 0u);
}

TEST(Images, ExportWhileTheSequenceIsWrittenIsConsistent) {
  const ImageDirectory images;
  SharingStore world;
  const CreatedSequence created = world.Create();
  const Content content = NumberedContent(1, 2000);
  const auto piece = [&](size_t first, size_t count) {
    return std::span(content).subspan(first, count);
  };
  ASSERT_TRUE(IngestContent(*world.store, created.sequence_id, world.group, 0, piece(0, 300)).ok());
  ASSERT_TRUE(world.store->BuildIndex(kTenant, created.sequence_id, {.index = Pq(2, 4)}, {}).ok());
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    while (!stop) {
      for (size_t i = 300; i + 7 <= content.size() && !stop; i += 7) {
        EXPECT_TRUE(
            AppendContent(*world.store, created.sequence_id, world.group, i, piece(i, 7)).ok());
      }
      EXPECT_TRUE(world.store->TruncateSequence(kTenant, created.sequence_id, 300).ok());
    }
  });
  const absl::Cleanup join = [&] {
    stop = true;
    writer.join();
  };
  std::set<uint64_t> token_counts;
  for (int i = 0; i < 8 || (token_counts.size() < 2 && i < 100); ++i) {
    const std::string name = "export-" + std::to_string(i);
    const auto exported =
        world.store->ExportSequence(kTenant, created.sequence_id, images.place(name));
    if (absl::IsOutOfRange(exported.status())) continue;  // it was truncated concurrently
    ASSERT_TRUE(exported.ok()) << exported.status();
    token_counts.insert(exported->token_count);
    SharingStore target;
    const ImportedSequence imported =
        MustImport(*target.store, target.cache_id, images.place(name));
    ExpectContent(*target.store, imported.sequence_id, target.group,
                  piece(0, imported.token_count));
  }
  EXPECT_GT(token_counts.size(), 1u);  // else nothing was written meanwhile
}

TEST(Images, ImportedSequenceOutlivesTheProcess) {
  const ImageDirectory images;
  TestSequence source;
  source.Ingest(300);
  source.Build(Pq(2, 4));
  source.Append(20);
  ASSERT_TRUE(source.store().ExportSequence(kTenant, source.id(), images.place("one")).ok());
  MemoryKeeper keeper;
  StoreOptions options = SmallOptions();
  options.keeper = &keeper;
  std::optional<SharingStore> target(std::in_place, SmallSpec(), options);
  const uint64_t id = MustImport(*target->store, target->cache_id, images.place("one")).sequence_id;
  ASSERT_TRUE(target->store->WaitIdle(SteadyTime::Now() + absl::Seconds(60)));
  target.emplace(SmallSpec(), options);
  ExpectRows(*target->store, id, source.layers());
  EXPECT_EQ(target->Describe(id).indexes.size(), 1u);
}

TEST(Images, SuspendedSequenceIsExported) {
  const ImageDirectory images;
  TestSequence source;
  source.Ingest(100);
  ASSERT_TRUE(source.store().SuspendSequence(kTenant, source.id()).ok());
  EXPECT_TRUE(source.store().ExportSequence(kTenant, source.id(), images.place("one")).ok());
}

}  // namespace
}  // namespace pqcached::kvstore
