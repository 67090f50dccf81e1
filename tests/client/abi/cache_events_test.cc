// Events of a cache against the daemon: a reader knows what MatchPrefix finds, over restarts of the
// worker, and on both paths.
#include "pqcached/cache_events.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <fstream>
#include <map>
#include <string>

#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;

constexpr uint32_t kTimeoutMs = 60'000;

std::vector<uint32_t> Ids(uint32_t count) {
  std::vector<uint32_t> ids(count);
  for (uint32_t i = 0; i < count; ++i) ids[i] = 3 * i + 1;
  return ids;
}

// The keys that a reader knows.
class Picture {
 public:
  explicit Picture(CacheEvents events) : events_(std::move(events)) {}

  // Reads until the picture has this many keys.
  void Await(size_t count, uint32_t capacity = 256) {
    for (bool is_first = true; is_first || parents_.size() != count; is_first = false) {
      const auto next = events_.Next(kTimeoutMs, capacity);
      ASSERT_TRUE(next.ok()) << next.status().ToString();
      ASSERT_FALSE(next->empty()) << "no events, and " << parents_.size() << " keys";
      for (const pqc_cache_event& event : *next) Apply(event);
    }
  }
  uint64_t Match(const PrefixKeys& prompt) const {
    std::string parent(BytesOf(prompt.root));
    uint64_t tokens = 0;
    for (const pqc_prefix_key& key : prompt.keys) {
      const auto known = parents_.find(std::string(BytesOf(key)));
      if (known == parents_.end() || known->second != parent) break;
      parent = known->first;
      tokens += 128;
    }
    return tokens;
  }
  const pqc_cache_event& last() const { return last_; }
  int clears() const { return clears_; }
  CacheEvents& events() { return events_; }

 private:
  void Apply(const pqc_cache_event& event) {
    last_ = event;
    const std::string key(BytesOf(event.key));
    if (event.kind == PQC_CACHE_CLEARED) {
      parents_.clear();
      ++clears_;
    } else if (event.kind == PQC_CACHE_REMOVED) {
      parents_.erase(key);
    } else {
      EXPECT_EQ(event.kind, PQC_CACHE_STORED);
      parents_.emplace(key, BytesOf(event.parent));
    }
  }

  CacheEvents events_;
  std::map<std::string, std::string> parents_;
  pqc_cache_event last_ = {};
  int clears_ = 0;
};

class CacheEventsTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Sequence Store(uint32_t tokens) {
    const std::vector<uint32_t> ids = Ids(tokens);
    uint64_t shared = 0;
    Sequence sequence = Must(cache_.CreateSequence({.prompt = {.token_ids = ids}}, &shared));
    const Layer layer(tokens, /*seed=*/1);
    MustBeOk(sequence.Ingest(0, 0, layer.keys(0, tokens), layer.values(0, tokens)));
    return sequence;
  }
  void KillWorker() {
    const std::string pid = std::to_string(daemon_.process().pid());
    std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
    pid_t worker = 0;
    ASSERT_TRUE(workers >> worker);
    ASSERT_EQ(kill(worker, SIGKILL), 0);
    while (kill(worker, 0) == 0) poll(nullptr, 0, 1);  // until the supervisor has noticed it
  }

  Daemon daemon_{{"--retain", "false"}};
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("events", {0})));
};

TEST_P(CacheEventsTest, AReaderKnowsWhatMatchPrefixFinds) {
  const PrefixKeys prompt = Must(PrefixKeysOf(cache_, {.token_ids = Ids(1000)}));
  ASSERT_EQ(prompt.keys.size(), 7u);
  Picture picture(Must(CacheEvents::Open(cache_)));
  picture.Await(0);
  Sequence sequence = Store(700);
  picture.Await(5, /*capacity=*/2);
  EXPECT_EQ(picture.Match(prompt), 640u);
  EXPECT_EQ(Must(cache_.MatchPrefix({.token_ids = Ids(1000)})), 640u);
  const pqc_cache_event position = picture.last();
  MustBeOk(sequence.Truncate(300));
  picture.Await(2);
  EXPECT_EQ(picture.Match(prompt), 256u);
  EXPECT_TRUE(Must(picture.events().Next(0)).empty());
  EXPECT_EQ(picture.clears(), 1);

  auto later = Must(CacheEvents::Open(cache_, position.epoch, position.number));
  const auto missed = Must(later.Next(kTimeoutMs));
  ASSERT_EQ(missed.size(), 3u);
  EXPECT_EQ(missed[0].kind, PQC_CACHE_REMOVED);
  EXPECT_EQ(missed[0].number, position.number + 1);
}

TEST_P(CacheEventsTest, AReaderOutlivesAKilledWorker) {
  const PrefixKeys prompt = Must(PrefixKeysOf(cache_, {.token_ids = Ids(700)}));
  Picture picture(Must(CacheEvents::Open(cache_)));
  Sequence sequence = Store(700);
  picture.Await(5);
  KillWorker();
  while (picture.clears() == 1) picture.Await(5);
  EXPECT_EQ(picture.Match(prompt), 640u);
  EXPECT_EQ(Must(PrefixKeysOf(cache_, {.token_ids = Ids(700)})).keys.size(), 5u);
}

TEST_P(CacheEventsTest, RefusalsNameTheArgument) {
  pqc_cache_event event;
  uint32_t count = 7;
  pqc_cache_events* events = nullptr;
  EXPECT_EQ(pqc_cache_events_open(nullptr, 0, 0, &events), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "cache");
  EXPECT_EQ(pqc_cache_events_next(nullptr, 0, &event, 1, &count), PQC_INVALID_ARGUMENT);
  ASSERT_EQ(pqc_cache_events_open(cache_.get(), 0, 0, &events), PQC_OK);
  EXPECT_EQ(pqc_cache_events_next(events, 0, &event, 0, &count), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "capacity");
  EXPECT_EQ(count, 0u);
  pqc_cache_events_close(events);
  pqc_cache_events_close(nullptr);

  const std::vector<uint32_t> ids = Ids(300);
  pqc_sequence_options prompt = PQC_INIT(pqc_sequence_options);
  prompt.token_ids = ids.data();
  prompt.token_id_count = ids.size();
  pqc_prefix_key keys[2];
  uint64_t key_count = 0;
  EXPECT_EQ(pqc_prefix_keys(cache_.get(), &prompt, nullptr, keys, 1, &key_count), PQC_OUT_OF_RANGE);
  EXPECT_EQ(key_count, 2u);
  EXPECT_EQ(pqc_prefix_keys(cache_.get(), &prompt, nullptr, keys, 2, &key_count), PQC_OK);
  prompt.has_live_index = 1;
  EXPECT_EQ(pqc_prefix_keys(cache_.get(), &prompt, nullptr, keys, 2, &key_count),
            PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "prompt.has_live_index");
}

TEST_P(CacheEventsTest, ADroppedCacheIsClearedAndThenNotFound) {
  Picture picture(Must(CacheEvents::Open(cache_)));
  Sequence sequence = Store(300);
  picture.Await(2);
  MustBeOk(sequence.Drop());
  MustBeOk(cache_.Drop());
  while (picture.clears() == 1) picture.Await(0);
  EXPECT_EQ(picture.events().Next(kTimeoutMs).status().code(), PQC_NOT_FOUND);
}

INSTANTIATE_TEST_SUITE_P(Paths, CacheEventsTest,
                         ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
