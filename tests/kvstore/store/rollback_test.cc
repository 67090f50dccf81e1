// Rolling back by one token of a prompt that is stored whole, and to nothing.
#include "tests/kvstore/content.h"

namespace pqcached::kvstore {
namespace {

using testing::AppendContent;
using testing::Content;
using testing::ContentOf;
using testing::ExpectContent;
using testing::Floats;
using testing::IngestContent;
using testing::kTenant;
using testing::Pq;
using testing::RandomFloats;
using testing::RandomIds;
using testing::SharingStore;

const BuildSpec kBuild{.index = Pq(2, 4), .iterations = 2};

class RollBack : public ::testing::Test {
 protected:
  Store& store() { return *shared_.store; }
  uint64_t Stored() {
    const CreatedSequence created = shared_.Create(ids_);
    EXPECT_TRUE(IngestContent(store(), created.sequence_id, shared_.group, 0, content_).ok());
    EXPECT_TRUE(store().BuildIndex(kTenant, created.sequence_id, kBuild, {}).ok());
    return created.sequence_id;
  }
  void Truncate(uint64_t id, uint32_t tokens) {
    const auto count = store().TruncateSequence(kTenant, id, tokens);
    ASSERT_TRUE(count.ok()) << count.status();
  }
  std::vector<float> Logits(uint64_t id, const Floats& query) {
    const auto scores =
        store().Score(kTenant, id, {.layer = 3, .query_position = 384, .queries = query.view()},
                      kBuild.index, {0, 384});
    EXPECT_TRUE(scores.ok()) << scores.status();
    return scores.ok() ? scores->logits : std::vector<float>();
  }

  std::mt19937_64 random_{5};
  SharingStore shared_;
  const std::vector<uint32_t> ids_ = RandomIds(random_, 384);
  const Content content_ = ContentOf(ids_);
};

// The engine needs the last token's logits all the same: it rolls back by one, and hands in that row.
TEST_F(RollBack, APromptThatIsStoredWholeIsSharedWholeAndComputedFromItsLastTokenOn) {
  const uint64_t first = Stored();
  const CreatedSequence second = shared_.Create(ids_);
  EXPECT_EQ(second.token_count, 384u);
  Truncate(second.sequence_id, 383);
  ASSERT_TRUE(IngestContent(store(), second.sequence_id, shared_.group, 383,
                            std::span(content_).subspan(383))
                  .ok());
  ExpectContent(store(), second.sequence_id, shared_.group, content_);
  ExpectContent(store(), first, shared_.group, content_);
  const Floats query = RandomFloats(random_, {1, 4, 32});
  EXPECT_EQ(Logits(second.sequence_id, query), Logits(first, query));
  EXPECT_EQ(shared_.Match(ids_), 384u);  // the first one's
}

TEST_F(RollBack, WithTheLastTokenGoTheIndexesAndNotBefore) {
  const uint64_t id = Stored();
  Truncate(id, 1);
  EXPECT_EQ(shared_.Describe(id).indexes.size(), 1u);
  Truncate(id, 0);
  EXPECT_TRUE(shared_.Describe(id).indexes.empty());
  EXPECT_EQ(shared_.used_bytes(), 0u);
  ASSERT_TRUE(AppendContent(store(), id, shared_.group, 0, content_).ok());
  ExpectContent(store(), id, shared_.group, content_);
  EXPECT_TRUE(store().BuildIndex(kTenant, id, kBuild, {}).ok());
}

}  // namespace
}  // namespace pqcached::kvstore
