// Sequences of ranks that are one sequence of their group.
#include "kvstore/share/rank_sequences.h"

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "kvstore/records/record_bytes.h"
#include "kvstore/sequence/sequence_record.h"
#include "tests/kvstore/cache_parts.h"
#include "tests/kvstore/evict/pressure_fixture.h"
#include "tests/kvstore/memory_keeper.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::IngestContent;
using testing::kTenant;
using testing::Prompt;

// Of a rank: a segment of 128 tokens, two layers, one kv head.
constexpr size_t kRankSegmentBytes = testing::kSegmentBytes / 2;

StoreOptions Options() {
  StoreOptions options = testing::SmallOptions();
  options.evict_idle_after = absl::Nanoseconds(1);
  return options;
}

class RankSequencesTest : public ::testing::Test {
 protected:
  explicit RankSequencesTest(const StoreOptions& options = Options()) { Restart(options); }

  // As after a kill, where the options name a keeper.
  void Restart(const StoreOptions& options) {
    store_.reset();
    store_ = *Store::Create(options);
    for (uint32_t rank = 0; rank < 2; ++rank) Open(rank);
  }
  void Open(uint32_t rank) {
    const auto cache = store_->OpenCache(kTenant, Spec(rank));
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_ids_[rank] = cache->cache_id;
  }
  static CacheSpec Spec(uint32_t rank) {
    CacheSpec spec = testing::PoolOf(0);
    spec.groups[0].kv_heads = 1;
    spec.groups[0].query_heads = 2;
    spec.capacity_bytes = (rank == 0 ? 8 : 32) * kRankSegmentBytes;
    spec.rank = {.group = "group", .rank = rank, .rank_count = 2, .kv_head_begin = rank};
    return spec;
  }

  absl::StatusOr<CreatedSequence> TryCreate(uint32_t rank, const std::string& key,
                                            const std::vector<uint32_t>& ids,
                                            const std::string& extra_key = "") {
    return store_->CreateSequence(kTenant, cache_ids_[rank],
                                  {.session = "session " + std::to_string(rank),
                                   .token_ids = ids,
                                   .extra_key = extra_key,
                                   .group_key = key});
  }
  CreatedSequence Create(uint32_t rank, const std::string& key, const std::vector<uint32_t>& ids) {
    const auto created = TryCreate(rank, key, ids);
    EXPECT_TRUE(created.ok()) << created.status();
    return created.ok() ? *created : CreatedSequence{};
  }
  // A sequence of the rank that holds the prompt.
  uint64_t Fill(uint32_t rank, const std::string& key, const std::vector<uint32_t>& ids) {
    const CreatedSequence created = Create(rank, key, ids);
    const Content content = ContentOf(ids);
    if (created.token_count == content.size()) return created.sequence_id;
    const auto count = IngestContent(*store_, created.sequence_id, group(), created.token_count,
                                     std::span(content).subspan(created.token_count));
    EXPECT_TRUE(count.ok()) << count.status();
    return created.sequence_id;
  }
  // In rank 0's pool, of as many segments; who is idle makes room.
  absl::Status Press(size_t segments) {
    const CreatedSequence greedy = Create(0, "", {});
    const absl::Status status =
        AppendContent(*store_, greedy.sequence_id, group(), 0, ContentOf(Prompt(9, segments * 128)))
            .status();
    Drop(greedy.sequence_id);
    return status;
  }
  void Drop(uint64_t id) { EXPECT_TRUE(store_->DropSequence(kTenant, id).ok()); }
  absl::Status Read(uint64_t id) { return store_->DescribeSequence(kTenant, id).status(); }
  size_t used_bytes(uint32_t rank) { return store_->ListCaches("")[rank].used_bytes; }
  const LayerGroup& group() { return group_; }
  void ExpectRefused(const absl::Status& status, StatusCode code, const std::string& field,
                     const std::string& text = "") {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_THAT(TextOf(status), ::testing::HasSubstr(text));
  }

  const LayerGroup group_ = Spec(0).groups[0];
  std::unique_ptr<Store> store_;
  uint64_t cache_ids_[2] = {};
};

TEST_F(RankSequencesTest, AllRanksAreToldTheSameWhateverBecomesOfOthers) {
  const std::vector<uint32_t> ids = Prompt(1, 512);
  const Content content = ContentOf(ids);
  const std::function<absl::Status(uint64_t)> changes[] = {
      [&](uint64_t id) { return store_->DropSequence(kTenant, id); },
      [&](uint64_t id) { return store_->EvictSequence(kAllTenants, id); },
      [&](uint64_t id) { return store_->TruncateSequence(kTenant, id, 100).status(); },
  };
  for (const auto& change : changes) {
    const uint64_t holders[] = {Fill(0, "", ids), Fill(1, "", ids)};
    const CreatedSequence first = Create(0, "key", ids);
    EXPECT_EQ(first.token_count, 512u);
    ASSERT_TRUE(change(holders[1]).ok());
    EXPECT_EQ(*store_->MatchPrefix(kTenant, cache_ids_[1], ids, ""), 0u);
    const CreatedSequence second = Create(1, "key", ids);
    EXPECT_EQ(second.token_count, 512u);
    for (const uint64_t id : {first.sequence_id, second.sequence_id}) {
      ExpectContent(*store_, id, group(), content);
      EXPECT_EQ(store_->DescribeSequence(kTenant, id)->group_key, "key");
    }
    for (const char* session : {"session 0", "session 1"}) store_->DropSession(session);
    EXPECT_EQ(used_bytes(0), 0u);
    EXPECT_EQ(used_bytes(1), 0u);
  }
}

TEST_F(RankSequencesTest, WhatIsStoredBetweenTheCallsCountsForNone) {
  const std::vector<uint32_t> ids = Prompt(1, 512);
  const Content content = ContentOf(ids);
  const std::vector<uint32_t> beginning(ids.begin(), ids.begin() + 300);
  Fill(0, "", ids);
  Fill(1, "", beginning);
  EXPECT_EQ(Create(0, "key", ids).token_count, 256u);  // the least over the ranks
  Fill(1, "", ids);
  EXPECT_EQ(*store_->MatchPrefix(kTenant, cache_ids_[0], ids, ""), 512u);
  const CreatedSequence second = Create(1, "key", ids);
  EXPECT_EQ(second.token_count, 256u);
  EXPECT_EQ(Create(1, "another", ids).token_count, 512u);
  // What differs between the two is written behind what they share.
  ASSERT_TRUE(
      IngestContent(*store_, second.sequence_id, group(), 256, std::span(content).subspan(256))
          .ok());
  ExpectContent(*store_, second.sequence_id, group(), content);
}

TEST_F(RankSequencesTest, ARankThatIsNotOpenHoldsNothing) {
  store_ = *Store::Create(Options());
  Open(0);
  const std::vector<uint32_t> ids = Prompt(1, 256);
  Fill(0, "", ids);
  EXPECT_EQ(Create(0, "key", ids).token_count, 0u);
  Open(1);
  Fill(1, "", ids);
  EXPECT_EQ(Create(1, "key", ids).token_count, 0u);
  EXPECT_EQ(Create(1, "other", ids).token_count, 256u);
}

TEST_F(RankSequencesTest, KeysOfOtherGroupsTenantsAndCachesAreOthers) {
  const std::vector<uint32_t> ids = Prompt(1, 128);
  Create(0, "key", ids);
  CacheSpec spec = Spec(0);
  spec.name = "other";
  for (const char* tenant : {kTenant, "tenant"}) {
    const auto cache = store_->OpenCache(tenant, spec);
    ASSERT_TRUE(cache.ok()) << cache.status();
    EXPECT_TRUE(store_
                    ->CreateSequence(tenant, cache->cache_id,
                                     {.session = "s", .token_ids = {}, .group_key = "key"})
                    .ok());
  }
  EXPECT_TRUE(TryCreate(1, "key", ids).ok());
}

TEST_F(RankSequencesTest, WrongCallsAreRefusedAndChangeNothing) {
  const std::vector<uint32_t> ids = Prompt(1, 256);
  Fill(0, "", ids);
  const uint64_t holder = Fill(1, "", ids);
  const CreatedSequence first = Create(0, std::string(kMaxGroupKeyBytes, 'k'), ids);
  const std::string key(kMaxGroupKeyBytes, 'k');
  const std::string before = testing::Dump(*store_);
  ExpectRefused(TryCreate(1, key + "k", ids).status(), StatusCode::kInvalidArgument, "group_key");
  ExpectRefused(TryCreate(1, key, Prompt(2, 256)).status(), StatusCode::kFailedPrecondition,
                "group_key");
  ExpectRefused(TryCreate(1, key, Prompt(1, 255)).status(), StatusCode::kFailedPrecondition,
                "group_key");
  ExpectRefused(TryCreate(1, key, ids, "image").status(), StatusCode::kFailedPrecondition,
                "group_key");
  ExpectRefused(TryCreate(0, key, ids).status(), StatusCode::kAlreadyExists, "group_key",
                "has sequence " + std::to_string(first.sequence_id));
  EXPECT_EQ(testing::Dump(*store_), before);
  Drop(holder);
  const CreatedSequence second = Create(1, key, ids);
  EXPECT_EQ(second.token_count, 256u);
  Drop(first.sequence_id);
  ExpectRefused(TryCreate(0, key, ids).status(), StatusCode::kAlreadyExists, "group_key",
                "had sequence " + std::to_string(first.sequence_id));
  const auto alone = store_->OpenCache(kTenant, testing::SmallSpec("alone"));
  ASSERT_TRUE(alone.ok());
  ExpectRefused(store_
                    ->CreateSequence(kTenant, alone->cache_id,
                                     {.session = "s", .token_ids = {}, .group_key = "key"})
                    .status(),
                StatusCode::kInvalidArgument, "group_key");
}

TEST_F(RankSequencesTest, WhatIsHeldGoesWithTheLastMember) {
  const std::vector<uint32_t> ids = Prompt(1, 256);
  const std::function<absl::Status(uint64_t)> ends[] = {
      [&](uint64_t id) { return store_->DropSequence(kTenant, id); },
      [&](uint64_t id) { return store_->EvictSequence(kAllTenants, id); },
      [&](uint64_t) {
        return store_->DropSession("session 0") == 1 ? absl::OkStatus()
                                                     : absl::InternalError("session");
      },
  };
  for (const auto& end : ends) {
    const uint64_t holders[] = {Fill(0, "", ids), Fill(1, "", ids)};
    const CreatedSequence first = Create(0, "key", ids);
    for (const uint64_t id : holders) Drop(id);
    EXPECT_EQ(used_bytes(0), 2 * kRankSegmentBytes);
    EXPECT_EQ(used_bytes(1), 2 * kRankSegmentBytes);
    ASSERT_TRUE(end(first.sequence_id).ok());
    EXPECT_EQ(used_bytes(0), 0u);
    EXPECT_EQ(used_bytes(1), 0u);
    // The key is free, for any prompt.
    const CreatedSequence again = Create(1, "key", Prompt(2, 10));
    const CreatedSequence other = Create(0, "key", Prompt(2, 10));
    Drop(again.sequence_id);
    EXPECT_FALSE(TryCreate(1, "key", ids).ok());
    Drop(other.sequence_id);
  }
}

TEST_F(RankSequencesTest, ARetainedMemberIsTiedToNone) {
  StoreOptions options = Options();
  options.retain = true;
  options.max_retained_share = 1;
  Restart(options);
  const std::vector<uint32_t> ids = Prompt(1, 257);
  const uint64_t members[] = {Fill(0, "key", ids), Fill(1, "key", ids)};
  for (const uint64_t id : members) Drop(id);
  for (const uint64_t cache_id : cache_ids_) {
    const auto retained = store_->ListSequences("", cache_id);
    ASSERT_EQ(retained->size(), 1u);
    EXPECT_EQ(retained->front().group_key, "");
  }
  EXPECT_EQ(Create(0, "key", ids).token_count, 256u);
  EXPECT_EQ(Create(1, "key", ids).token_count, 256u);
}

TEST_F(RankSequencesTest, ACallThatFailedMayBeRepeated) {
  StoreOptions options = Options();
  options.max_sequences = 2;
  Restart(options);
  const std::vector<uint32_t> ids = Prompt(1, 256);
  uint64_t holders[] = {Fill(0, "", ids), Fill(1, "", ids)};
  const uint64_t full[] = {Create(0, "", {}).sequence_id, Create(1, "", {}).sequence_id};
  // Of the first rank: nothing is left of it.
  const std::string before = testing::Dump(*store_);
  ExpectRefused(TryCreate(0, "key", ids).status(), StatusCode::kResourceExhausted, "max_sequences");
  EXPECT_EQ(testing::Dump(*store_), before);
  Drop(holders[1]);
  EXPECT_EQ(used_bytes(1), 0u);
  holders[1] = Fill(1, "", ids);
  Drop(full[0]);
  const CreatedSequence first = Create(0, "key", ids);
  EXPECT_EQ(first.token_count, 256u);
  // Of a later one: what is held stays.
  ExpectRefused(TryCreate(1, "key", ids).status(), StatusCode::kResourceExhausted, "max_sequences");
  Drop(holders[1]);
  const CreatedSequence second = Create(1, "key", ids);
  EXPECT_EQ(second.token_count, 256u);
  ExpectContent(*store_, second.sequence_id, group(), ContentOf(ids));
  for (const uint64_t id : {holders[0], full[1], first.sequence_id, second.sequence_id}) Drop(id);
  EXPECT_EQ(used_bytes(0) + used_bytes(1), 0u);
}

TEST_F(RankSequencesTest, IdleMembersGoTogether) {
  const uint64_t members[] = {Fill(0, "key", Prompt(1, 384)), Fill(1, "key", Prompt(1, 384))};
  ASSERT_TRUE(Press(7).ok());
  for (const uint64_t id : members) {
    ExpectRefused(Read(id), StatusCode::kNotFound, "sequence_id", "was evicted");
  }
  EXPECT_EQ(used_bytes(0) + used_bytes(1), 0u);
  EXPECT_EQ(store_->Stats(kAllTenants).evicted_sequences, 2u);
  Create(1, "key", Prompt(2, 10));  // which is free again
}

TEST_F(RankSequencesTest, SequencesOfRanksWithoutAKeyStay) {
  const uint64_t id = Fill(0, "", Prompt(1, 384));
  EXPECT_EQ(Press(7).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(Read(id).ok());
}

TEST_F(RankSequencesTest, NoneGoesWhileOneIsHeld) {
  const uint64_t members[] = {Fill(0, "key", Prompt(1, 384)), Fill(1, "key", Prompt(1, 384))};
  const std::string name = "sequence " + std::to_string(members[1]);
  const auto expect_stay = [&](const std::string& why) {
    EXPECT_EQ(Press(7).code(), StatusCode::kResourceExhausted);
    for (const uint64_t id : members) {
      ExpectRefused(store_->EvictSequence(kAllTenants, id), StatusCode::kFailedPrecondition,
                    "sequence_id", name);
      ExpectRefused(store_->EvictSequence(kAllTenants, id), StatusCode::kFailedPrecondition,
                    "sequence_id", why);
      EXPECT_TRUE(Read(id).ok());
    }
  };
  ASSERT_TRUE(store_->OpenLocalSession("tenant", "session 1", 1).ok());
  const auto lease = store_->Attach(kTenant, members[1], "session 1", {});
  ASSERT_TRUE(lease.ok()) << lease.status();
  expect_stay("lease");
  ASSERT_TRUE(store_->Detach("session 1", lease->lease_id).ok());
  auto ingest = store_->BeginIngest(kTenant, members[1]);
  ASSERT_TRUE(ingest.ok());
  expect_stay("a writer or a build holds it");
  ingest->reset();
  ASSERT_TRUE(store_->PinSequence(kTenant, members[1], absl::Hours(1)).ok());
  EXPECT_EQ(Press(7).code(), StatusCode::kResourceExhausted);
  for (const uint64_t id : members) {
    ExpectRefused(store_->EvictSequence(kAllTenants, id), StatusCode::kFailedPrecondition,
                  "sequence_id", "pinned");
  }
  ASSERT_TRUE(store_->PinSequence(kTenant, members[0], absl::ZeroDuration()).ok());
  EXPECT_TRUE(Press(7).ok());
  for (const uint64_t id : members) EXPECT_EQ(Read(id).code(), StatusCode::kNotFound);
}

TEST_F(RankSequencesTest, NoneGoesWhileOneIsInUse) {
  StoreOptions options = Options();
  options.evict_idle_after = absl::Seconds(1);
  Restart(options);
  const uint64_t members[] = {Fill(0, "key", Prompt(1, 384)), Fill(1, "key", Prompt(1, 384))};
  while (store_->ListSequences("", cache_ids_[0])->front().idle < absl::Milliseconds(1100)) {
    ASSERT_TRUE(store_->ResumeSequence(kTenant, members[1]).ok());  // a use
    std::this_thread::yield();
  }
  EXPECT_EQ(Press(7).code(), StatusCode::kResourceExhausted);
  for (const uint64_t id : members) EXPECT_TRUE(Read(id).ok());
}

TEST_F(RankSequencesTest, AdminEvictsAllOfThem) {
  const uint64_t members[] = {Fill(0, "key", Prompt(1, 384)), Fill(1, "key", Prompt(1, 384))};
  const auto fork = store_->ForkSequence(kTenant, members[0], 0, "session 0");
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(store_->DescribeSequence(kTenant, fork->sequence_id)->group_key, "");
  ASSERT_TRUE(store_->EvictSequence(kAllTenants, members[1]).ok());
  for (const uint64_t id : members) {
    ExpectRefused(Read(id), StatusCode::kNotFound, "sequence_id", "was evicted");
  }
  ExpectContent(*store_, fork->sequence_id, group(), ContentOf(Prompt(1, 384)));
}

TEST_F(RankSequencesTest, APinKeepsAllOfThem) {
  // Without names, so that only the key tells.
  const uint64_t members[] = {Create(0, "key", {}).sequence_id, Create(1, "key", {}).sequence_id};
  const uint64_t other = Create(1, "other", {}).sequence_id;
  const auto pin_left = [&](uint64_t id) {
    return store_->DescribeSequence(kTenant, id)->pin_left;
  };
  ASSERT_TRUE(store_->PinSequence(kTenant, members[1], absl::Hours(1)).ok());
  for (const uint64_t id : members) EXPECT_GT(pin_left(id), absl::Minutes(50));
  EXPECT_EQ(pin_left(other), absl::ZeroDuration());
  ASSERT_TRUE(store_->PinSequence(kTenant, members[0], absl::ZeroDuration()).ok());
  for (const uint64_t id : members) EXPECT_EQ(pin_left(id), absl::ZeroDuration());
}

TEST_F(RankSequencesTest, KeysOutliveTheProcessAndWhatIsHeldDoesNot) {
  testing::MemoryKeeper keeper;
  StoreOptions options = Options();
  options.keeper = &keeper;
  Restart(options);
  const std::vector<uint32_t> ids = Prompt(1, 384);
  const uint64_t members[] = {Fill(0, "key", ids), Fill(1, "key", ids)};
  const uint64_t alone = Fill(0, "half", ids);
  for (int restart = 0; restart < 2; ++restart) {
    Restart(options);
    EXPECT_EQ(store_->Recovery().dropped_records, 0u);
    for (const uint64_t id : members) {
      EXPECT_EQ(store_->DescribeSequence(kTenant, id)->group_key, "key");
    }
    const std::string before = testing::Dump(*store_);
    ExpectRefused(TryCreate(1, "key", ids).status(), StatusCode::kAlreadyExists, "group_key");
    ExpectRefused(TryCreate(1, "half", ids).status(), StatusCode::kFailedPrecondition, "group_key");
    EXPECT_EQ(testing::Dump(*store_), before);
  }
  Drop(alone);
  const CreatedSequence anew = Create(1, "half", ids);
  EXPECT_EQ(anew.token_count, 384u);
  Drop(anew.sequence_id);  // and with it what was held for rank 0
  store_->EndQuarantine();
  auto ingest = store_->BeginIngest(kTenant, members[1]);
  EXPECT_EQ(Press(7).code(), StatusCode::kResourceExhausted);
  ingest->reset();
  ASSERT_TRUE(Press(7).ok());
  for (const uint64_t id : members) EXPECT_EQ(Read(id).code(), StatusCode::kNotFound);
  store_->DropSession("session 1");
  // The checksums' thread may hold what was dropped as long as it is looking at it.
  for (int i = 0; i < 10000 && used_bytes(0) + used_bytes(1) > 0; ++i) std::this_thread::yield();
  EXPECT_EQ(used_bytes(0) + used_bytes(1), 0u);
  store_.reset();  // before the keeper
}

TEST_F(RankSequencesTest, RanksAgreeWhileWhatTheyHoldChanges) {
  const std::vector<uint32_t> ids = Prompt(1, 512);
  const uint64_t holders[] = {Fill(0, "", ids), Fill(1, "", ids)};
  std::atomic<bool> stop = false;
  std::thread changer([&] {
    const Content content = ContentOf(ids);
    while (!stop) {
      for (const uint64_t id : holders) {
        EXPECT_TRUE(store_->TruncateSequence(kTenant, id, 384).ok());
        EXPECT_TRUE(store_->NameTokens(kTenant, id, 384, std::span(ids).subspan(384)).ok());
        const auto rest = std::span(content).subspan(384);
        EXPECT_TRUE(AppendContent(*store_, id, group(), 384, rest).ok());
      }
    }
  });
  std::set<uint64_t> told;
  for (uint32_t round = 0; round < 3000; ++round) {
    const CreatedSequence first = Create(round % 2, "key", ids);
    const CreatedSequence second = Create(1 - round % 2, "key", ids);
    EXPECT_EQ(first.token_count, second.token_count) << round;
    told.insert(first.token_count);
    Drop(first.sequence_id);
    Drop(second.sequence_id);
  }
  stop = true;
  changer.join();
  for (const uint64_t count : told) EXPECT_TRUE(count == 384 || count == 512) << count;
  for (const char* session : {"session 0", "session 1"}) store_->DropSession(session);
  EXPECT_EQ(used_bytes(0) + used_bytes(1), 0u);
}

// Without a store: caches that have no memory, and what happens while another rank settles.
class Seats : public ::testing::Test {
 protected:
  Cache CacheOf(uint32_t rank) {
    CacheSpec spec = testing::SmallSpec();
    spec.rank = {.group = "group", .rank = rank, .rank_count = 2, .kv_head_begin = 2 * rank};
    return {rank, kTenant, spec, nullptr, parts_.shared()};
  }
  static std::shared_ptr<Sequence> Member(uint64_t id) {
    return std::make_shared<Sequence>(id, "session",
                                      Sequence::Start{.first = CompleteSnapshot({}, {0, 0}),
                                                      .record = nullptr,
                                                      .views = {},
                                                      .group_key = "key"});
  }
  static RankPrefixes Shared() {
    return {{0, CompleteSnapshot({}, {0, 0})}, {1, CompleteSnapshot({}, {0, 0})}};
  }
  absl::StatusOr<RankSequences::Seat> Take(uint32_t rank,
                                           const std::function<RankPrefixes()>& settle) {
    return sequences_.AcquireSeat(caches_[rank], "key", PromptDigest({}, ""), settle);
  }

  testing::CacheParts parts_{testing::SmallOptions(), 1};
  const Cache caches_[2] = {CacheOf(0), CacheOf(1)};
  RankSequences sequences_;
};

TEST_F(Seats, TheFirstToHaveSettledDecides) {
  const RankPrefixes first = Shared();
  const auto member = Member(7);
  const auto late = Take(0, [&] {
    auto seat = Take(1, [&] { return first; });
    EXPECT_EQ(seat->first(), first.at(1));
    EXPECT_EQ(Take(1, Shared).status().code(), StatusCode::kAlreadyExists);
    seat->Join(member);
    return Shared();
  });
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->first(), first.at(0));
}

TEST_F(Seats, NobodyIsEvictedWhileARankJoins) {
  const std::shared_ptr<Sequence> members[] = {Member(7), Member(8)};
  Take(0, Shared)->Join(members[0]);
  {
    auto seat = Take(1, Shared);
    ASSERT_TRUE(seat.ok());
    EXPECT_TRUE(sequences_.MembersOf(caches_[0], members[0]).joining);
    EXPECT_EQ(sequences_.Claim(caches_[0], members[0]).status().code(),
              StatusCode::kFailedPrecondition);
    seat->Join(members[1]);
  }
  EXPECT_EQ(sequences_.MembersOf(caches_[1], members[1]).alive.size(), 2u);
  EXPECT_EQ(sequences_.Claim(caches_[1], members[1])->size(), 2u);
  for (const auto& member : members) EXPECT_TRUE(member->holds().claimed());
}

TEST_F(Seats, AnEndedMemberTakesNobodyOfItsKeyAlong) {
  const auto old = Member(7);
  const auto next = Member(8);
  Take(0, Shared)->Join(old);
  old->Drop();
  sequences_.Ended(caches_[0], *old);
  Take(0, Shared)->Join(next);
  EXPECT_EQ(sequences_.MembersOf(caches_[0], old).alive.size(), 1u);
  EXPECT_TRUE(sequences_.Claim(caches_[0], old).ok());
  EXPECT_FALSE(next->holds().claimed());
  EXPECT_EQ(Take(0, Shared).status().code(), StatusCode::kAlreadyExists);
}

TEST(Holds, WhoWantsToHoldWaitsForTheEvictorsDecision) {
  for (const bool claimed : {false, true}) {
    Holds holds;
    ASSERT_TRUE(holds.Reserve());
    EXPECT_FALSE(holds.held());
    EXPECT_FALSE(holds.Claim());
    std::atomic<bool> begun = false;
    std::atomic<bool> told = false;
    std::thread taker([&] {
      begun = true;
      EXPECT_NE(holds.Acquire(), claimed);
      told = true;
    });
    while (!begun) std::this_thread::yield();
    for (int i = 0; i < 10'000; ++i) {
      std::this_thread::yield();
      ASSERT_FALSE(told);
    }
    holds.Decide(claimed);
    taker.join();
    EXPECT_EQ(holds.claimed(), claimed);
    EXPECT_EQ(holds.held(), !claimed);
    EXPECT_FALSE(holds.Reserve());
  }
}

TEST(Holds, WhatIsPinnedIsNotReserved) {
  Holds holds;
  holds.PinUntil(BootNanos() + 1'000'000'000'000);
  EXPECT_FALSE(holds.Reserve());
  EXPECT_FALSE(holds.Claim());
  ASSERT_TRUE(holds.Acquire());
  holds.Release();
  holds.PinUntil(0);
  EXPECT_TRUE(holds.Claim());
}

TEST(SequenceIdentity, OlderRecordsHaveNoGroupKey) {
  const auto read = [](const std::string& group_key, bool rest,
                       std::optional<uint32_t> retention = {}) {
    std::vector<std::byte> bytes(480);
    RecordWriter writer(bytes);
    writer.Add(uint64_t{7});
    writer.AddText("session");
    writer.Add(PrefixKey{});
    writer.Add(uint32_t{0});
    writer.Add(IndexDescriptor{});
    writer.Add(uint32_t{0});
    writer.Add(uint64_t{0});
    writer.Add(uint32_t{0});
    writer.Add(uint32_t{0});
    if (!group_key.empty() || retention) writer.AddText(group_key);
    if (retention) writer.Add(*retention);
    if (rest) writer.Add(uint8_t{1});
    return ReadIdentity(std::span(bytes).first(writer.size_bytes()));
  };
  EXPECT_EQ(read("", false)->group_key, "");
  EXPECT_EQ(read(std::string("a\0b", 3), false)->group_key, std::string("a\0b", 3));
  EXPECT_EQ(read("key", false)->retention, Retention::kByOption);
  EXPECT_EQ(read("key", false, 1)->retention, Retention::kAlways);
  EXPECT_EQ(read("", false, 2)->retention, Retention::kNever);
  EXPECT_FALSE(read("", false, 3).has_value());
  EXPECT_FALSE(read("key", true, 1).has_value());
  EXPECT_FALSE(read("key", true).has_value());
  EXPECT_FALSE(read("", true).has_value());
  EXPECT_FALSE(read(std::string(kMaxGroupKeyBytes + 1, 'k'), false).has_value());
}

}  // namespace
}  // namespace pqcached::kvstore
