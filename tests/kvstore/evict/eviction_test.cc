// What is retained, and who gives way when a pool is full.
#include "kvstore/evict/eviction.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/memory/unit_range.h"
#include "kvstore/sequence/evicted_ids.h"
#include "tests/kvstore/evict/pressure_fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kSegmentBytes;
using testing::kTenant;
using testing::Pq;
using testing::PressureOptions;
using testing::PressureStore;
using testing::Prompt;
using ::testing::SizeIs;

uint64_t CountOf(const PressureStore& shared, const std::vector<uint32_t>& prompt) {
  return *shared.store->MatchPrefix(kTenant, shared.cache_id, prompt, "");
}

TEST(Retention, ClosedSegmentsOfNamedTokensServeTheNextRequest) {
  PressureStore shared(64);
  const std::vector<uint32_t> prompt = Prompt(1, 300);
  const uint64_t id = shared.Fill(prompt);
  shared.Drop(id);
  EXPECT_EQ(shared.Read(id).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(shared.used_bytes(), 2 * kSegmentBytes);  // the open one is discarded
  EXPECT_EQ(CountOf(shared, prompt), 256u);
  const CreatedSequence again = shared.Create(prompt);
  EXPECT_EQ(again.token_count, 256u);
  testing::Content content = ContentOf(prompt);
  content.resize(256);
  ExpectContent(*shared.store, again.sequence_id, shared.group, content);
  const StoreStats stats = shared.store->Stats(kAllTenants);
  EXPECT_EQ(stats.prompt_tokens, 512u);
  EXPECT_EQ(stats.matched_tokens, 256u);
}

TEST(Retention, TheEndOfASessionRetainsToo) {
  PressureStore shared(64);
  shared.Fill(Prompt(1, 128 + 1), "a");
  shared.Fill(Prompt(2, 300), "b");
  EXPECT_EQ(shared.store->DropSession("a"), 1u);
  EXPECT_EQ(CountOf(shared, Prompt(1, 200)), 128u);
  EXPECT_THAT(shared.Retained(), SizeIs(1));
  EXPECT_EQ(shared.store->DropSession("a"), 0u);
  EXPECT_EQ(shared.store->DropSession(""), 0u);  // nobody is not a session
  EXPECT_THAT(shared.Retained(), SizeIs(1));
}

TEST(Retention, TokensWithoutNamesAndIncompleteStepsAreFreed) {
  PressureStore shared(64);
  shared.Serve({});
  const CreatedSequence nameless = shared.Create();
  ASSERT_TRUE(testing::IngestContent(*shared.store, nameless.sequence_id, shared.group, 0,
                                     ContentOf(Prompt(1, 500)))
                  .ok());
  shared.Drop(nameless.sequence_id);
  shared.Serve(Prompt(2, 127));
  EXPECT_EQ(shared.used_bytes(), 0u);
  EXPECT_THAT(shared.Retained(), IsEmpty());
}

// Returns what the rows of a segment take.
size_t BytesOf(const LayerGroup& group, size_t slots) {
  if (slots == 0) return 0;
  const size_t extent_bytes = UnitsFor(slots * group.row_bytes()) * kMinExtentBytes;
  return extent_bytes * group.kv_heads * group.layers.size();
}

TEST(Retention, TheOpenSegmentIsRetainedInStepsWithoutItsUnusedSlots) {
  StoreOptions options = PressureOptions();
  options.segment_tokens = options.tail_tokens = 1024;
  PressureStore shared(256, options);
  for (const size_t tokens : {128u, 300u, 512u, 513u, 700u, 800u, 900u, 1024u, 1300u}) {
    SCOPED_TRACE(tokens);
    const auto family = static_cast<uint32_t>(tokens);
    const std::vector<uint32_t> prompt = Prompt(family, tokens);
    const size_t before = shared.used_bytes();
    shared.Serve(prompt);
    const size_t steps = tokens / 128;
    EXPECT_EQ(CountOf(shared, prompt), 128 * steps);
    // More than 6 of the 8 steps of a segment are kept as they are; of less, a copy is.
    const size_t rest = steps % 8;
    EXPECT_EQ(shared.used_bytes() - before,
              steps / 8 * BytesOf(shared.group, 1024) +
                  BytesOf(shared.group, rest > 6 ? 1024 : 128 * rest));
    const CreatedSequence again = shared.Create(prompt);
    testing::Content content = ContentOf(prompt);
    content.resize(128 * steps);
    ASSERT_EQ(again.token_count, content.size());
    ExpectContent(*shared.store, again.sequence_id, shared.group, content);
    shared.Drop(again.sequence_id);
  }
}

TEST(Retention, TheCopyOfAnOpenSegmentHasItsCodes) {
  StoreOptions options = PressureOptions();
  options.segment_tokens = options.tail_tokens = 1024;
  PressureStore shared(256, options);
  const std::vector<uint32_t> prompt = Prompt(1, 700);
  const uint64_t id = shared.Fill({prompt.begin(), prompt.begin() + 400});
  const testing::Content content = ContentOf(prompt);
  const BuildSpec build{.index = Pq(2, 4), .iterations = 2};
  ASSERT_TRUE(shared.store->BuildIndex(kTenant, id, build, {}).ok());
  ASSERT_TRUE(testing::AppendContent(*shared.store, id, shared.group, 400,
                                     std::span<const uint64_t>(content).subspan(400))
                  .ok());
  ASSERT_TRUE(shared.store->NameTokens(kTenant, id, 400, std::span(prompt).subspan(400)).ok());
  testing::Floats query{.shape = {1, shared.group.query_heads, shared.group.key_dim}, .data = {}};
  for (uint64_t i = 0; i < query.shape[1] * query.shape[2]; ++i) {
    query.data.push_back(static_cast<float>(i % 7) - 3);
  }
  const auto scores_of = [&](uint64_t sequence_id) {
    const Query asked{
        .layer = shared.group.layers[0], .query_position = 639, .queries = query.view()};
    const auto scores = shared.store->Score(kTenant, sequence_id, asked, Pq(2, 4), {0, 640});
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->logits : std::vector<float>{};
  };
  const std::vector<float> expected = scores_of(id);
  shared.Drop(id);
  const CreatedSequence again = shared.Create(prompt);
  ASSERT_EQ(again.token_count, 640u);
  EXPECT_THAT(shared.Describe(again.sequence_id).indexes, SizeIs(1));
  EXPECT_EQ(scores_of(again.sequence_id), expected);
}

TEST(Retention, AFullPoolKeepsTheOpenSegmentAsItIs) {
  StoreOptions options = PressureOptions();
  options.segment_tokens = options.tail_tokens = 1024;
  PressureStore shared(8, options);  // what is free is in pieces that are too short for the copy
  const uint64_t id = shared.Fill(Prompt(1, 520));
  EXPECT_EQ(shared.used_bytes(), 5 * kSegmentBytes);
  shared.Drop(id);
  EXPECT_EQ(CountOf(shared, Prompt(1, 520)), 512u);
  EXPECT_EQ(shared.used_bytes(), 5 * kSegmentBytes);
}

TEST(Retention, NothingIsRetainedWhenItIsOff) {
  StoreOptions options = PressureOptions();
  options.retain = false;
  PressureStore shared(64, options);
  shared.Serve(Prompt(1, 400));
  EXPECT_EQ(shared.used_bytes(), 0u);
}

TEST(Retention, ALongerOneTakesThePlaceOfItsBeginnings) {
  PressureStore shared(64);
  shared.Serve(Prompt(1, 300));
  shared.Serve(Prompt(1, 600));
  EXPECT_THAT(shared.Retained(), SizeIs(1));
  EXPECT_EQ(CountOf(shared, Prompt(1, 600)), 512u);
  shared.Serve(Prompt(1, 400));  // what it holds, the longer one holds as well
  EXPECT_THAT(shared.Retained(), SizeIs(1));
  EXPECT_EQ(shared.used_bytes(), 4 * kSegmentBytes);
}

TEST(Retention, KeepsIndexesThatAreReady) {
  PressureStore shared(256);
  const std::vector<uint32_t> prompt = Prompt(1, 256);
  const uint64_t id = shared.Fill(prompt);
  ASSERT_TRUE(shared.store->BuildIndex(kTenant, id, {.index = Pq(2, 4), .iterations = 2}, {}).ok());
  shared.Drop(id);
  const CreatedSequence again = shared.Create(prompt);
  EXPECT_EQ(again.token_count, 256u);
  EXPECT_THAT(shared.Describe(again.sequence_id).indexes, SizeIs(1));
}

TEST(Retention, KeepsAnIndexThatIsBuiltOnARetainedPrefix) {
  StoreOptions options = PressureOptions();
  options.segment_tokens = options.tail_tokens = 1024;
  for (const size_t tokens : {256u, 1024u, 1300u}) {
    SCOPED_TRACE(tokens);
    PressureStore shared(256, options);
    const std::vector<uint32_t> prompt = Prompt(1, tokens);
    const uint64_t stored = tokens / 128 * 128;
    shared.Serve(prompt);
    const auto create = [&] {
      const CreatedSequence created = shared.Create(prompt);
      EXPECT_EQ(created.token_count, stored);
      return created.sequence_id;
    };
    const auto build = [&](uint64_t id, const IndexDescriptor& index) {
      ASSERT_TRUE(
          shared.store->BuildIndex(kTenant, id, {.index = index, .iterations = 2}, {}).ok());
    };
    const auto serve_again = [&](size_t index_count) {
      const uint64_t id = create();
      EXPECT_THAT(shared.Describe(id).indexes, SizeIs(index_count));
      shared.Drop(id);
    };
    uint64_t id = create();
    const uint64_t second = create();  // without the index
    build(id, Pq(2, 4));
    shared.Drop(id);
    EXPECT_THAT(shared.Retained(), SizeIs(1));
    serve_again(1);  // although the older holder has no index
    shared.Drop(second);
    EXPECT_THAT(shared.Retained(), SizeIs(1));
    serve_again(1);
    // Nor does a second index take the place of the first one.
    id = create();
    build(id, Pq(4, 4));
    shared.Drop(id);
    EXPECT_THAT(shared.Retained(), SizeIs(1));
    serve_again(2);
    serve_again(2);
    testing::Content content = ContentOf(prompt);
    content.resize(stored);
    ExpectContent(*shared.store, create(), shared.group, content);
  }
}

TEST(Retention, KeepsDifferentIndexesOfTheSamePrefix) {
  PressureStore shared(256);
  const std::vector<uint32_t> prompt = Prompt(1, 256);
  shared.Serve(prompt);
  const CreatedSequence a = shared.Create(prompt), b = shared.Create(prompt);
  const auto build = [&](uint64_t id, const IndexDescriptor& index) {
    ASSERT_TRUE(shared.store->BuildIndex(kTenant, id, {.index = index, .iterations = 2}, {}).ok());
  };
  build(a.sequence_id, Pq(2, 4));
  build(b.sequence_id, Pq(4, 4));
  shared.Drop(a.sequence_id);
  shared.Drop(b.sequence_id);
  EXPECT_THAT(shared.Retained(), SizeIs(2));
  const CreatedSequence both = shared.Create(prompt);
  build(both.sequence_id, Pq(4, 4));
  shared.Drop(both.sequence_id);
  EXPECT_THAT(shared.Retained(), SizeIs(1));
  EXPECT_THAT(shared.Describe(shared.Create(prompt).sequence_id).indexes, SizeIs(2));
}

TEST(Retention, StaysBelowItsShareOfThePool) {
  StoreOptions options = PressureOptions();
  options.max_retained_share = 0.5;
  PressureStore shared(16, options);
  for (uint32_t family = 1; family < 9; ++family) {
    shared.Serve(Prompt(family, 300));
    EXPECT_LE(shared.used_bytes(), 8 * kSegmentBytes);
  }
  EXPECT_EQ(shared.used_bytes(), 8 * kSegmentBytes);
}

TEST(Retention, GivesItsPlaceAmongTheSequencesToNewOnes) {
  StoreOptions options = PressureOptions();
  options.max_sequences = 3;
  PressureStore shared(64, options);
  for (uint32_t family = 1; family < 6; ++family) shared.Serve(Prompt(family, 200));
  const uint64_t a = shared.Fill(Prompt(11, 10));
  const uint64_t b = shared.Fill(Prompt(12, 10));
  const uint64_t c = shared.Fill(Prompt(13, 10));
  EXPECT_THAT(shared.Retained(), IsEmpty());
  EXPECT_EQ(
      shared.store
          ->CreateSequence(kTenant, shared.cache_id,
                           {.session = "s", .token_ids = {}, .extra_key = {}, .live_index = {}})
          .status()
          .code(),
      absl::StatusCode::kResourceExhausted);
  for (const uint64_t id : {a, b, c}) EXPECT_TRUE(shared.Read(id).ok());
}

TEST(Eviction, AFullPoolGivesRetainedTokensWay) {
  PressureStore shared(8);
  shared.Serve(Prompt(1, 513));
  EXPECT_EQ(shared.used_bytes(), 4 * kSegmentBytes);
  const std::vector<uint32_t> large = Prompt(2, 7 * 128);
  const uint64_t id = shared.Fill(large);
  ExpectContent(*shared.store, id, shared.group, ContentOf(large));
  // From its end, and no more than was needed.
  EXPECT_EQ(CountOf(shared, Prompt(1, 513)), 128u);
  EXPECT_GE(shared.store->Stats(kAllTenants).evicted_bytes, 3 * kSegmentBytes);
  EXPECT_EQ(shared.store->Stats(kAllTenants).evicted_sequences, 0u);
}

TEST(Eviction, NothingGoesInVain) {
  PressureStore shared(8);
  shared.Serve(Prompt(1, 513));
  const CreatedSequence greedy = shared.Create();
  const auto refused = testing::AppendContent(*shared.store, greedy.sequence_id, shared.group, 0,
                                              ContentOf(Prompt(2, 9 * 128)));
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(TextOf(refused.status()), HasSubstr("bytes short"));
  EXPECT_EQ(CountOf(shared, Prompt(1, 513)), 512u);
  EXPECT_EQ(shared.store->Stats(kAllTenants).evicted_bytes, 0u);
}

TEST(Eviction, EvictedIdsAreRemembered) {
  PressureStore shared(4);
  shared.Serve(Prompt(1, 130));
  const uint64_t retained = shared.Retained().front().sequence_id;
  shared.Fill(Prompt(2, 4 * 128));
  const absl::Status status = shared.Read(retained);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(TextOf(status), HasSubstr("was evicted"));
  EXPECT_EQ(shared.store->Stats(kAllTenants).evicted_sequences, 1u);
}

TEST(Eviction, LeastRecentlyUsedGoesFirst) {
  StoreOptions options = PressureOptions();
  options.eviction_policy = EvictionPolicy::kLru;
  PressureStore shared(8, options);
  shared.Serve(Prompt(1, 257));
  shared.Serve(Prompt(2, 257));
  shared.Serve(Prompt(3, 257));
  shared.Drop(shared.Create(Prompt(1, 257)).sequence_id);  // a use
  shared.Fill(Prompt(4, 4 * 128));
  EXPECT_EQ(CountOf(shared, Prompt(1, 257)), 256u);
  EXPECT_EQ(CountOf(shared, Prompt(2, 257)), 0u);
  EXPECT_EQ(CountOf(shared, Prompt(3, 257)), 256u);
}

TEST(Eviction, WhatComesAgainOutlivesWhatCameLast) {
  StoreOptions options = PressureOptions();
  options.eviction_policy = EvictionPolicy::kReuse;
  PressureStore shared(8, options);
  shared.Serve(Prompt(1, 257));
  for (int i = 0; i < 3; ++i) shared.Drop(shared.Create(Prompt(1, 257)).sequence_id);
  shared.Serve(Prompt(2, 257));
  shared.Serve(Prompt(3, 257));
  shared.Fill(Prompt(4, 5 * 128));
  EXPECT_EQ(CountOf(shared, Prompt(1, 257)), 256u);
  EXPECT_LT(CountOf(shared, Prompt(2, 257)) + CountOf(shared, Prompt(3, 257)), 256u);
}

TEST(Eviction, ASharedBeginningOutlivesTheEndsBehindIt) {
  PressureStore shared(8);
  for (uint32_t member = 1; member <= 3; ++member) shared.Serve(Prompt(1, 385, 256, member));
  EXPECT_EQ(shared.used_bytes(), 5 * kSegmentBytes);  // two in common, one each
  shared.Fill(Prompt(2, 6 * 128));
  EXPECT_EQ(CountOf(shared, Prompt(1, 385, 256, 9)), 256u);
  EXPECT_EQ(shared.used_bytes(), 8 * kSegmentBytes);
}

TEST(Eviction, PinnedSequencesStayAndSoDoesWhatIsRetainedOfThem) {
  PressureStore shared(8);
  const uint64_t id = shared.Fill(Prompt(1, 257));
  ASSERT_TRUE(shared.store->PinSequence(kTenant, id, absl::Hours(1)).ok());
  EXPECT_GT(shared.Describe(id).pin_left, absl::Minutes(59));
  shared.Drop(id);
  const CreatedSequence greedy = shared.Create();
  const auto fill = [&](size_t segments) {
    return testing::AppendContent(*shared.store, greedy.sequence_id, shared.group, 0,
                                  ContentOf(Prompt(2, segments * 128)))
        .status();
  };
  EXPECT_EQ(fill(7).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CountOf(shared, Prompt(1, 257)), 256u);
  const uint64_t retained = shared.Retained().front().sequence_id;
  EXPECT_EQ(shared.store->EvictSequence(kAllTenants, retained).code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(shared.store->PinSequence("", retained, absl::ZeroDuration()).ok());
  EXPECT_TRUE(fill(7).ok());
  EXPECT_EQ(CountOf(shared, Prompt(1, 257)), 128u);
}

TEST(Eviction, WhatIsRetainedOfPinnedSequencesStaysBeyondTheProcess) {
  testing::MemoryKeeper keeper;
  StoreOptions options = PressureOptions();
  options.keeper = &keeper;
  std::optional<PressureStore> shared;
  shared.emplace(8, options);
  const uint64_t id = shared->Fill(Prompt(1, 257));
  ASSERT_TRUE(shared->store->PinSequence(kTenant, id, absl::Hours(1)).ok());
  shared->Drop(id);
  shared.reset();
  shared.emplace(8, options);
  shared->store->EndQuarantine();
  ASSERT_EQ(shared->Retained().size(), 1u);
  EXPECT_GT(shared->Retained().front().pin_left, absl::Minutes(50));
  shared->Fill(Prompt(2, 5 * 128));
  const CreatedSequence greedy = shared->Create();
  EXPECT_EQ(testing::AppendContent(*shared->store, greedy.sequence_id, shared->group, 0,
                                   ContentOf(Prompt(3, 2 * 128)))
                .status()
                .code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CountOf(*shared, Prompt(1, 257)), 256u);
}

TEST(Eviction, PinsEndByThemselves) {
  PressureStore shared(4);
  const uint64_t id = shared.Fill(Prompt(1, 257));
  ASSERT_TRUE(shared.store->PinSequence(kTenant, id, absl::Nanoseconds(1)).ok());
  shared.Drop(id);
  EXPECT_EQ(shared.Retained().front().pin_left, absl::ZeroDuration());
  shared.Fill(Prompt(2, 4 * 128));
  EXPECT_THAT(shared.Retained(), IsEmpty());
}

TEST(Eviction, PinsNameTheirLimit) {
  PressureStore shared(4);
  const uint64_t id = shared.Fill(Prompt(1, 1));
  for (const absl::Duration ttl : {-absl::Nanoseconds(1), absl::Hours(24 * 30 + 1)}) {
    const absl::Status status = shared.store->PinSequence(kTenant, id, ttl);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(status), "ttl");
  }
  EXPECT_EQ(shared.store->PinSequence("other", id, absl::Hours(1)).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(shared.store->PinSequence(kTenant, id + 1, absl::Hours(1)).code(),
            absl::StatusCode::kNotFound);
}

StoreOptions IdleOptions() {
  StoreOptions options = PressureOptions();
  options.evict_idle_after = absl::Nanoseconds(1);
  return options;
}

TEST(Eviction, IdleSequencesGoWhenNothingRetainedIsLeft) {
  PressureStore shared(8, IdleOptions());
  const uint64_t idle = shared.Fill(Prompt(1, 300));
  shared.Serve(Prompt(2, 257));
  shared.Fill(Prompt(3, 5 * 128));
  EXPECT_EQ(CountOf(shared, Prompt(1, 300)), 256u);
  EXPECT_EQ(CountOf(shared, Prompt(2, 257)), 0u);
  shared.Fill(Prompt(4, 129));
  EXPECT_EQ(CountOf(shared, Prompt(3, 640)) + CountOf(shared, Prompt(1, 300)), 640u);
  const absl::Status status = shared.Read(idle);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(TextOf(status), HasSubstr("was evicted"));
}

TEST(Eviction, NobodyIsIdleBeforeItsTime) {
  StoreOptions options = PressureOptions();
  for (const absl::Duration idle : {absl::Hours(1), absl::ZeroDuration()}) {
    options.evict_idle_after = idle;
    PressureStore shared(4, options);
    const uint64_t id = shared.Fill(Prompt(1, 300));
    const CreatedSequence other = shared.Create();
    EXPECT_EQ(testing::AppendContent(*shared.store, other.sequence_id, shared.group, 0,
                                     ContentOf(Prompt(2, 257)))
                  .status()
                  .code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(shared.Read(id).ok());
  }
}

TEST(Eviction, LeasedAndWrittenSequencesStay) {
  PressureStore shared(8, IdleOptions());
  ASSERT_TRUE(shared.store->OpenLocalSession("tenant", "session", 1).ok());
  const uint64_t leased = shared.Fill(Prompt(1, 257));
  const auto lease = shared.store->Attach(kTenant, leased, "session", {});
  ASSERT_TRUE(lease.ok()) << lease.status();
  const uint64_t written = shared.Fill(Prompt(2, 257));
  auto ingest = shared.store->BeginIngest(kTenant, written);
  ASSERT_TRUE(ingest.ok());
  const CreatedSequence greedy = shared.Create();
  const auto fill = [&](size_t segments) {
    return testing::AppendContent(*shared.store, greedy.sequence_id, shared.group, 0,
                                  ContentOf(Prompt(3, segments * 128)))
        .status();
  };
  EXPECT_EQ(fill(5).code(), absl::StatusCode::kResourceExhausted);
  for (const uint64_t id : {leased, written}) {
    const absl::Status refused = shared.store->EvictSequence(kAllTenants, id);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(TextOf(refused), HasSubstr(id == leased ? "lease" : "writer"));
  }
  ingest->reset();
  EXPECT_TRUE(fill(5).ok());
  EXPECT_EQ(shared.Read(written).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(shared.store->Detach("session", lease->lease_id).ok());
  EXPECT_TRUE(shared.store->EvictSequence(kAllTenants, leased).ok());
  EXPECT_EQ(shared.Read(leased).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(shared.used_bytes(), 5 * kSegmentBytes);
}

TEST(Eviction, AnEvictedSequenceIsNotRetained) {
  PressureStore shared(8);
  const uint64_t id = shared.Fill(Prompt(1, 400));
  EXPECT_TRUE(shared.store->EvictSequence(kAllTenants, id).ok());
  EXPECT_EQ(shared.used_bytes(), 0u);
  EXPECT_EQ(shared.store->EvictSequence(kAllTenants, id).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(shared.store->EvictSequence(kAllTenants, id + 1).code(), absl::StatusCode::kNotFound);
}

// Two ranks with a kv head each.
TEST(Eviction, RanksLoseTheSameTokens) {
  auto store = *Store::Create(PressureOptions());
  uint64_t cache_ids[2];
  CacheSpec spec = testing::PoolOf(0);
  spec.groups[0].kv_heads = 1;
  spec.groups[0].query_heads = 2;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    spec.capacity_bytes = (rank == 0 ? 4 : 16) * kSegmentBytes / 2;
    spec.rank = {.group = "g", .rank = rank, .rank_count = 2, .kv_head_begin = rank};
    const auto cache = store->OpenCache(kTenant, spec);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_ids[rank] = cache->cache_id;
  }
  const std::vector<uint32_t> prompt = Prompt(1, 385);
  const auto fill = [&](uint64_t cache_id, const std::vector<uint32_t>& ids) {
    const auto made = store->CreateSequence(
        kTenant, cache_id, {.session = "s", .token_ids = ids, .extra_key = {}, .live_index = {}});
    EXPECT_TRUE(made.ok()) << made.status();
    const auto count =
        testing::IngestContent(*store, made->sequence_id, spec.groups[0], 0, ContentOf(ids));
    EXPECT_TRUE(count.ok()) << count.status();
    return made->sequence_id;
  };
  for (const uint64_t cache_id : cache_ids) {
    ASSERT_TRUE(store->DropSequence(kTenant, fill(cache_id, prompt)).ok());
  }
  EXPECT_EQ(*store->MatchPrefix(kTenant, cache_ids[1], prompt, ""), 384u);
  fill(cache_ids[0], Prompt(2, 3 * 128));
  EXPECT_EQ(*store->MatchPrefix(kTenant, cache_ids[1], prompt, ""), 128u);
  const auto others = store->ListSequences("", cache_ids[1]);
  ASSERT_THAT(*others, SizeIs(1));
  EXPECT_EQ(others->front().token_count, 128u);
}

// A killed process leaves what is retained to the next one. Its extents are free when nobody of the old
// one's clients can read them any more, and until then nothing is evicted for their sake.
TEST(Eviction, RecoveredSequencesAreFoundAndEvicted) {
  testing::MemoryKeeper keeper;
  StoreOptions options = PressureOptions();
  options.keeper = &keeper;
  std::optional<PressureStore> shared(std::in_place, 8, options);
  shared->Serve(Prompt(1, 513));
  const uint64_t id = shared->Retained().front().sequence_id;
  shared.emplace(8, options);
  ASSERT_THAT(shared->Retained(), SizeIs(1));
  EXPECT_EQ(shared->Retained().front().sequence_id, id);
  EXPECT_EQ(CountOf(*shared, Prompt(1, 513)), 512u);
  const CreatedSequence greedy = shared->Create();
  const auto fill = [&] {
    return testing::AppendContent(*shared->store, greedy.sequence_id, shared->group, 0,
                                  ContentOf(Prompt(2, 6 * 128)))
        .status();
  };
  EXPECT_EQ(fill().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CountOf(*shared, Prompt(1, 513)), 512u);
  // The thread of the checksums holds extents while it reads them; a fill would evict more for it.
  EXPECT_TRUE(shared->store->WaitIdle(SteadyTime::Now() + absl::Seconds(60)));
  shared->store->EndQuarantine();
  EXPECT_TRUE(fill().ok());
  EXPECT_EQ(CountOf(*shared, Prompt(1, 513)), 256u);
  // What is left of it is recovered again.
  const Content kept = [] {
    Content content = ContentOf(Prompt(1, 513));
    content.resize(256);
    return content;
  }();
  shared.emplace(8, options);
  EXPECT_EQ(shared->store->Recovery().dropped_records, 0u);
  const CreatedSequence again = shared->Create(Prompt(1, 513));
  EXPECT_EQ(again.token_count, 256u);
  ExpectContent(*shared->store, again.sequence_id, shared->group, kept);
}

TEST(EvictedIds, ForgetsTheOldestFirst) {
  EvictedIds ids;
  for (uint64_t id = 0; id <= EvictedIds::kMaxIds; ++id) {
    ids.Add(id, "a");
    ids.Add(id, "a");
  }
  EXPECT_FALSE(ids.Contains(0, "a"));
  EXPECT_TRUE(ids.Contains(1, "a"));
  EXPECT_TRUE(ids.Contains(EvictedIds::kMaxIds, "a"));
}

TEST(EvictedIds, AreKnownToTheirTenantOnly) {
  EvictedIds ids;
  ids.Add(1, "a");
  EXPECT_TRUE(ids.Contains(1, "a"));
  EXPECT_TRUE(ids.Contains(1, kAllTenants));
  EXPECT_FALSE(ids.Contains(1, "b"));
}

}  // namespace
}  // namespace pqcached::kvstore
