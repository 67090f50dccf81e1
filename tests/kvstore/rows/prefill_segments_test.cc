// The segments of a prefill have the slots that its announced tokens need.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kvstore/evict/pressure_fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::Content;
using testing::ContentOf;
using ::testing::ElementsAre;
using testing::ExpectContent;
using testing::IngestContent;
using testing::kTenant;
using testing::PressureOptions;
using testing::PressureStore;
using testing::Prompt;

StoreOptions Options() {
  StoreOptions options = PressureOptions();
  options.segment_tokens = 1024;
  options.tail_tokens = 128;
  return options;
}

class PrefillSegments : public ::testing::Test {
 protected:
  std::vector<uint32_t> Capacities(uint64_t id) { return shared_.Capacities(id); }
  uint64_t Create(const SequenceSpec& spec) {
    const auto created = shared_.store->CreateSequence(kTenant, shared_.cache_id, spec);
    EXPECT_TRUE(created.ok()) << created.status();
    return created.ok() ? created->sequence_id : 0;
  }
  void Ingest(uint64_t id, const Content& content, size_t begin, size_t end) {
    const auto part = std::span<const uint64_t>(content).subspan(begin, end - begin);
    const auto count = IngestContent(*shared_.store, id, shared_.group, begin, part);
    EXPECT_TRUE(count.ok()) << count.status();
  }

  PressureStore shared_{256, Options()};
};

TEST_F(PrefillSegments, AreAsLongAsTheAnnouncedTokens) {
  EXPECT_THAT(Capacities(shared_.Fill(Prompt(1, 300))), ElementsAre(384));
  EXPECT_THAT(Capacities(shared_.Fill(Prompt(2, 1500))), ElementsAre(1024, 512));
  EXPECT_THAT(Capacities(shared_.Fill(Prompt(3, 1024))), ElementsAre(1024));
  // More slots than any decode segment has.
  EXPECT_THAT(Capacities(shared_.Fill(Prompt(4, 1))), ElementsAre(256));
}

TEST_F(PrefillSegments, OneSegmentReceivesAllChunks) {
  const std::vector<uint32_t> ids = Prompt(1, 300);
  const uint64_t id = Create({.session = "session", .token_ids = ids});
  for (size_t begin = 0; begin < 300; begin += 60) Ingest(id, ContentOf(ids), begin, begin + 60);
  EXPECT_THAT(Capacities(id), ElementsAre(384));
  ExpectContent(*shared_.store, id, shared_.group, ContentOf(ids));
}

TEST_F(PrefillSegments, ContentKeysAnnounceWholeSteps) {
  // 300 tokens: the keys name 256 of them.
  const uint64_t id = Create({.session = "session", .content_keys = std::vector<ContentKey>(2)});
  Ingest(id, ContentOf(Prompt(1, 300)), 0, 300);
  EXPECT_THAT(Capacities(id), ElementsAre(384));
}

TEST_F(PrefillSegments, DoubleWhenTheEndIsUnknown) {
  const std::vector<uint32_t> ids = Prompt(1, 3000);
  const Content content = ContentOf(ids);
  const uint64_t id = shared_.Create().sequence_id;
  for (size_t begin = 0; begin < 3000; begin += 100) {
    Ingest(id, content, begin, begin + 100);
    uint32_t slots = 0;
    for (const uint32_t capacity : Capacities(id)) slots += capacity;
    EXPECT_LE(slots, std::max<size_t>(256, 2 * (begin + 100)));
  }
  EXPECT_THAT(Capacities(id), ElementsAre(256, 256, 512, 1024, 1024));
  ExpectContent(*shared_.store, id, shared_.group, content);
  const uint64_t more = Create({.session = "session", .token_ids = Prompt(1, 256)});
  Ingest(more, content, 0, 256);
  Ingest(more, content, 256, 400);  // not announced
  EXPECT_THAT(Capacities(more), ElementsAre(256, 256));
}

TEST_F(PrefillSegments, OfAnUnknownEndFitWhereTheirRowsFit) {
  PressureStore small(6, Options());  // room for three segments of 256 slots, and not for 512 more
  const uint64_t id = small.Create().sequence_id;
  const Content content = ContentOf(Prompt(1, 768));
  for (const auto& [begin, end] : {std::pair(0u, 512u), std::pair(512u, 768u)}) {
    const auto part = std::span(content).subspan(begin, end - begin);
    const auto count = IngestContent(*small.store, id, small.group, begin, part);
    ASSERT_TRUE(count.ok()) << count.status();
  }
  EXPECT_THAT(small.Capacities(id), ElementsAre(256, 256, 256));
}

TEST_F(PrefillSegments, DoubleWhenTheTokensAreNamedPieceByPiece) {
  const std::vector<uint32_t> ids = Prompt(1, 900);
  const uint64_t id = Create({.session = "session"});
  for (uint32_t begin = 0; begin < 900; begin += 100) {
    const auto named =
        shared_.store->NameTokens(kTenant, id, begin, {std::span(ids).subspan(begin, 100)});
    ASSERT_TRUE(named.ok()) << named;
    Ingest(id, ContentOf(ids), begin, begin + 100);
  }
  EXPECT_THAT(Capacities(id), ElementsAre(256, 256, 512));
}

TEST_F(PrefillSegments, OfANamedPromptThatDoesNotFitHoldNothing) {
  PressureStore small(4, Options());  // 512 slots
  const uint64_t id = small.Create(Prompt(1, 1000)).sequence_id;
  const Content content = ContentOf(Prompt(1, 1000));
  const auto refused =
      IngestContent(*small.store, id, small.group, 0, std::span(content).first(100));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(small.used_bytes(), 0u);
}

TEST_F(PrefillSegments, OfContentKeysFitWhereWholeStepsFit) {
  PressureStore small(4, Options());  // room for 896 slots, and not for 1024
  const auto created = small.store->CreateSequence(
      kTenant, small.cache_id, {.session = "session", .content_keys = std::vector<ContentKey>(7)});
  ASSERT_TRUE(created.ok()) << created.status();
  const Content content = ContentOf(Prompt(1, 896));
  for (const auto& [begin, end] : {std::pair(0u, 100u), std::pair(100u, 896u)}) {
    const auto part = std::span(content).subspan(begin, end - begin);
    const auto count = IngestContent(*small.store, created->sequence_id, small.group, begin, part);
    ASSERT_TRUE(count.ok()) << count.status();
  }
  EXPECT_EQ(small.Describe(created->sequence_id).segments.size(), 1u);
}

TEST_F(PrefillSegments, TheTokensBehindASharedPrefixGetTheirOwn) {
  shared_.Serve(Prompt(1, 512));
  const uint64_t id = shared_.Fill(Prompt(1, 900, /*common=*/512, /*member=*/1));
  EXPECT_EQ(Capacities(id).back(), 512u) << "388 tokens follow";
}

TEST_F(PrefillSegments, AreShortInAPoolThatIsNearlyFull) {
  PressureStore small(4, Options());  // 512 slots
  const uint64_t id = small.Create().sequence_id;
  const Content content = ContentOf(Prompt(1, 300));
  const auto count = IngestContent(*small.store, id, small.group, 0, content);
  ASSERT_TRUE(count.ok()) << count.status();
  for (const SegmentInfo& segment : small.Describe(id).segments) {
    EXPECT_LE(segment.slot_capacity, 384u);
  }
  ExpectContent(*small.store, id, small.group, content);
  const auto refused = IngestContent(*small.store, id, small.group, 300, ContentOf(Prompt(2, 300)));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace pqcached::kvstore
