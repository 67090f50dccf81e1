// Loads on the remote path that take many answers, and two connections when there may be two.
#include <gtest/gtest.h>

#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::SpecOf;

constexpr uint64_t kTokens = 1300;  // 18 answers of a layer
constexpr uint64_t kBegin = 37;
constexpr uint32_t kLayers = 3;

size_t CountSocketsOfThisProcess() {
  DIR* const folder = opendir("/proc/self/fd");
  EXPECT_NE(folder, nullptr);
  size_t count = 0;
  while (const dirent* const entry = readdir(folder)) {
    char target[32] = {};
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1) <= 0) continue;
    count += std::string_view(target).starts_with("socket:");
  }
  closedir(folder);
  return count;
}

// Connections to a sidecar that call nothing.
class IdleConnections {
 public:
  IdleConnections(const std::string& endpoint, int count) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const std::string path = endpoint.substr(std::string_view("unix://").size());
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    for (int i = 0; i < count; ++i) {
      descriptors_.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(connect(descriptors_.back(), reinterpret_cast<const sockaddr*>(&address),
                        sizeof(address)),
                0);
    }
  }
  ~IdleConnections() {
    for (const int descriptor : descriptors_) close(descriptor);
  }
  IdleConnections(const IdleConnections&) = delete;
  IdleConnections& operator=(const IdleConnections&) = delete;

 private:
  std::vector<int> descriptors_;
};

class PartsLoadTest : public ::testing::Test {
 protected:
  Sequence Write() {
    Sequence sequence = Must(writing_cache_.CreateSequence());
    for (uint32_t number = 0; number < kLayers; ++number) {
      layers_.emplace_back(kTokens, number + 1);
      MustBeOk(sequence.Ingest(number, 0, layers_[number].keys(0, kTokens),
                               layers_[number].values(0, kTokens)));
    }
    MustBeOk(sequence.Flush());
    return sequence;
  }

  // Loads the tokens [begin, kTokens) of all layers, and compares.
  void LoadAndExpect(uint64_t begin) {
    const uint64_t tokens = kTokens - begin;
    std::vector<std::vector<float>> keys, values;
    std::vector<LayerRows> rows;
    for (uint32_t number = 0; number < kLayers; ++number) {
      keys.emplace_back(tokens * Layer::kKvHeads * Layer::kKeyDim, -1.0f);
      values.emplace_back(tokens * Layer::kKvHeads * Layer::kValueDim, -1.0f);
      rows.push_back({number, Tensor(keys.back(), {tokens, Layer::kKvHeads, Layer::kKeyDim}),
                      Tensor(values.back(), {tokens, Layer::kKvHeads, Layer::kValueDim})});
    }
    MustBeOk(sequence_.Load({begin, kTokens}, rows));
    for (uint32_t number = 0; number < kLayers; ++number) {
      const float* const key = layers_[number].key(begin, 0);
      const float* const value = layers_[number].value(begin, 0);
      EXPECT_TRUE(std::equal(keys[number].begin(), keys[number].end(), key)) << number;
      EXPECT_TRUE(std::equal(values[number].begin(), values[number].end(), value)) << number;
    }
  }

  // The flags of the sidecar, besides those that all tests of the file need.
  static std::vector<std::string> Flags(std::vector<std::string> more) {
    std::vector<std::string> flags = {"--max-message-bytes", "64kib", "--max-connections", "8"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  explicit PartsLoadTest(std::vector<std::string> more = {}) : daemon_(Flags(std::move(more))) {}

  Daemon daemon_;
  Client writing_client_ = daemon_.OpenClient("default", PQC_PATH_ONLY_LOCAL);
  Cache writing_cache_ = Must(writing_client_.OpenCache(SpecOf("cache", {0, 1, 2})));
  Client client_ = daemon_.OpenClient("default", PQC_PATH_ONLY_REMOTE);
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1, 2})));
  std::vector<Layer> layers_;
  Sequence written_ = Write();
  Sequence sequence_ = Must(cache_.Attach(written_.id()));
};

TEST_F(PartsLoadTest, LongLoadsUseASecondConnection) {
  const size_t before = CountSocketsOfThisProcess();
  LoadAndExpect(kTokens - 1);
  LoadAndExpect(kBegin);
  LoadAndExpect(kBegin);
  EXPECT_EQ(CountSocketsOfThisProcess(), before + 1);
  LoadAndExpect(0);
  EXPECT_EQ(CountSocketsOfThisProcess(), before + 1);
}

TEST_F(PartsLoadTest, LoadsNeedNoSecondConnection) {
  const IdleConnections others(daemon_.endpoint(), 16);
  for (int i = 0; i < 3; ++i) LoadAndExpect(kBegin);
}

// One thread and one call that waits, or one call of a tenant: parts of a load refuse each other.
class CrowdedLoadTest : public PartsLoadTest {
 protected:
  CrowdedLoadTest()
      : PartsLoadTest(
            {"--call-threads", "1", "--max-pending-calls", "1", "--tenant-limits", "*=calls:1"}) {}
};

TEST_F(CrowdedLoadTest, PartsOfALoadDoNotRefuseIt) {
  for (int i = 0; i < 20; ++i) LoadAndExpect(kBegin);
}

}  // namespace
}  // namespace pqcached
