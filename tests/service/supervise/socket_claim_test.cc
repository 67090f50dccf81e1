// The claim on a socket.
#include "service/supervise/socket_claim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace pqcached::service {
namespace {

using testing::HasSubstr;

class SocketClaimFiles : public testing::Test {
 protected:
  SocketClaimFiles() {
    std::string path = testing::TempDir() + "pqcached-claim-XXXXXX";
    directory_ = mkdtemp(path.data());
  }
  ~SocketClaimFiles() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path directory_;
};

class SocketClaimTest : public SocketClaimFiles {
 protected:
  // Leaves a socket file behind, as a killed daemon does; the descriptor tells whether anyone still
  // listens.
  int Listen() {
    const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(descriptor, 1), 0);
    return descriptor;
  }

  const std::string path_ = directory_ / "run" / "pqcached.sock";
};

TEST_F(SocketClaimTest, MakesItsDirectoryForTheOwnerAlone) {
  const auto claim = SocketClaim::Acquire(path_);
  ASSERT_TRUE(claim.ok()) << claim.status();
  struct stat status = {};
  ASSERT_EQ(stat((directory_ / "run").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST_F(SocketClaimTest, IsGivenOnce) {
  {
    const auto claim = SocketClaim::Acquire(path_);
    ASSERT_TRUE(claim.ok());
    const absl::Status second = SocketClaim::Acquire(path_).status();
    EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(second.message()), HasSubstr(path_));
  }
  EXPECT_TRUE(SocketClaim::Acquire(path_).ok());
  EXPECT_TRUE(std::filesystem::is_empty(directory_ / "run")) << "nothing is left behind";
}

TEST_F(SocketClaimTest, ClearsAStaleSocketAway) {
  std::filesystem::create_directory(directory_ / "run");
  close(Listen());
  ASSERT_TRUE(std::filesystem::exists(path_));
  const auto claim = SocketClaim::Acquire(path_);
  ASSERT_TRUE(claim.ok()) << claim.status();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(SocketClaimTest, RefusesASocketThatSomebodyServes) {
  std::filesystem::create_directory(directory_ / "run");
  const int listener = Listen();
  EXPECT_EQ(SocketClaim::Acquire(path_).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(std::filesystem::exists(path_));
  close(listener);
}

TEST_F(SocketClaimTest, RefusesToRemoveAFile) {
  std::filesystem::create_directory(directory_ / "run");
  std::ofstream(path_) << "precious";
  EXPECT_EQ(SocketClaim::Acquire(path_).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::is_regular_file(path_));
}

}  // namespace
}  // namespace pqcached::service
