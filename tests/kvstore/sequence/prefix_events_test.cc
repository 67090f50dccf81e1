// PrefixEvents: a reader's picture of the listed steps against a plain model.
#include "kvstore/sequence/prefix_events.h"

#include <map>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pqcached::kvstore {
namespace {

using ::testing::ElementsAre;

PrefixStep StepOf(uint8_t name) {
  PrefixStep step;
  step.key[0] = name;
  step.token_end = 128;
  return step;
}

std::string Text(const CacheEvent& event) {
  const std::string number = " " + std::to_string(event.number);
  const std::string key = " " + std::to_string(event.step.key[0]);
  switch (event.kind) {
    case CacheEventKind::kStored:
      return "stored" + number + key;
    case CacheEventKind::kRemoved:
      return "removed" + number + key;
    case CacheEventKind::kCleared:
      return "cleared" + number;
  }
  return "";
}

// Keys that a reader knows after the events that it has received.
class Reader {
 public:
  // Reads at most `most` events; returns them as text.
  std::vector<std::string> Read(const PrefixEvents& from, size_t most = 100) {
    std::vector<CacheEvent> events;
    from.ReadInto(position_, most, events);
    EXPECT_LE(events.size(), most);
    std::vector<std::string> texts;
    for (const CacheEvent& event : events) {
      texts.push_back(Text(event));
      Apply(event);
    }
    return texts;
  }
  void ReadAll(const PrefixEvents& from, size_t most) {
    while (from.HasNews(position_)) ASSERT_FALSE(Read(from, most).empty());
    EXPECT_TRUE(Read(from, most).empty());
  }
  // Continues at the position of its newest event, as after a new connection.
  void Reconnect() { position_.present_until = 0; }

  EventPosition& position() { return position_; }
  const std::set<uint8_t>& keys() const { return keys_; }
  int clears() const { return clears_; }

 private:
  void Apply(const CacheEvent& event) {
    const uint8_t key = event.step.key[0];
    if (event.kind == CacheEventKind::kCleared) {
      keys_.clear();
      newest_ = 0;
      ++clears_;
      return;
    }
    EXPECT_GT(event.number, newest_);
    newest_ = event.number;
    if (event.kind == CacheEventKind::kRemoved) {
      keys_.erase(key);
    } else {
      EXPECT_TRUE(keys_.insert(key).second) << "stored twice: " << int{key};
    }
  }

  EventPosition position_;
  std::set<uint8_t> keys_;
  uint64_t newest_ = 0;
  int clears_ = 0;
};

TEST(PrefixEvents, AReaderReceivesEachChangeOnceAndInOrder) {
  PrefixEvents events;
  events.StartLog(std::vector<CacheEvent>(8));
  Reader reader;
  EXPECT_TRUE(events.HasNews(reader.position()));
  EXPECT_THAT(reader.Read(events), ElementsAre("cleared 0"));
  EXPECT_FALSE(events.HasNews(reader.position()));
  const uint64_t one = events.NoteStored(StepOf(1));
  events.NoteStored(StepOf(2));
  EXPECT_TRUE(events.HasNews(reader.position()));
  EXPECT_THAT(reader.Read(events, 1), ElementsAre("stored 1 1"));
  events.NoteRemoved(one);
  EXPECT_THAT(reader.Read(events), ElementsAre("stored 2 2", "removed 3 1"));
  EXPECT_THAT(reader.Read(events), ElementsAre());
  reader.Reconnect();
  events.NoteStored(StepOf(3));
  EXPECT_THAT(reader.Read(events), ElementsAre("stored 4 3"));
}

TEST(PrefixEvents, AReaderStartsWithThePresentStepsInTheirOrder) {
  PrefixEvents events;
  const uint64_t one = events.NoteStored(StepOf(1));
  events.NoteStored(StepOf(2));
  events.NoteStored(StepOf(3));
  events.NoteRemoved(one);
  events.StartLog(std::vector<CacheEvent>(8));
  Reader reader;
  EXPECT_THAT(reader.Read(events), ElementsAre("cleared 0", "stored 2 2", "stored 3 3"));
  EXPECT_FALSE(events.HasNews(reader.position()));
}

TEST(PrefixEvents, AReaderThatTheLogHasOvertakenStartsAgain) {
  PrefixEvents events;
  events.StartLog(std::vector<CacheEvent>(4));
  Reader slow;
  slow.Read(events);
  for (uint8_t key = 1; key <= 4; ++key) events.NoteStored(StepOf(key));
  Reader exact = slow;
  EXPECT_THAT(exact.Read(events, 2), ElementsAre("stored 1 1", "stored 2 2"));
  events.NoteStored(StepOf(5));
  EXPECT_THAT(slow.Read(events, 2), ElementsAre("cleared 0", "stored 1 1"));
  EXPECT_THAT(exact.Read(events), ElementsAre("stored 3 3", "stored 4 4", "stored 5 5"));
}

TEST(PrefixEvents, APositionOfAnotherEpochOrBehindTheNewestEventStartsAgain) {
  PrefixEvents events;
  events.StartLog(std::vector<CacheEvent>(4));
  Reader reader;
  reader.Read(events);
  EventPosition ahead = reader.position();
  ahead.number = 1;
  std::vector<CacheEvent> read;
  events.ReadInto(ahead, 10, read);
  EXPECT_EQ(read.size(), 1u);
  EXPECT_EQ(ahead.number, 0u);
  PrefixEvents next;
  next.StartLog(std::vector<CacheEvent>(4));
  EXPECT_TRUE(next.HasNews(reader.position()));
  EXPECT_THAT(reader.Read(next), ElementsAre("cleared 0"));
}

TEST(PrefixEvents, PicturesOfReadersEqualTheListedStepsUnderRandomChanges) {
  int clears = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    PrefixEvents events;
    std::map<uint8_t, uint64_t> listed;  // keys, with the numbers of their kStored
    const auto change = [&](int count) {
      for (; count > 0; --count) {
        const auto key = static_cast<uint8_t>(random() % 20);
        if (const auto it = listed.find(key); it != listed.end()) {
          events.NoteRemoved(it->second);
          listed.erase(it);
        } else {
          listed[key] = events.NoteStored(StepOf(key));
        }
      }
    };
    change(static_cast<int>(random() % 30));
    events.StartLog(std::vector<CacheEvent>(1 + random() % 12));
    std::vector<Reader> readers(3);
    for (int round = 0; round < 60; ++round) {
      change(static_cast<int>(random() % 5));
      Reader& reader = readers[random() % readers.size()];
      if (random() % 4 == 0) reader.Reconnect();
      if (random() % 3 > 0) {
        reader.Read(events, 1 + random() % 6);
        continue;
      }
      reader.ReadAll(events, 1 + random() % 6);
      std::set<uint8_t> expected;
      for (const auto& [key, number] : listed) expected.insert(key);
      ASSERT_EQ(reader.keys(), expected);
    }
    for (const Reader& reader : readers) clears += reader.clears();
  }
  EXPECT_GT(clears, 1000);  // many were overtaken
}

}  // namespace
}  // namespace pqcached::kvstore
