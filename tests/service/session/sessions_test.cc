// Sessions by their tokens, and texts from outside.
#include "service/session/sessions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "service/base/refusal.h"
#include "service/session/text.h"

namespace pqcached::service {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(SessionsTest, FindsByTokenUntilClosed) {
  Sessions sessions(4);
  const absl::StatusOr<OpenedSession> opened = sessions.Open("tenant-a", "engine 1");
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->token.size(), 32u);
  const absl::StatusOr<Session> found = sessions.Find(opened->token);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->tenant, "tenant-a");
  EXPECT_EQ(ClientNameOf(found->id), "engine 1");
  EXPECT_THAT(found->id, Not(HasSubstr(opened->token)));
  EXPECT_EQ(sessions.count(), 1u);
  sessions.Close(opened->token);
  EXPECT_EQ(sessions.Find(opened->token).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(sessions.Find("").status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(sessions.count(), 0u);
}

TEST(SessionsTest, TokensAndIdsAreDistinct) {
  Sessions sessions(100);
  std::set<std::string> tokens;
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const absl::StatusOr<OpenedSession> opened = sessions.Open("", "same name#1");
    ASSERT_TRUE(opened.ok());
    EXPECT_EQ(opened->session.tenant, "default");
    EXPECT_EQ(ClientNameOf(opened->session.id), "same name#1");
    tokens.insert(opened->token);
    ids.insert(opened->session.id);
  }
  EXPECT_EQ(tokens.size(), 100u);
  EXPECT_EQ(ids.size(), 100u);
}

TEST(SessionsTest, LimitsTheirNumberAndNames) {
  Sessions sessions(1);
  EXPECT_EQ(sessions.Open("Upper", "").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sessions.Open(std::string(65, 'a'), "").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(sessions.Open("a", std::string(129, 'a')).status().code(),
            absl::StatusCode::kInvalidArgument);
  const absl::StatusOr<OpenedSession> opened =
      sessions.Open(std::string(64, 'a'), std::string(128, 'a'));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(sessions.Open("b", "").status().code(), absl::StatusCode::kResourceExhausted);
  sessions.Close(opened->token);
  EXPECT_TRUE(sessions.Open("b", "").ok());
}

kvstore::KeptSession KeptSessionOf(const std::string& id, const std::string& token) {
  return {.id = id, .tenant = "team-a", .client_name = "engine", .token = token};
}

TEST(SessionsTest, ARestoredSessionWaitsForItsClient) {
  Sessions sessions(2);
  const Session restored = sessions.Restore(KeptSessionOf("engine#7", "secret"));
  EXPECT_EQ(restored.number, 7u);
  ASSERT_TRUE(sessions.Find("secret").ok()) << "its token is good meanwhile";
  EXPECT_EQ(sessions.Find("secret")->tenant, "team-a");
  EXPECT_EQ(sessions.Open("", "other")->session.id, "other#8") << "no id is given twice";

  EXPECT_EQ(sessions.Resume("wrong").status().code(), absl::StatusCode::kNotFound);
  const auto resumed = sessions.Resume("secret", 42);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->token, "secret");
  EXPECT_EQ(resumed->session.id, "engine#7");
  EXPECT_EQ(sessions.PeerPidOf("engine#7"), 42u);
  EXPECT_EQ(sessions.Resume("secret").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(sessions.CloseDetached("secret")) << "its client has come";
  sessions.Detach("secret");
  EXPECT_TRUE(sessions.CloseDetached("secret"));
  EXPECT_FALSE(sessions.CloseDetached("secret"));
  EXPECT_EQ(sessions.Resume("secret").status().code(), absl::StatusCode::kNotFound);
}

TEST(SessionsTest, RestoredOnesCountAgainstTheLimitOfNewOnes) {
  Sessions sessions(1);
  sessions.Restore(KeptSessionOf("a#1", "one"));
  sessions.Restore(KeptSessionOf("b#2", "two"));
  EXPECT_EQ(sessions.count(), 2u) << "nobody is turned out";
  EXPECT_EQ(sessions.Open("", "c").status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SessionsTest, AWorkerThatEndsLeavesItsSessions) {
  Sessions sessions(4);
  const auto opened = sessions.Open("", "engine");
  sessions.Restore(KeptSessionOf("a#9", "one"));
  sessions.LeaveToNextWorker();
  EXPECT_FALSE(sessions.Close(opened->token));
  EXPECT_FALSE(sessions.CloseDetached("one"));
  EXPECT_TRUE(sessions.IsOpen(opened->token));
}

TEST(TextTest, ValidPrintableTextsPass) {
  for (const char* text : {"", "engine 1", "Zürich", "模型-7b", "emoji 🚀", "a\xc2\xa0z"}) {
    EXPECT_TRUE(CheckText("name", text, 32).ok()) << text;
  }
  EXPECT_TRUE(CheckText("name", std::string(32, 'a'), 32).ok());
}

TEST(TextTest, OthersAreRefusedWithTheReason) {
  const auto expect_refused = [](const std::string& text, const std::string& words) {
    const absl::Status status = CheckText("name", text, 32);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_EQ(FieldOf(status), "name");
    EXPECT_THAT(std::string(TextOf(status)), HasSubstr(words));
  };
  expect_refused(std::string(33, 'a'), "33 bytes, must be at most 32");
  expect_refused("\xff", "is not valid UTF-8 at byte 0");
  expect_refused("ab\xc3", "is not valid UTF-8 at byte 2");        // ends within a character
  expect_refused("\xc0\xaf", "is not valid UTF-8 at byte 0");      // longer than necessary
  expect_refused("\xed\xa0\x80", "is not valid UTF-8 at byte 0");  // half of a UTF-16 pair
  expect_refused("\xf4\x90\x80\x80", "is not valid UTF-8");        // beyond U+10FFFF
  expect_refused(std::string("a\0b", 3), "U+0000 at byte 1");
  expect_refused("a\nb", "U+000A at byte 1");
  expect_refused("\x1b[31m", "U+001B");
  expect_refused("\x7f", "U+007F");
  expect_refused("\xc2\x85", "U+0085");
  expect_refused("\xe2\x80\xa8", "U+2028");
  expect_refused("\xe2\x80\xae", "U+202E");  // the following text would run backwards
}

}  // namespace
}  // namespace pqcached::service
