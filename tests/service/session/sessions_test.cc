// Sessions by their tokens.
#include "service/session/sessions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

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

}  // namespace
}  // namespace pqcached::service
