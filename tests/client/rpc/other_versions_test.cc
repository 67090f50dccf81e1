// libpqcached_client with a libpqcached_rpc of the minor version before and after it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached::testing {
namespace {

struct OtherVersion {
  const char* name;
  const char* library;
};

class OtherVersionsTest
    : public ::testing::TestWithParam<std::tuple<OtherVersion, pqc_path_choice>> {
 protected:
  Result<Client> Open(const char* library, pqc_path_choice path) const {
    return Client::Open(
        {.endpoint = daemon_.endpoint(), .rpc_library_path = library, .path = path});
  }

  Daemon daemon_;
};

TEST_P(OtherVersionsTest, OfAnAdjacentVersionWorkTogether) {
  daemon_.AwaitServing();
  Client client = Must(Open(std::get<0>(GetParam()).library, std::get<1>(GetParam())));
  const Layer layer(600, 1);
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  EXPECT_EQ(Must(cache.Admit(100)).verdict, PQC_FITS_NOW);
  Sequence sequence = Must(cache.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 599), layer.values(0, 599)));
  EXPECT_EQ(Must(sequence.Append(599, RowsOf(layer, 599, 600, 1))), 600u);
  MustBeOk(sequence.BuildIndex({}));
  const pqc_sequence_info info = Must(sequence.Describe());
  EXPECT_EQ(info.token_count, 600u);
  EXPECT_EQ(info.index_count, 1u);
  const Selected selected = Must(
      sequence.TopK({.layer = 0, .query_position = 599, .queries = layer.queries()},
                    {.index = Index::Flat(), .sink_tokens = 4, .window_tokens = 16, .ratio = 0.1}));
  EXPECT_EQ(selected.count, 40u);
  std::vector<Sequence> beams;
  beams.push_back(std::move(sequence));
  const uint64_t before = Must(client.Count()).rpcs;
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{0, 0, 0}));
  const bool is_older = std::get<0>(GetParam()).library == std::string(PQCACHED_RPC_OLDER);
  EXPECT_EQ(Must(client.Count()).rpcs - before, is_older ? 2u : 1u);  // it forks one by one
  EXPECT_EQ(Must(beams[1].Describe()).token_count, 600u);
  const uint64_t kept = beams[1].id();
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{1}));
  EXPECT_EQ(beams[0].id(), kept);
}

INSTANTIATE_TEST_SUITE_P(
    Versions, OtherVersionsTest,
    ::testing::Combine(::testing::Values(OtherVersion{"older", PQCACHED_RPC_OLDER},
                                         OtherVersion{"newer", PQCACHED_RPC_NEWER}),
                       ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE)),
    [](const auto& each) {
      return std::string(std::get<0>(each.param).name) +
             (std::get<1>(each.param) == PQC_PATH_ONLY_LOCAL ? "_local" : "_remote");
    });

TEST(TooDifferentVersionsTest, AreRefused) {
  for (const char* library : {PQCACHED_RPC_TOO_OLD, PQCACHED_RPC_TOO_NEW}) {
    const Result<Client> client = Client::Open(
        {.endpoint = "unix:///nonexistent/pqcached.sock", .rpc_library_path = library});
    ASSERT_FALSE(client.ok()) << library;
    EXPECT_EQ(client.status().code(), PQC_FAILED_PRECONDITION) << library;
    EXPECT_EQ(client.status().field(), "options.rpc_library_path") << library;
  }
}

}  // namespace
}  // namespace pqcached::testing
