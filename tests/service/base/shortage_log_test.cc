// Shortages in the log: each kind once in an interval, with the number of calls.
#include "service/base/shortage_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <sstream>
#include <string>

#include "service/base/guarded.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

using testing::HasSubstr;
using testing::Not;

class ShortageLogTest : public testing::Test {
 protected:
  ShortageLogTest() : log_(*Log::Open("info", path_)) {}
  ~ShortageLogTest() override { std::filesystem::remove(path_); }

  std::string Text() const {
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

  const std::string path_ = testing::TempDir() + "shortage_log_" + std::to_string(getpid());
  const std::unique_ptr<Log> log_;
  const absl::Status memory_ = ShortOf(Shortage::kMemory, "a", "none is left", kRetryMemory);
};

TEST_F(ShortageLogTest, NamesEachKindOnceInAnInterval) {
  ShortageLog shortages(*log_, absl::Hours(1));
  shortages.Note("Ingest", memory_);
  shortages.Note("Append", memory_);
  shortages.Note("OpenCache",
                 ShortOf(Shortage::kDescriptors, "", "Too many open files", kRetryMemory));
  EXPECT_THAT(
      Text(),
      HasSubstr("event=short_of_memory call=Ingest refused=1 message=\"a: none is left\"\n"));
  EXPECT_THAT(Text(), Not(HasSubstr("Append")));
  EXPECT_THAT(Text(), HasSubstr("event=short_of_descriptors call=OpenCache refused=1 message="));
}

TEST_F(ShortageLogTest, CountsTheCallsSinceTheLastLine) {
  ShortageLog shortages(*log_, absl::Milliseconds(200));
  shortages.Note("Ingest", memory_);
  const auto until = kvstore::SteadyTime::Now() + absl::Minutes(1);
  while (Text().find("call=Append ") == std::string::npos && kvstore::SteadyTime::Now() < until) {
    shortages.Note("Append", memory_);
    usleep(10'000);
  }
  EXPECT_THAT(Text(), HasSubstr("call=Append refused="));
  EXPECT_THAT(Text(), Not(HasSubstr("call=Append refused=1 ")));
}

TEST_F(ShortageLogTest, NamesNoOtherRefusal) {
  ShortageLog shortages(*log_);
  shortages.Note("OpenCache", absl::OkStatus());
  shortages.Note("OpenCache", ResourceExhausted("max_caches", "64 caches are open", kRetryMemory));
  EXPECT_EQ(Text(), "");
}

TEST(ShortageTest, StaysWithTheRefusalWhenItsFieldOrTextChanges) {
  const absl::Status status = ShortOf(Shortage::kMemory, "rows", "none is left", kRetryMemory);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const absl::Status& each :
       {kvstore::PrefixField("items[2]", status), kvstore::ReplaceField("b", status),
        kvstore::MoveField("rows", "rows[3]", status), kvstore::ReplaceText("pool", status)}) {
    EXPECT_EQ(ShortageOf(each), Shortage::kMemory) << each;
    EXPECT_EQ(RetryMsOf(each), kRetryMemory);
  }
  EXPECT_EQ(kvstore::ReplaceText("full", status).message(), "rows: full");
  EXPECT_EQ(ShortageOf(ResourceExhausted("", "full", kRetryMemory)), Shortage::kNone);
}

TEST(ShortageTest, IsThatOfACallWhichRunsOutOfMemory) {
  const absl::Status status = Guarded([]() -> absl::Status { throw std::bad_alloc(); });
  EXPECT_EQ(ShortageOf(status), Shortage::kMemory) << status;
}

}  // namespace
}  // namespace pqcached::service
