// A log whose file cannot grow: it counts the lines that it loses, and names them when there is room.
#include "service/base/line_sink.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "service/base/log.h"

namespace pqcached::service {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;

// Files of this process grow to so many bytes; a write beyond fails, after a part of it.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) : ignored_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, ignored_);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  const sighandler_t ignored_;
  rlimit before_ = {};
};

class LineSinkTest : public testing::Test {
 protected:
  LineSinkTest() { std::filesystem::remove(path_); }
  ~LineSinkTest() override { std::filesystem::remove(path_); }

  std::string Text() const {
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

  const std::string path_ = testing::TempDir() + "line_sink_" + std::to_string(getpid());
};

TEST_F(LineSinkTest, NamesTheLinesThatItHasLost) {
  const absl::StatusOr<std::unique_ptr<Log>> log = Log::Open("info", path_);
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Info("first", {});
  {
    const FileLimit limit(Text().size() + 20);  // a part of a line
    for (int i = 0; i < 3; ++i) (*log)->Info("lost", {});
  }
  (*log)->Info("next", {});
  (*log)->Info("last", {});
  std::istringstream lines(Text());
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_THAT(line, EndsWith("level=info event=first"));
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(line.size(), 20u) << line;  // the torn one ends at its end
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_THAT(line, MatchesRegex("ts=.*Z level=warning event=log_lines_lost lines=3 message=.*"));
  EXPECT_THAT(line, HasSubstr("File too large"));
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_THAT(line, EndsWith("level=info event=next"));
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_THAT(line, EndsWith("level=info event=last"));
  EXPECT_FALSE(std::getline(lines, line)) << line;
}

TEST_F(LineSinkTest, CountsALossUntilItsLineIsWritten) {
  const absl::StatusOr<std::unique_ptr<Log>> log = Log::Open("info", path_);
  ASSERT_TRUE(log.ok()) << log.status();
  for (int i = 0; i < 2; ++i) {
    const FileLimit limit(Text().size());
    (*log)->Info("lost", {});
    (*log)->Info("lost", {});
  }
  (*log)->Info("next", {});
  EXPECT_THAT(Text(), HasSubstr(" lines=4 "));
}

}  // namespace
}  // namespace pqcached::service
