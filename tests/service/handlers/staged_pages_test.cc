// Pages through the staging ring: the sidecar reads and writes the named bytes of the caller's own
// ring, and no others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "kvstore/refusal.h"
#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::service {
namespace {

constexpr uint64_t kSlotBytes = uint64_t{1} << 20;
constexpr uint64_t kPageBytes = 70000;
const std::string kKey = "a key of a page, a hash usually";

class StagedPagesTest : public testing::Test {
 protected:
  StagedPagesTest() {
    v1::OpenPageCacheRequest request;
    request.set_name("pages");
    request.set_capacity_bytes(4 << 20);
    v1::OpenPageCacheResponse opened;
    MustBeOk(sidecar_.Call(client_, request, &opened));
    cache_id_ = opened.cache_id();
    for (size_t i = 0; i < kPageBytes; ++i) content_.push_back(static_cast<char>(i * i % 251));
  }
  static void MustBeOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

  v1::StagingReference Place(uint64_t offset, uint64_t size) {
    v1::StagingReference place;
    place.set_slot(1);
    place.set_offset_bytes(offset);
    place.set_size_bytes(size);
    place.set_generation(++generation_);
    return place;
  }
  void PutContent() {
    v1::PutPagesRequest request;
    request.set_cache_id(cache_id_);
    request.add_pages()->set_key(kKey);
    request.mutable_pages(0)->set_content(content_);
    v1::PutPagesResponse response;
    MustBeOk(sidecar_.Call(client_, request, &response));
  }
  // Asks for the page at `place`.
  absl::Status Get(const v1::StagingReference& place, uint64_t capacity_bytes,
                   v1::GetPagesResponse* response) {
    v1::GetPagesRequest request;
    request.set_cache_id(cache_id_);
    request.add_pages()->set_key(kKey);
    request.mutable_pages(0)->set_capacity_bytes(capacity_bytes);
    *request.mutable_pages(0)->mutable_staging() = place;
    return sidecar_.Call(client_, request, response);
  }
  std::string RingText() const {
    return {reinterpret_cast<const char*>(ring_.data()), ring_.size_bytes()};
  }

  DirectSidecar sidecar_;
  const Client client_ = sidecar_.Open("engine", /*mapped=*/true);
  const SharedMapping ring_ = sidecar_.OpenStaging(client_, kSlotBytes, 2);
  uint64_t cache_id_ = 0;
  uint64_t generation_ = 0;
  std::string content_;
};

TEST_F(StagedPagesTest, APageIsReadFromTheRing) {
  std::memcpy(ring_.data() + kSlotBytes + 128, content_.data(), kPageBytes);
  v1::PutPagesRequest put;
  put.set_cache_id(cache_id_);
  put.add_pages()->set_key(kKey);
  *put.mutable_pages(0)->mutable_staging() = Place(128, kPageBytes);
  v1::PutPagesResponse outcomes;
  MustBeOk(sidecar_.Call(client_, put, &outcomes));
  ASSERT_THAT(outcomes.outcomes(), testing::ElementsAre(v1::PAGE_OUTCOME_STORED));
  v1::GetPagesRequest get;
  get.set_cache_id(cache_id_);
  get.add_pages()->set_key(kKey);
  get.mutable_pages(0)->set_capacity_bytes(kPageBytes);
  v1::GetPagesResponse got;
  MustBeOk(sidecar_.Call(client_, get, &got));
  EXPECT_TRUE(got.pages(0).content() == content_);
  EXPECT_FALSE(got.pages(0).is_staged());
}

TEST_F(StagedPagesTest, APageIsWrittenToItsPlaceOnly) {
  PutContent();
  std::memset(ring_.data(), 'x', ring_.size_bytes());
  std::string wanted = RingText();
  wanted.replace(kSlotBytes + 256, kPageBytes, content_);
  v1::GetPagesResponse got;
  MustBeOk(Get(Place(256, kPageBytes + 100), kPageBytes + 50, &got));
  EXPECT_TRUE(got.pages(0).is_staged());
  EXPECT_EQ(got.pages(0).size_bytes(), kPageBytes);
  EXPECT_TRUE(got.pages(0).content().empty());
  EXPECT_TRUE(RingText() == wanted);
}

TEST_F(StagedPagesTest, APageThatIsTooLargeOrMissingLeavesTheRing) {
  std::memset(ring_.data(), 'x', ring_.size_bytes());
  const std::string before = RingText();
  v1::GetPagesResponse got;
  MustBeOk(Get(Place(0, kPageBytes), kPageBytes, &got));
  EXPECT_EQ(got.pages(0).size_bytes(), 0u);
  EXPECT_FALSE(got.pages(0).is_staged());
  PutContent();
  got.Clear();
  MustBeOk(Get(Place(0, kPageBytes), kPageBytes - 1, &got));
  EXPECT_EQ(got.pages(0).size_bytes(), kPageBytes);
  EXPECT_FALSE(got.pages(0).is_staged());
  EXPECT_TRUE(RingText() == before);
}

TEST_F(StagedPagesTest, PlacesThatCannotBeAreRefused) {
  PutContent();
  std::memset(ring_.data(), 'x', ring_.size_bytes());
  const std::string before = RingText();
  const auto expect = [&](const v1::StagingReference& place, uint64_t capacity_bytes,
                          absl::StatusCode code, const std::string& field) {
    v1::GetPagesResponse got;
    const absl::Status status = Get(place, capacity_bytes, &got);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(kvstore::FieldOf(status), field) << status;
    EXPECT_TRUE(RingText() == before) << field;
  };
  const auto bad = absl::StatusCode::kInvalidArgument;
  const auto not_now = absl::StatusCode::kFailedPrecondition;
  expect(Place(0, kPageBytes - 1), kPageBytes, bad, "pages[0].staging.size_bytes");
  expect(Place(kSlotBytes - kPageBytes + 1, kPageBytes), kPageBytes, bad,
         "pages[0].staging.offset_bytes");
  expect(Place(~uint64_t{0}, kPageBytes), kPageBytes, bad, "pages[0].staging.offset_bytes");
  v1::StagingReference slot = Place(0, kPageBytes);
  slot.set_slot(2);
  expect(slot, kPageBytes, bad, "pages[0].staging.slot");
  v1::GetPagesResponse got;
  const v1::StagingReference used = Place(kSlotBytes, 0);
  MustBeOk(Get(used, 0, &got));
  expect(used, 0, not_now, "pages[0].staging.generation");
}

TEST_F(StagedPagesTest, ASessionWithoutARingHasNoPlaces) {
  PutContent();
  v1::GetPagesRequest get;
  get.set_cache_id(cache_id_);
  get.add_pages()->set_key(kKey);
  get.mutable_pages(0)->set_capacity_bytes(kPageBytes);
  *get.mutable_pages(0)->mutable_staging() = Place(0, kPageBytes);
  v1::GetPagesResponse got;
  const Client other = sidecar_.Open("other", /*mapped=*/true);
  EXPECT_EQ(sidecar_.Call(other, get, &got).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace pqcached::service
