// libpqcached_client with a libpqcached_rpc of the minor version before and after it.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "client/base/remote.h"
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

TEST_P(OtherVersionsTest, AnOlderLibraryDoesNotLeaveReRankingOut) {
  daemon_.AwaitServing();
  const auto& [version, path] = GetParam();
  Client client = Must(Open(version.library, path));
  const Layer layer(600, 1);
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  Sequence sequence = FillIndexed(cache, layer, 600, 1, 0);
  const Query query{.layer = 0, .query_position = 599, .queries = layer.queries()};
  Selection selection{.retrieved_tokens = 50, .rerank_factor = 8};
  const Result<Selected> selected = sequence.TopK(query, selection);
  const bool is_older = version.library == std::string(PQCACHED_RPC_OLDER);
  if (is_older && path == PQC_PATH_ONLY_REMOTE) {
    EXPECT_EQ(selected.status().code(), PQC_UNIMPLEMENTED);
    EXPECT_EQ(selected.status().field(), "selection.rerank_factor");
    EXPECT_EQ(sequence.Attend(query, selection).status().code(), PQC_UNIMPLEMENTED);
    selection.rerank_factor = 1;
    EXPECT_EQ(Must(sequence.TopK(query, selection)).count, 50u);
    selection.tail_estimate = true;
    const Status estimated = sequence.Attend(query, selection).status();
    EXPECT_EQ(estimated.code(), PQC_UNIMPLEMENTED);
    EXPECT_EQ(estimated.field(), "selection.tail_estimate");
    const Status by_mass = sequence.TopK(query, {.attention_mass = 0.9}).status();
    EXPECT_EQ(by_mass.code(), PQC_UNIMPLEMENTED);
    EXPECT_EQ(by_mass.field(), "selection.attention_mass");
    return;
  }
  selection.tail_estimate = true;
  EXPECT_EQ(sequence.Attend(query, selection).status().field(), "selection.tail_estimate");
  selection.tail_estimate = false;
  const std::vector<uint32_t> reranked = Must(selected).positions;
  selection.rerank_factor = 0;
  EXPECT_NE(Must(sequence.TopK(query, selection)).positions, reranked);
}

TEST_P(OtherVersionsTest, AnOlderLibraryDoesNotLeaveLogitsOut) {
  daemon_.AwaitServing();
  const auto& [version, path] = GetParam();
  Client client = Must(Open(version.library, path));
  const Layer layer(600, 1);
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  Sequence sequence = FillIndexed(cache, layer, 600, 1, 0);
  const StepItem items[] = {{&sequence, 600}};
  Step step = Must(client.BeginStep(items, nullptr));
  const std::vector<int32_t> positions = {4, 7};
  const std::vector<float> numbers(Layer::kQueryHeads * 2);
  const Tensor logits(numbers, {Layer::kQueryHeads, 2});
  Attention attention{.output = std::vector<float>(Layer::kQueryHeads * Layer::kValueDim),
                      .lse = std::vector<float>(Layer::kQueryHeads)};
  const Status status =
      step.AttendPositions(0, layer.queries(), {.positions = positions, .logits = &logits},
                           attention.output, attention.lse);
  if (version.library == std::string(PQCACHED_RPC_OLDER) && path == PQC_PATH_ONLY_REMOTE) {
    EXPECT_EQ(status.code(), PQC_UNIMPLEMENTED);
    EXPECT_EQ(status.field(), "lists.logits");
    return;
  }
  MustBeOk(status);
  EXPECT_NEAR(attention.lse[0], std::log(2.0f), 1e-5f);
  EXPECT_NEAR(attention.output[0], (layer.value(4, 0)[0] + layer.value(7, 0)[0]) / 2, 1e-5f);
}

// An older library would send the index without its layout.
TEST_P(OtherVersionsTest, AnOlderLibraryDoesNotLeaveALayoutOut) {
  daemon_.AwaitServing();
  const auto& [version, path] = GetParam();
  Client client = Must(Open(version.library, path));
  const bool is_older = version.library == std::string(PQCACHED_RPC_OLDER);
  const auto expect = [&](const Status& status, const std::string& field) {
    EXPECT_EQ(status.code(), is_older ? PQC_UNIMPLEMENTED : PQC_OK) << status.ToString();
    if (is_older) {
      EXPECT_EQ(status.field(), field);
    }
  };
  const Index contiguous = Index::Pq(2, 6, PQC_SUBSPACES_CONTIGUOUS);
  CacheSpec spec = SpecOf("contiguous", {0});
  spec.default_index = contiguous;
  expect(client.OpenCache(spec).status(), "spec.default_index.layout");
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  expect(cache.CreateSequence({.live_index = LiveIndex{.index = contiguous}}).status(),
         "options.index.layout");
  const Layer layer(600, 1);
  Sequence sequence = Must(cache.CreateSequence());
  MustBeOk(sequence.Ingest(0, 0, layer.keys(0, 600), layer.values(0, 600)));
  expect(sequence.BuildIndex({.index = contiguous}), "options.index.layout");
  const std::vector<float> numbers(Layer::kQueryHeads * Layer::kKeyDim);
  const std::vector<uint64_t> positions = {599};
  const QuerySamples samples{
      0, positions, Tensor(numbers.data(), PQC_F32, {1, Layer::kQueryHeads, Layer::kKeyDim})};
  expect(sequence.AddQuerySamples({&samples, 1}), "samples");
  const LiveIndex graph{.index = Must(Index::Make("graph"))};
  expect(cache.CreateSequence({.live_index = graph}).status(), "options.index.kind");
  const LiveIndex clusters{.index = Must(Index::Make("clusters"))};
  expect(cache.CreateSequence({.live_index = clusters}).status(), "options.index.kind");
  if (!is_older || path == PQC_PATH_ONLY_LOCAL) return;
  const Query query{.layer = 0, .query_position = 599, .queries = layer.queries()};
  expect(sequence.TopK(query, {.index = contiguous, .retrieved_tokens = 50}).status(),
         "selection.index.layout");
}

TEST(OtherLibraryTest, ReadsAConfigurationWhenItIsNewEnough) {
  const std::string config =
      R"({"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 256,
          "rope_theta": 10000, "text_config": null})";
  const Result<std::vector<LayerGroup>> older = GroupsOf(config, PQCACHED_RPC_OLDER);
  EXPECT_EQ(older.status().code(), PQC_FAILED_PRECONDITION);
  EXPECT_EQ(older.status().field(), "rpc_library_path");
  for (const char* library : {PQCACHED_RPC_NEWER, PQCACHED_RPC_LIBRARY}) {
    const std::vector<LayerGroup> groups = Must(GroupsOf(config, library));
    ASSERT_EQ(groups.size(), 1u);
    EXPECT_EQ(groups[0].layers, (std::vector<uint32_t>{0, 1, 2}));
    EXPECT_EQ(groups[0].key_dim, 64u);
    EXPECT_EQ(groups[0].rope_layout, PQC_ROPE_HALF);
  }
}

TEST(ModelTest, ArgumentsAreChecked) {
  pqc_model* model = nullptr;
  EXPECT_EQ(pqc_model_read(nullptr, PQCACHED_RPC_LIBRARY, &model), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(pqc_last_error_field()), "config_json");
  EXPECT_EQ(pqc_model_read("{}", PQCACHED_RPC_LIBRARY, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_model_read("{}", PQCACHED_RPC_LIBRARY, &model), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(pqc_last_error_field()), "config.num_attention_heads");
  EXPECT_EQ(model, nullptr);
  EXPECT_EQ(pqc_model_groups(nullptr, nullptr), nullptr);
  pqc_model_close(nullptr);
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

// The library as a client uses it.
class Library {
 public:
  Library(const std::string& endpoint, bool says_its_version) {
    void* const library = dlopen(PQCACHED_RPC_LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    const auto entry =
        reinterpret_cast<const client::RpcEntry* (*)()>(dlsym(library, client::kRpcEntrySymbol));
    client::Remote* remote = nullptr;
    const client::RemoteOptions options{
        .endpoint = endpoint.c_str(), .tenant = "", .client_name = "other", .timeout_ms = 10'000};
    EXPECT_EQ(entry()->open(options, &remote, &error_), PQC_OK) << error_.text;
    remote_.reset(remote);
    if (says_its_version) remote_->SetClientVersion(client::kRemoteVersion);
  }

  // The positions that `selection` takes for the layer's queries.
  std::vector<uint32_t> TopK(uint64_t sequence_id, const Layer& layer,
                             const kvstore::Selection& selection) {
    const Tensor queries = layer.queries();
    const client::TensorView view{
        .data = static_cast<const std::byte*>(queries.c().ptr),
        .dtype = kernels::DType::kF32,
        .ndim = 3,
        .shape = {1, Layer::kQueryHeads, Layer::kKeyDim},
        .strides = {Layer::kQueryHeads * Layer::kKeyDim, Layer::kKeyDim, 1}};
    std::vector<uint32_t> positions(1000);
    pqc_positions out = PQC_INIT(pqc_positions);
    out.positions = positions.data();
    out.capacity = positions.size();
    const client::TopKItem item{.query = {.sequence_id = sequence_id,
                                          .layer = 0,
                                          .query_position = layer.tokens() - 1,
                                          .queries = view,
                                          .shape = {.key_dim = Layer::kKeyDim,
                                                    .value_dim = Layer::kValueDim,
                                                    .kv_heads = Layer::kKvHeads,
                                                    .query_heads = Layer::kQueryHeads}},
                                .selection = &selection,
                                .out = &out};
    EXPECT_EQ(remote_->TopK(&item, 1, &error_), PQC_OK) << error_.field << ": " << error_.text;
    positions.resize(size_t{out.count} * Layer::kKvHeads);
    return positions;
  }

 private:
  struct Close {
    void operator()(client::Remote* remote) const { remote->Close(); }
  };
  std::unique_ptr<client::Remote, Close> remote_;
  client::RefusalBuffer error_;
};

TEST(OlderClientTest, WhatItHasInPlaceOfTheFactorIsNotRead) {
  Daemon daemon;
  daemon.AwaitServing();
  Client client = Must(Client::Open({.endpoint = daemon.endpoint()}));
  const Layer layer(600, 1);
  Cache cache = Must(client.OpenCache(SpecOf("cache", {0})));
  Sequence sequence = FillIndexed(cache, layer, 600, 1, 0);
  kvstore::Selection selection{.index = {kvstore::IndexKind::kPq, 4, 8},
                               .budget_kind = kvstore::BudgetKind::kRetrieved,
                               .budget_count = 50};
  const std::vector<uint32_t> plain =
      Library(daemon.endpoint(), true).TopK(sequence.id(), layer, selection);
  selection.rerank_factor = 8.0f;
  EXPECT_NE(Library(daemon.endpoint(), true).TopK(sequence.id(), layer, selection), plain);
  EXPECT_EQ(Library(daemon.endpoint(), false).TopK(sequence.id(), layer, selection), plain);
  selection.rerank_factor = -7.0f;
  EXPECT_EQ(Library(daemon.endpoint(), false).TopK(sequence.id(), layer, selection), plain);
}

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
