// Forks, shared prefixes, roll back, suspension: what sequences have in common is held once,
// and what one of them does is its own.

#include <functional>
#include <numeric>
#include <set>

#include "kvstore/sequence/prefix.h"
#include "tests/kvstore/content.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::Floats;
using ::testing::HasSubstr;
using testing::IngestContent;
using testing::kTenant;
using testing::Pq;
using testing::RandomFloats;
using testing::RandomIds;
using testing::SharingStore;
using testing::SmallOptions;
using testing::SmallSpec;

class Sharing : public ::testing::Test {
 protected:
  Sharing() : ids_(RandomIds(random_, 1000)), content_(ContentOf(ids_)) {}

  Store& store() { return *shared_.store; }
  // A sequence that holds the first `tokens` of ids_, named.
  uint64_t Stored(uint32_t tokens) {
    const std::span<const uint32_t> ids = std::span(ids_).first(tokens);
    const CreatedSequence created = shared_.Create(ids);
    const auto rest =
        std::span(content_).subspan(created.token_count, tokens - created.token_count);
    if (!rest.empty()) {
      EXPECT_TRUE(
          IngestContent(store(), created.sequence_id, shared_.group, created.token_count, rest)
              .ok());
    }
    return created.sequence_id;
  }
  void Append(uint64_t id, Content& content, uint32_t tokens) {
    Content fresh(tokens);
    for (uint64_t& token : fresh) token = random_();
    const auto count = AppendContent(store(), id, shared_.group, content.size(), fresh);
    ASSERT_TRUE(count.ok()) << count.status();
    content.insert(content.end(), fresh.begin(), fresh.end());
  }
  void Truncate(uint64_t id, Content& content, uint32_t tokens) {
    const auto count = store().TruncateSequence(kTenant, id, tokens);
    ASSERT_TRUE(count.ok()) << count.status();
    content.resize(tokens);
  }
  Content First(size_t tokens) const {
    return {content_.begin(), content_.begin() + static_cast<ptrdiff_t>(tokens)};
  }
  void Expect(uint64_t id, const Content& content) {
    ASSERT_EQ(shared_.Describe(id).token_count, content.size());
    ExpectContent(store(), id, shared_.group, content);
  }
  std::vector<float> Scores(uint64_t id, const IndexDescriptor& index, uint32_t tokens,
                            const Floats& query) {
    const auto scores =
        store().Score(kTenant, id, {.layer = 3, .query_position = tokens, .queries = query.view()},
                      index, {0, tokens});
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->logits : std::vector<float>();
  }

  std::mt19937_64 random_{5};
  SharingStore shared_;
  std::vector<uint32_t> ids_;
  Content content_;
};

TEST_F(Sharing, AForkHoldsNothingOfItsOwnUntilItWrites) {
  const uint64_t parent = Stored(300);
  const size_t used_bytes = shared_.used_bytes();
  const CreatedSequence child = shared_.Fork(parent);
  EXPECT_EQ(child.token_count, 300u);
  EXPECT_EQ(shared_.used_bytes(), used_bytes);
  Expect(child.sequence_id, First(300));
  const SequenceInfo info = shared_.Describe(child.sequence_id);
  EXPECT_EQ(info.shared_bytes, info.used_bytes);
  EXPECT_EQ(shared_.Describe(parent).shared_bytes, info.shared_bytes);
}

TEST_F(Sharing, ParentAndForksGoOnInTheirOwnWay) {
  Content parent_content = First(300);
  const uint64_t parent = Stored(300);  // the tail has 44 tokens
  for (const uint32_t count : {300u, 270u, 256u, 200u, 128u, 1u}) {
    Content child_content = First(count);
    const uint64_t child = shared_.Fork(parent, count).sequence_id;
    Append(child, child_content, 5);
    Append(parent, parent_content, 7);
    Append(child, child_content, 200);
    Expect(child, child_content);
    Expect(parent, parent_content);
  }
}

TEST_F(Sharing, ATailThatAForkShowsIsNotWrittenAgain) {
  Content parent_content = First(300);
  const uint64_t parent = Stored(300);
  const uint64_t child = shared_.Fork(parent).sequence_id;
  const uint64_t grandchild = shared_.Fork(child, 290).sequence_id;
  ASSERT_TRUE(store().DropSequence(kTenant, child).ok());
  Truncate(parent, parent_content, 270);  // below what the grandchild shows
  Append(parent, parent_content, 50);
  Expect(grandchild, First(290));
  Expect(parent, parent_content);
}

TEST_F(Sharing, WithoutAForkATruncatedTailIsWrittenInPlace) {
  Content content = First(300);
  const uint64_t id = Stored(300);
  const uint64_t child = shared_.Fork(id).sequence_id;
  ASSERT_TRUE(store().DropSequence(kTenant, child).ok());
  const auto tail = [&] { return shared_.Describe(id).segments.back().segment_id; };
  const uint64_t before = tail();
  for (uint32_t step = 0; step < 8; ++step) {  // speculation: some go, others come
    Truncate(id, content, 292);
    Append(id, content, 8);
  }
  EXPECT_EQ(tail(), before);
  Expect(id, content);
}

TEST_F(Sharing, AForkedTailIsCopiedOnceAndNotAtEachStep) {
  Content content = First(300);
  const uint64_t id = Stored(300);
  const uint64_t child = shared_.Fork(id).sequence_id;
  std::set<uint64_t> tails;
  for (uint32_t step = 0; step < 8; ++step) {
    Truncate(id, content, 292);
    Append(id, content, 8);
    tails.insert(shared_.Describe(id).segments.back().segment_id);
  }
  EXPECT_EQ(tails.size(), 1u);
  Expect(id, content);
  Expect(child, First(300));
}

TEST_F(Sharing, DroppingOneSharerFreesItsOwnBytesAlone) {
  const uint64_t parent = Stored(300);
  const size_t one = shared_.used_bytes();
  Content child_content = First(300);
  const uint64_t child = shared_.Fork(parent).sequence_id;
  Append(child, child_content, 100);
  EXPECT_GT(shared_.used_bytes(), one);
  ASSERT_TRUE(store().DropSequence(kTenant, child).ok());
  EXPECT_EQ(shared_.used_bytes(), one);
  child_content = First(300);
  const uint64_t other = shared_.Fork(parent).sequence_id;
  Append(other, child_content, 100);
  ASSERT_TRUE(store().DropSequence(kTenant, parent).ok());
  Expect(other, child_content);
  EXPECT_EQ(shared_.Describe(other).shared_bytes, 0u);
  EXPECT_EQ(shared_.used_bytes(), shared_.Describe(other).used_bytes);
  ASSERT_TRUE(store().DropSequence(kTenant, other).ok());
  EXPECT_EQ(shared_.used_bytes(), 0u);
}

TEST_F(Sharing, ACommonPrefixIsHeldOnce) {
  StoreOptions options = SmallOptions();
  options.segment_tokens = 4096;
  CacheSpec spec = SmallSpec();
  spec.groups[0].dtype = kernels::DType::kBf16;
  spec.capacity_bytes = size_t{256} << 20;
  SharingStore store(spec, options);
  const std::vector<uint32_t> ids = RandomIds(random_, 65'536);
  const Content content(ids.size(), 1);
  const CreatedSequence one = store.Create(ids);
  ASSERT_TRUE(IngestContent(*store.store, one.sequence_id, store.group, 0, content, 8192).ok());
  const auto held = static_cast<double>(store.used_bytes());
  const CreatedSequence two = store.Create(ids);
  EXPECT_EQ(two.token_count, ids.size());
  ASSERT_TRUE(AppendContent(*store.store, two.sequence_id, store.group, ids.size(),
                            std::span(content).first(10))
                  .ok());
  EXPECT_LE(static_cast<double>(store.used_bytes()) / held, 1.02);
}

TEST_F(Sharing, IndexesAreSharedWithTheirTokens) {
  const uint64_t parent = Stored(300);
  ASSERT_TRUE(store().BuildIndex(kTenant, parent, {.index = Pq(2, 4), .iterations = 3}, {}).ok());
  Content parent_content = First(300);
  Append(parent, parent_content, 150);  // a closed tail and an open one
  const Floats query = RandomFloats(random_, {1, 4, 32});
  const std::vector<float> all = Scores(parent, Pq(2, 4), 440, query);
  const size_t used_bytes = shared_.used_bytes();
  for (const uint32_t count : {440u, 300u, 290u, 130u}) {
    Content child_content = parent_content;
    child_content.resize(count);
    const uint64_t child = shared_.Fork(parent, count).sequence_id;
    EXPECT_EQ(shared_.used_bytes(), used_bytes);
    const std::vector<float> scores = Scores(child, Pq(2, 4), count, query);
    for (uint32_t head = 0; head < 4; ++head) {
      for (uint32_t i = 0; i < count; ++i) {
        ASSERT_EQ(scores[head * count + i], all[head * 440 + i]);
      }
    }
    Append(child, child_content, 140);  // coded under the shared codebook, counted when closed
    const auto selected = store().TopK(
        kTenant, child,
        {.layer = 1, .query_position = child_content.size() - 1, .queries = query.view()},
        {.index = Pq(2, 4), .budget_ratio = 0.2});
    EXPECT_TRUE(selected.ok()) << selected.status();
    Expect(child, child_content);
    ASSERT_TRUE(store().DropSequence(kTenant, child).ok());
  }
}

TEST_F(Sharing, APrefixIsFoundInWholeStepsOfTokensThatAreStored) {
  EXPECT_EQ(shared_.Match(ids_), 0u);
  const CreatedSequence one = shared_.Create(ids_);
  EXPECT_EQ(shared_.Match(ids_), 0u);  // named is not stored
  const auto ingest = [&](uint64_t first, size_t tokens) {
    EXPECT_TRUE(IngestContent(store(), one.sequence_id, shared_.group, first,
                              std::span(content_).subspan(first, tokens))
                    .ok());
  };
  ingest(0, 127);
  EXPECT_EQ(shared_.Match(ids_), 0u);
  ingest(127, 1);
  EXPECT_EQ(shared_.Match(ids_), 128u);
  ingest(128, 500);
  EXPECT_EQ(shared_.Match(ids_), 512u);
  EXPECT_EQ(shared_.Match(std::span(ids_).first(500)), 384u);
  std::vector<uint32_t> other = ids_;
  ++other[200];
  EXPECT_EQ(shared_.Match(other), 128u);
  ++other[0];
  EXPECT_EQ(shared_.Match(other), 0u);
  const CreatedSequence two = shared_.Create(ids_);
  EXPECT_EQ(two.token_count, 512u);
  Expect(two.sequence_id, First(512));
  ASSERT_TRUE(store().DropSequence(kTenant, one.sequence_id).ok());
  EXPECT_EQ(shared_.Match(ids_), 512u);  // the other one holds it
  ASSERT_TRUE(store().DropSequence(kTenant, two.sequence_id).ok());
  EXPECT_EQ(shared_.Match(ids_), 0u);
  EXPECT_EQ(shared_.used_bytes(), 0u);
}

TEST_F(Sharing, TokensOfOneLayerAloneAreNoPrefix) {
  const CreatedSequence one = shared_.Create(ids_);
  auto ingest = store().BeginIngest(kTenant, one.sequence_id);
  ASSERT_TRUE(ingest.ok());
  const testing::ContentRows rows(First(256), shared_.group);
  ASSERT_TRUE((*ingest)->Write(0, rows.layers[0]).ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  EXPECT_EQ(shared_.Match(ids_), 0u);
}

TEST_F(Sharing, ARollBackTakesThePrefixWithIt) {
  const uint64_t id = Stored(600);
  Content content = First(600);
  EXPECT_EQ(shared_.Match(ids_), 512u);
  Truncate(id, content, 300);
  EXPECT_EQ(shared_.Match(ids_), 256u);
  Append(id, content, 300);  // other rows, and nobody said under which ids
  EXPECT_EQ(shared_.Match(ids_), 256u);
  std::vector<uint32_t> other(ids_.begin(), ids_.begin() + 300);
  other.resize(600, 9);
  ASSERT_TRUE(store().NameTokens(kTenant, id, 300, std::span(other).subspan(300)).ok());
  EXPECT_EQ(shared_.Match(ids_), 256u);
  EXPECT_EQ(shared_.Match(other), 512u);
  const CreatedSequence shared = shared_.Create(other);
  content.resize(512);
  Expect(shared.sequence_id, content);
}

TEST_F(Sharing, NamesMayComeBeforeTheirTokensAndAfter) {
  const uint64_t id = shared_.Create().sequence_id;
  ASSERT_TRUE(store().NameTokens(kTenant, id, 0, std::span(ids_).first(100)).ok());
  ASSERT_TRUE(IngestContent(store(), id, shared_.group, 0, std::span(content_).first(300)).ok());
  EXPECT_EQ(shared_.Match(ids_), 0u);
  ASSERT_TRUE(store().NameTokens(kTenant, id, 50, std::span(ids_).subspan(50, 150)).ok());
  EXPECT_EQ(shared_.Match(ids_), 128u);
  ASSERT_TRUE(store().NameTokens(kTenant, id, 200, std::span(ids_).subspan(200)).ok());
  EXPECT_EQ(shared_.Match(ids_), 256u);
}

TEST_F(Sharing, ContentKeysNameWholeSteps) {
  const std::vector<ContentKey> keys = {{1, 2, 3, 4}, {5, 6, 7, 8}, {1, 2, 3, 4}};
  const auto match = [&](size_t count) {
    return *store().MatchPrefix(kTenant, shared_.cache_id, {{}, std::span(keys).first(count)}, "");
  };
  const SequenceSpec spec{.session = "s", .content_keys = {keys[0]}};
  const uint64_t id = store().CreateSequence(kTenant, shared_.cache_id, spec)->sequence_id;
  ASSERT_TRUE(IngestContent(store(), id, shared_.group, 0, std::span(content_).first(384)).ok());
  EXPECT_EQ(match(3), 128u);
  ASSERT_TRUE(store().NameTokens(kTenant, id, 128, {{}, std::span(keys).subspan(1)}).ok());
  EXPECT_EQ(match(3), 384u);
  EXPECT_EQ(match(2), 256u);
  EXPECT_EQ(shared_.Match(ids_), 0u);
  ASSERT_TRUE(store().TruncateSequence(kTenant, id, 300).ok());  // its key names removed tokens
  EXPECT_EQ(match(3), 256u);
  const uint64_t fork = shared_.Fork(id, 129).sequence_id;
  ASSERT_TRUE(store().DropSequence(kTenant, id).ok());
  EXPECT_EQ(match(3), 128u);
  const auto shared =
      store().CreateSequence(kTenant, shared_.cache_id, {.session = "s", .content_keys = keys});
  ASSERT_EQ(shared->token_count, 128u);
  Expect(shared->sequence_id, First(128));
  ASSERT_TRUE(store().TruncateSequence(kTenant, fork, 0).ok());
  EXPECT_TRUE(store().NameTokens(kTenant, fork, 0, ids_).ok());  // no names are left: either kind
}

TEST_F(Sharing, NamesAreOfOneKind) {
  const std::vector<ContentKey> keys = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  const auto refused = [&](const absl::Status& status, std::string_view field) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(status), field) << status;
  };
  const auto create = [&](const SequenceSpec& spec) {
    return store().CreateSequence(kTenant, shared_.cache_id, spec).status();
  };
  refused(create({.session = "s", .token_ids = ids_, .content_keys = keys}), "content_keys");
  refused(create({.session = "s", .content_keys = std::vector<ContentKey>((1u << 15) + 1)}),
          "content_keys");
  const uint64_t by_ids = Stored(300);
  refused(store().NameTokens(kTenant, by_ids, 0, {{}, keys}), "content_keys");
  refused(store().NameTokens(kTenant, by_ids, 0, {ids_, keys}), "content_keys");
  const uint64_t by_keys = shared_.Create().sequence_id;
  ASSERT_TRUE(store().NameTokens(kTenant, by_keys, 0, {{}, keys}).ok());
  refused(store().NameTokens(kTenant, by_keys, 256, std::span(ids_).first(1)), "token_ids");
  refused(store().NameTokens(kTenant, by_keys, 1, {{}, keys}), "first_position");
  refused(store().NameTokens(kTenant, by_keys, 384, {{}, keys}), "first_position");
  const std::vector<ContentKey> other = {keys[1], {9, 9, 9, 9}};
  refused(store().NameTokens(kTenant, by_keys, 128, {{}, {&other[1], 1}}), "content_keys[0]");
  EXPECT_TRUE(store().CheckNames(kTenant, by_keys, 128, {{}, other}).ok());
}

TEST_F(Sharing, OtherTenantsModelsLayoutsAndKeysNeverMeet) {
  Stored(512);
  EXPECT_EQ(shared_.Match(ids_), 512u);
  EXPECT_EQ(shared_.Match(ids_, "image"), 0u);
  const auto match = [&](const std::string& tenant, const CacheSpec& spec) {
    const auto cache = store().OpenCache(tenant, spec);
    EXPECT_TRUE(cache.ok()) << cache.status();
    return *store().MatchPrefix(tenant, cache->cache_id, ids_, "");
  };
  EXPECT_EQ(match("other", SmallSpec()), 0u);
  CacheSpec spec = SmallSpec("tuned");
  spec.model_fingerprint += " tuned";
  EXPECT_EQ(match(kTenant, spec), 0u);
  EXPECT_EQ(match(kTenant, SmallSpec("beside")), 0u);
  const CreatedSequence keyed = shared_.Create(ids_, "image");
  EXPECT_EQ(keyed.token_count, 0u);
  ASSERT_TRUE(IngestContent(store(), keyed.sequence_id, shared_.group, 0, First(256)).ok());
  EXPECT_EQ(shared_.Match(ids_, "image"), 256u);
}

TEST_F(Sharing, ASequenceIsRolledBackToAnyPosition) {
  const uint64_t id = Stored(1000);
  ASSERT_TRUE(store().BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2}, {}).ok());
  Content content = First(1000);
  const Floats query = RandomFloats(random_, {1, 4, 32});
  for (const uint32_t count : {999u, 900u, 896u, 700u, 128u, 127u, 1u, 0u}) {
    Truncate(id, content, count);
    Expect(id, content);
    const uint64_t twin = shared_.Fork(id).sequence_id;
    Content twin_content = content;
    Append(twin, twin_content, 140);
    Expect(twin, twin_content);
    if (count > 0) {
      EXPECT_EQ(Scores(twin, Pq(2, 4), count, query).size(), 4u * count);
    }
    ASSERT_TRUE(store().DropSequence(kTenant, twin).ok());
  }
  Append(id, content, 300);
  Expect(id, content);
}

TEST_F(Sharing, ASecondTurnIsIngestedAndCodedBehindTheFirst) {
  const uint64_t id = Stored(300);
  ASSERT_TRUE(store().BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 3}, {}).ok());
  Content content = First(300);
  Append(id, content, 20);
  const Floats query = RandomFloats(random_, {1, 4, 32});
  for (int turn = 0; turn < 3; ++turn) {
    Content prompt(400);
    for (uint64_t& token : prompt) token = random_();
    const auto count = IngestContent(store(), id, shared_.group, content.size(), prompt);
    ASSERT_TRUE(count.ok()) << count.status();
    content.insert(content.end(), prompt.begin(), prompt.end());
    ASSERT_EQ(*count, content.size());
    Append(id, content, 30);
    Expect(id, content);
    const auto tokens = static_cast<uint32_t>(content.size());
    // Codes are those of the nearest centroids: what is coded alike is scored alike, so as many
    // different scores as cells at most.
    const std::vector<float> scores = Scores(id, Pq(2, 4), tokens, query);
    const std::set<float> different(scores.begin(), scores.begin() + tokens);
    EXPECT_LE(different.size(), 2u * 256);
    EXPECT_GT(different.size(), 20u);
    const SequenceInfo info = shared_.Describe(id);
    for (const LayerInfo& layer : info.layers) {
      EXPECT_EQ(layer.index_states, std::vector<LayerState>{LayerState::kReady});
    }
    for (size_t i = 0; i + 1 < info.segments.size(); ++i) {
      EXPECT_EQ(info.segments[i].state, SegmentState::kSealed);
    }
  }
}

TEST_F(Sharing, LayersOfASecondTurnMayComeInTheirOwnTime) {
  const uint64_t id = Stored(300);
  ASSERT_TRUE(store().BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 3}, {}).ok());
  Content content = First(300);
  Content prompt(300);
  for (uint64_t& token : prompt) token = random_();
  const testing::ContentRows rows(prompt, shared_.group);
  for (size_t layer = 0; layer < rows.layers.size(); ++layer) {  // a transaction each
    auto ingest = store().BeginIngest(kTenant, id);
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    ASSERT_TRUE((*ingest)->Write(300, rows.layers[layer]).ok());
    const auto count = (*ingest)->Commit();
    ASSERT_TRUE(count.ok()) << count.status();
    EXPECT_EQ(*count, layer + 1 < rows.layers.size() ? 300u : 600u);
  }
  content.insert(content.end(), prompt.begin(), prompt.end());
  Expect(id, content);
  const Floats query = RandomFloats(random_, {1, 4, 32});
  EXPECT_EQ(Scores(id, Pq(2, 4), 600, query).size(), 4u * 600);
}

TEST_F(Sharing, ASuspendedSequenceKeepsItsTokensAndAnswersNothing) {
  const uint64_t id = Stored(300);
  auto ingest = store().BeginIngest(kTenant, id);
  ASSERT_TRUE(ingest.ok());
  EXPECT_EQ(*store().SuspendSequence(kTenant, id), 300u);
  EXPECT_EQ(*store().SuspendSequence(kTenant, id), 300u);
  const auto refused = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(TextOf(status), HasSubstr("suspended"));
  };
  refused((*ingest)->Commit().status());
  ingest->reset();
  const Floats query = RandomFloats(random_, {1, 4, 32});
  const Query asked{.layer = 1, .query_position = 299, .queries = query.view()};
  const std::vector<uint32_t> positions = {0, 0};
  refused(store().BeginIngest(kTenant, id).status());
  refused(AppendContent(store(), id, shared_.group, 300, First(1)).status());
  refused(store().ClosePrefill(kTenant, id));
  refused(store().BuildIndex(kTenant, id, {.index = Pq(2, 4)}, {}));
  refused(store().TruncateSequence(kTenant, id, 1).status());
  refused(store().ForkSequence(kTenant, id, 0, "session").status());
  refused(store().NameTokens(kTenant, id, 300, std::span(ids_).first(1)));
  refused(store().TopK(kTenant, id, asked, {}).status());
  refused(store().Score(kTenant, id, asked, {}, {0, 10}).status());
  refused(store().Attend(kTenant, id, asked, {}, false).status());
  refused(store().AttendPositions(kTenant, id, asked, positions, 1).status());
  refused(store().FetchBlocks(kTenant, id, 1, {0, 1}, RowPart::kRow).status());
  refused(store().FetchTokens(kTenant, id, 1, positions, RowPart::kRow).status());
  EXPECT_EQ(shared_.Describe(id).token_count, 300u);
  EXPECT_EQ(shared_.Create(std::span(ids_).first(300)).token_count, 256u);  // others may share it
  EXPECT_EQ(*store().ResumeSequence(kTenant, id), 300u);
  EXPECT_EQ(*store().ResumeSequence(kTenant, id), 300u);
  Expect(id, First(300));
  ASSERT_TRUE(store().SuspendSequence(kTenant, id).ok());
  EXPECT_TRUE(store().DropSequence(kTenant, id).ok());
}

TEST_F(Sharing, SeveralTokensOfAQueryShareOneSelection) {
  const uint64_t id = Stored(600);
  ASSERT_TRUE(store().BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 3}, {}).ok());
  const LayerGroup& group = shared_.group;
  for (const IndexDescriptor& index : {IndexDescriptor{}, Pq(2, 4)}) {
    for (const uint32_t length : {1u, 2u, 5u, 8u}) {
      const Floats queries = RandomFloats(random_, {length, group.query_heads, group.key_dim});
      const Query asked{.layer = 3, .query_position = 590, .queries = queries.view()};
      const Selection selection{.index = index,
                                .group_rule = GroupRule::kMeanLogit,
                                .sink_tokens = 3,
                                .window_tokens = 20,
                                .budget_ratio = 0.3};
      const auto all = store().Attend(kTenant, id, asked, selection, true);
      ASSERT_TRUE(all.ok()) << all.status();
      const uint32_t count = all->selected.count;
      ASSERT_EQ(all->lse.size(), size_t{length} * group.query_heads);
      // Token by token over the same positions it is the same attention.
      const size_t floats = size_t{group.query_heads} * group.key_dim;
      const size_t outputs = size_t{group.query_heads} * group.value_dim;
      std::vector<double> sums(size_t{group.kv_heads} * 571, 0.0);
      for (uint32_t token = 0; token < length; ++token) {
        Floats one{.shape = {1, group.query_heads, group.key_dim}, .data = {}};
        one.data.assign(queries.data.begin() + static_cast<ptrdiff_t>(token * floats),
                        queries.data.begin() + static_cast<ptrdiff_t>((token + 1) * floats));
        const Query single{.layer = 3, .query_position = 590, .queries = one.view()};
        const auto part = store().AttendPositions(kTenant, id, single, all->selected.positions,
                                                  all->selected.count);
        ASSERT_TRUE(part.ok()) << part.status();
        for (size_t i = 0; i < outputs; ++i) {
          ASSERT_NEAR(all->output[token * outputs + i], part->output[i], 1e-4);
        }
        for (uint32_t head = 0; head < group.query_heads; ++head) {
          ASSERT_NEAR(all->lse[token * group.query_heads + head], part->lse[head], 1e-4);
        }
        const auto scores = store().Score(kTenant, id, single, index, {0, 571});
        ASSERT_TRUE(scores.ok()) << scores.status();
        for (uint32_t head = 0; head < group.query_heads; ++head) {
          for (uint32_t i = 0; i < 571; ++i) {
            sums[head / group.group_size() * 571 + i] += scores->logits[head * 571 + i];
          }
        }
      }
      // And the selection is by the sum over the heads of all tokens.
      for (uint32_t kv_head = 0; kv_head < group.kv_heads; ++kv_head) {
        const std::span<const uint32_t> chosen =
            std::span(all->selected.positions).subspan(kv_head * count, count);
        std::vector<double> candidates(sums.begin() + kv_head * 571 + 3,
                                       sums.begin() + (kv_head + 1) * 571);
        std::nth_element(candidates.begin(), candidates.begin() + (count - 1), candidates.end(),
                         std::greater<double>());
        const double least = candidates[count - 1];
        for (const uint32_t position : chosen) {
          ASSERT_GE(sums[kv_head * 571 + position], least - 1e-3);
        }
      }
    }
  }
}

TEST_F(Sharing, BadWordsAboutPrefixesAndForksChangeNothing) {
  const uint64_t id = Stored(300);
  const auto refused = [&](const std::function<absl::Status()>& call, StatusCode code,
                           const std::string& field) {
    const std::string before = testing::Dump(store());
    const absl::Status status = call();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_TRUE(testing::Dump(store()) == before);
    EXPECT_EQ(shared_.Match(ids_), 256u);
  };
  const auto bad = StatusCode::kInvalidArgument;
  const std::string long_key(257, 'k');
  const std::vector<uint32_t> many((size_t{1} << 22) + 1);
  const auto create = [&](const std::vector<uint32_t>& ids, const std::string& key) {
    return store()
        .CreateSequence(kTenant, shared_.cache_id,
                        {.session = "s", .token_ids = ids, .extra_key = key, .live_index = {}})
        .status();
  };
  refused([&] { return create({}, long_key); }, bad, "extra_key");
  refused([&] { return create(many, ""); }, bad, "token_ids");
  refused([&] { return store().MatchPrefix(kTenant, shared_.cache_id, ids_, long_key).status(); },
          bad, "extra_key");
  refused([&] { return store().MatchPrefix(kTenant, shared_.cache_id, many, "").status(); }, bad,
          "token_ids");
  refused([&] { return store().MatchPrefix("other", shared_.cache_id, ids_, "").status(); },
          StatusCode::kNotFound, "cache_id");
  const auto name = [&](uint64_t first, std::span<const uint32_t> ids) {
    return [this, id, first, ids] { return store().NameTokens(kTenant, id, first, ids); };
  };
  refused(name(301, ids_), bad, "first_position");
  refused(name(~uint64_t{0}, ids_), bad, "first_position");
  refused(name(1, ids_), bad, "token_ids[0]");
  std::vector<uint32_t> other(ids_.begin() + 200, ids_.begin() + 300);
  ++other[60];
  refused(name(200, other), bad, "token_ids[60]");
  refused(name(300, many), bad, "token_ids");
  refused([&] { return store().NameTokens("other", id, 300, ids_); }, StatusCode::kNotFound,
          "sequence_id");
  refused([&] { return store().ForkSequence(kTenant, id, 301, "s").status(); },
          StatusCode::kOutOfRange, "token_count");
  refused([&] { return store().ForkSequence(kTenant, id, ~uint64_t{0}, "s").status(); },
          StatusCode::kOutOfRange, "token_count");
  refused([&] { return store().ForkSequence("other", id, 0, "s").status(); }, StatusCode::kNotFound,
          "sequence_id");
  refused([&] { return store().SuspendSequence(kTenant, 999).status(); }, StatusCode::kNotFound,
          "sequence_id");
  refused([&] { return store().ResumeSequence("other", id).status(); }, StatusCode::kNotFound,
          "sequence_id");
}

TEST_F(Sharing, ForksCountAsSequences) {
  StoreOptions options = SmallOptions();
  options.max_sequences = 2;
  SharingStore few(SmallSpec(), options);
  const uint64_t id = few.Create().sequence_id;
  few.Fork(id);
  EXPECT_EQ(few.store->ForkSequence(kTenant, id, 0, "s").status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(few.store->DropSession("session"), 2u);
}

}  // namespace
}  // namespace pqcached::kvstore
