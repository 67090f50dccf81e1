#include "kvstore/store/lifecycle.h"

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/kvstore/evict/pressure_fixture.h"
#include "tests/kvstore/memory_keeper.h"
#include "tests/kvstore/store_parts.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::SmallOptions;
using testing::StoreParts;

StoreOptions With(bool retain, uint32_t max_sequences = 100) {
  StoreOptions options = SmallOptions();
  options.retain = retain;
  options.max_sequences = max_sequences;
  return options;
}

TEST(Lifecycle, ASequenceStartsWithTheStoredPrefixOfItsPrompt) {
  StoreParts parts(With(/*retain=*/false));
  const uint64_t first = parts.Make("one", 300);
  std::vector<uint32_t> ids(400);
  for (uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const auto second = parts.lifecycle.Create(parts.cache, {.session = "two", .token_ids = ids});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->token_count, 300 / kPrefixStepTokens * kPrefixStepTokens);
  EXPECT_EQ(parts.prefixes.matched_tokens(), second->token_count);
  EXPECT_NE(second->sequence_id, first);
}

TEST(Lifecycle, AForkBeyondTheEndIsRefused) {
  StoreParts parts(With(/*retain=*/false));
  const auto parent = parts.sequences.FindInAnyTenant(parts.Make("one", 256));
  const absl::Status refused = parts.lifecycle.Fork(*parent, 257, "two").status();
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(FieldOf(refused), "token_count");
  const auto fork = parts.lifecycle.Fork(*parent, 0, "two");
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ(fork->token_count, 256u);
}

TEST(Lifecycle, AnEndedSequenceFreesItsMemory) {
  StoreParts parts(With(/*retain=*/false));
  parts.End(parts.Make("one", 256));
  EXPECT_TRUE(parts.sequences.All().empty());
  EXPECT_EQ(parts.cache->pool->usage().used_bytes, 0u);
}

TEST(Lifecycle, TokensThatAreRetainedHaveANewIdAndReplaceTheirBeginnings) {
  StoreParts parts(With(/*retain=*/true));
  const uint64_t shorter = parts.Make("one", 256);
  parts.End(shorter);
  EXPECT_EQ(parts.sequences.Find(testing::kTenant, shorter).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(parts.sequences.RetainedOfCache(parts.cache->cache_id).size(), 1u);
  parts.End(parts.Make("two", 512));
  const auto retained = parts.sequences.RetainedOfCache(parts.cache->cache_id);
  ASSERT_EQ(retained.size(), 1u);
  EXPECT_EQ((*retained[0].sequence->Peek())->token_count(), 512u);  // the active segment included
}

// An import adds such a sequence: no other one has tokens without names.
TEST(Lifecycle, ASequenceWithoutNamesStaysWhenAnotherIsRetained) {
  StoreParts parts(With(/*retain=*/true));
  const auto source = parts.sequences.FindInAnyTenant(parts.Make("one", 200));
  ASSERT_TRUE(source.ok()) << source.status();
  const auto shared = source->names->Share(200, /*partial_indexes=*/false);
  ASSERT_TRUE(shared.ok()) << shared.status();
  const auto added =
      parts.lifecycle.AddPrefix(parts.cache, shared->snapshot, source->names->root(), NameView());
  ASSERT_TRUE(added.ok()) << added.status();
  parts.End(source->sequence->sequence_id());
  EXPECT_TRUE(parts.sequences.FindInAnyTenant(added->sequence_id).ok());
}

TEST(Lifecycle, ARetainedSequenceMakesRoomForANewOne) {
  StoreParts parts(With(/*retain=*/true, /*max_sequences=*/1));
  parts.End(parts.Make("one", 256));
  ASSERT_EQ(parts.sequences.RetainedOfCache(parts.cache->cache_id).size(), 1u);
  ASSERT_TRUE(parts.lifecycle.Create(parts.cache, {.session = "two"}).ok());
  const absl::Status full = parts.lifecycle.Create(parts.cache, {.session = "two"}).status();
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(FieldOf(full), "max_sequences");
}

TEST(Lifecycle, ARefusedSequenceLeavesNothing) {
  StoreParts parts(With(/*retain=*/false));
  const std::string too_long(257, 'x');
  EXPECT_FALSE(parts.lifecycle.Create(parts.cache, {.session = "one", .extra_key = too_long}).ok());
  EXPECT_FALSE(parts.lifecycle.Create(parts.cache, {.session = "one", .group_key = "key"}).ok());
  EXPECT_EQ(parts.sequences.CountOfCache(parts.cache->cache_id), 0u);
}

TEST(Lifecycle, SequencesOfManyThreadsAreRetainedOnce) {
  StoreParts parts(With(/*retain=*/true));
  std::vector<uint64_t> made(4);
  for (uint64_t& id : made) id = parts.Make("one", 256);
  std::vector<std::thread> threads;
  for (const uint64_t id : made) threads.emplace_back([&parts, id] { parts.End(id); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(parts.sequences.RetainedOfCache(parts.cache->cache_id).size(), 1u);
  EXPECT_EQ(parts.sequences.CountOfCache(parts.cache->cache_id), 1u);
}

TEST(Lifecycle, ASequenceSaysWhetherItsTokensRemain) {
  for (const bool by_option : {false, true}) {
    for (const Retention choice : {Retention::kByOption, Retention::kAlways, Retention::kNever}) {
      SCOPED_TRACE(::testing::Message() << by_option << static_cast<uint32_t>(choice));
      testing::MemoryKeeper keeper;
      StoreOptions options = testing::PressureOptions();
      options.retain = by_option;
      options.keeper = &keeper;
      std::optional<testing::PressureStore> shared(std::in_place, 64, options);
      const auto fill = [&](uint32_t family, const std::string& session) {
        const std::vector<uint32_t> prompt = testing::Prompt(family, 300);
        const auto created = shared->store->CreateSequence(
            testing::kTenant, shared->cache_id,
            {.session = session, .token_ids = prompt, .retention = choice});
        EXPECT_TRUE(created.ok()) << created.status();
        EXPECT_TRUE(testing::IngestContent(*shared->store, created->sequence_id, shared->group, 0,
                                           testing::ContentOf(prompt))
                        .ok());
        return created->sequence_id;
      };
      const uint64_t dropped = fill(1, "a"), parent = fill(2, "a"), recovered = fill(3, "a");
      fill(4, "b");
      const auto fork = shared->store->ForkSequence(testing::kTenant, parent, 0, "a");
      ASSERT_TRUE(fork.ok()) << fork.status();
      shared->Drop(dropped);
      shared->Drop(parent);
      shared->Drop(fork->sequence_id);
      EXPECT_EQ(shared->store->DropSession("b"), 1u);
      const bool remains =
          choice == Retention::kByOption ? by_option : choice == Retention::kAlways;
      EXPECT_EQ(shared->Retained().size(), remains ? 3u : 0u);
      shared.emplace(64, options);
      shared->Drop(recovered);
      EXPECT_EQ(shared->Retained().size(), remains ? 4u : 0u);
    }
  }
}

}  // namespace
}  // namespace pqcached::kvstore
