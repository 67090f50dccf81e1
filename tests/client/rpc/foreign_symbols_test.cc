// An engine that exports a protobuf, gRPC and abseil of its own: here all their functions, which
// abort when they are called (foreign_symbols.sh makes them). The client must still work, because
// libpqcached_rpc prefers its own libraries.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/process.h"
#include "tests/sanitizers.h"
#include "tests/skip.h"

extern "C" [[noreturn]] void ForeignSymbolCalled();
extern "C" void ForeignSymbolCalled() {
  constexpr char kMessage[] = "a foreign symbol was called\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kMessage, std::strlen(kMessage));
  std::abort();
}

namespace pqcached {
namespace {

using testing::Process;
using testing::TempFolder;

class ForeignSymbolsTest : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    PQC_SKIP("plain_build")
        << "sanitizers replace malloc and refuse RTLD_DEEPBIND, without which the engine's "
           "symbols win";
#endif
  }
};

TEST_F(ForeignSymbolsTest, TheProgramExportsAProtobufThatAborts) {
  // The control: a library that is loaded the usual way does meet the engine's symbols.
  EXPECT_DEATH(
      {
        void* library = dlopen(PQCACHED_RPC_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        _exit(library ? 0 : 1);
      },
      "a foreign symbol was called");
}

TEST_F(ForeignSymbolsTest, TheClientDoesNotMeetThem) {
  const TempFolder folder;
  Process sidecar({PQCACHED_FAKE_SIDECAR, folder.File("s"), "good"});
  ASSERT_TRUE(sidecar.WaitForLine("ready"));

  Result<Client> client = Client::Open({.endpoint = "unix:" + folder.File("s")});
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  Result<Cache> cache = client->OpenCache({.name = "cache",
                                           .model_fingerprint = "model",
                                           .groups = {{.layers = {0},
                                                       .kv_heads = 2,
                                                       .query_heads = 4,
                                                       .key_dim = 32,
                                                       .value_dim = 32,
                                                       .dtype = PQC_F32}},
                                           .capacity_bytes = 1 << 20});
  ASSERT_TRUE(cache.ok()) << cache.status().ToString();
  Result<Sequence> sequence = cache->CreateSequence();
  ASSERT_TRUE(sequence.ok()) << sequence.status().ToString();
  const std::vector<float> rows(100 * 2 * 32), queries(4 * 32);
  const Status ingested = sequence->Ingest(0, 0, {rows, {100, 2, 32}}, {rows, {100, 2, 32}});
  EXPECT_TRUE(ingested.ok()) << ingested.ToString();
  const Status built = sequence->BuildIndex();
  EXPECT_TRUE(built.ok()) << built.ToString();
  const Query query{.layer = 0, .query_position = 99, .queries = {queries, {4, 32}}};
  const Result<Attention> attention = sequence->Attend(query, {.ratio = 0.5});
  EXPECT_TRUE(attention.ok()) << attention.status().ToString();
  const Result<std::string> info = client->AdminJson("GetServerInfo");
  EXPECT_TRUE(info.ok()) << info.status().ToString();
}

}  // namespace
}  // namespace pqcached
