// Rpcs about indexes of plug-ins that are gone or switched off: refused by name, or exact.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "kvstore/plugins/plugin_index.h"
#include "kvstore/read/indexes/index_types.h"
#include "pqcached/v1/admin.pb.h"
#include "tests/service/handlers/direct_sidecar.h"

namespace pqcached::service {
namespace {

using testing::HasSubstr;

constexpr uint64_t kTokens = 150;

kvstore::PluginDescription Description() {
  static constexpr pqcached_index_plugin_parameter kParameters[] = {
      {.name = "bits", .text = "bits", .least = 1, .most = 8, .default_value = 4}};
  kvstore::PluginDescription description = {};
  description.name = "zero";
  description.text = "All logits are 0.";
  description.parameters = kParameters;
  description.parameter_count = 1;
  description.codebook_bytes = [](const pqcached_index_plugin_shape*) { return size_t{0}; };
  description.code_bytes = [](const pqcached_index_plugin_shape*) { return size_t{1}; };
  description.train = [](const pqcached_index_plugin_shape*, const float*, uint32_t, uint64_t,
                         void*) {};
  description.encode = [](const pqcached_index_plugin_shape*, const void*, const float*, uint32_t,
                          uint8_t*) {};
  description.score = [](const pqcached_index_plugin_shape*, const void*, const float*,
                         uint32_t queries, const uint8_t*, uint32_t count, float* logits,
                         size_t stride) {
    for (uint32_t i = 0; i < queries; ++i) std::fill_n(logits + i * stride, count, 0.0f);
  };
  return description;
}

class PluginIndexRpcTest : public testing::Test {
 protected:
  PluginIndexRpcTest() {
    Know(&plugin_);
    v1::OpenCacheRequest open = CacheRequest();
    *open.mutable_default_index() = Zero(8);
    v1::OpenCacheResponse opened;
    EXPECT_EQ(Message(open, &opened), "");
    v1::CreateSequenceRequest create;
    create.set_cache_id(opened.cache_id());
    v1::CreateSequenceResponse created;
    EXPECT_EQ(Message(create, &created), "");
    cache_id_ = opened.cache_id();
    id_ = created.sequence_id();
    v1::AppendRequest rows;
    v1::SequenceAppend* item = rows.add_items();
    item->set_sequence_id(id_);
    for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, 0, kTokens);
    v1::AppendResponse appended;
    EXPECT_EQ(Message(rows, &appended), "");
  }
  ~PluginIndexRpcTest() override { Know(nullptr); }

  static void Know(const kvstore::IndexType* type) {
    kvstore::SetPluginTypes({&type, type == nullptr ? 0u : 1u});
  }
  static v1::IndexSpec Zero(uint64_t bits) {
    v1::IndexSpec index;
    index.mutable_typed()->set_type("zero");
    (*index.mutable_typed()->mutable_parameters())["#0"].set_number(bits);
    (*index.mutable_typed()->mutable_parameters())["#3"].set_number(0);
    return index;
  }
  // The text of a refusal with its field, or "".
  std::string Message(const google::protobuf::Message& request,
                      google::protobuf::Message* response) {
    return std::string(sidecar_.Call(client_, request, response).message());
  }

  // Without an index in the request: the handler looks up the default of the cache.
  std::string TopK(v1::TopKResponse* selected) {
    v1::TopKRequest request;
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(id_, kLayers[0], kTokens - 1);
    *item->mutable_selection() = TokenCountSelection(Flat(), 1, 2, 50);
    item->mutable_selection()->clear_index();
    return Message(request, selected);
  }
  std::string ExactTopK(v1::TopKResponse* selected) {
    v1::TopKRequest request;
    v1::TopKItem* item = request.add_items();
    *item->mutable_query() = QueryAt(id_, kLayers[0], kTokens - 1);
    *item->mutable_selection() = TokenCountSelection(Flat(), 1, 2, 50);
    return Message(request, selected);
  }
  std::string Build() {
    v1::BuildIndexRequest request;
    request.set_sequence_id(id_);
    v1::BuildProgress response;
    return Message(request, &response);
  }
  std::string CreateLive() {
    v1::CreateSequenceRequest request;
    request.set_cache_id(cache_id_);
    *request.mutable_live_index()->mutable_index() = Zero(8);
    v1::CreateSequenceResponse response;
    return Message(request, &response);
  }
  std::string DefaultOfCache() {
    v1::ListCachesResponse caches;
    EXPECT_EQ(Message(v1::ListCachesRequest(), &caches), "");
    return caches.caches(0).default_index().typed().ShortDebugString();
  }

  const kvstore::PluginDescription description_ = Description();
  std::atomic<uint32_t> calls_ = 0;
  const kvstore::PluginIndex plugin_{description_, &calls_};
  const kvstore::SwitchedOffIndex off_{description_, "is switched off for this test"};
  DirectSidecar sidecar_;
  const Client client_ = sidecar_.Open("engine");
  uint64_t cache_id_ = 0;
  uint64_t id_ = 0;
};

TEST_F(PluginIndexRpcTest, AsTheDefaultOfACacheItIsBuiltAndSearched) {
  v1::TopKResponse selected;
  EXPECT_THAT(TopK(&selected), HasSubstr("no index zero bits=8"));
  EXPECT_EQ(Build(), "");
  EXPECT_EQ(TopK(&selected), "");
  EXPECT_EQ(CreateLive(), "");
  EXPECT_THAT(DefaultOfCache(), HasSubstr("\"zero\""));
  EXPECT_EQ(calls_, 0u);
}

TEST_F(PluginIndexRpcTest, OfAPluginThatIsGoneEveryCallRefusesItByName) {
  Know(nullptr);
  v1::TopKResponse selected;
  EXPECT_THAT(TopK(&selected), HasSubstr("\"zero\", a plug-in that is not loaded"));
  EXPECT_THAT(Build(), HasSubstr("\"zero\", a plug-in that is not loaded"));
  EXPECT_THAT(CreateLive(), HasSubstr("\"zero\", no such index type"));
  v1::AdmitRequest admit;
  admit.set_cache_id(cache_id_);
  admit.set_token_count(100);
  v1::AdmitResponse admitted;
  Message(admit, &admitted);
  v1::DescribeSequenceRequest describe;
  describe.set_sequence_id(id_);
  v1::DescribeSequenceResponse described;
  EXPECT_EQ(Message(describe, &described), "");
  EXPECT_THAT(DefaultOfCache(), HasSubstr("\"zero\""));
  EXPECT_EQ(ExactTopK(&selected), "");
}

TEST_F(PluginIndexRpcTest, OfAPluginThatIsSwitchedOffSelectionsAreExactAndBuildsRefused) {
  EXPECT_EQ(Build(), "");
  v1::TopKResponse by_zeros, exact, off;
  EXPECT_EQ(TopK(&by_zeros), "");
  EXPECT_EQ(ExactTopK(&exact), "");
  EXPECT_NE(by_zeros.SerializeAsString(), exact.SerializeAsString());
  Know(&off_);
  EXPECT_EQ(TopK(&off), "");
  EXPECT_EQ(off.SerializeAsString(), exact.SerializeAsString());
  EXPECT_THAT(Build(), HasSubstr("index.zero: is switched off for this test"));
  EXPECT_THAT(CreateLive(), HasSubstr("zero is switched off for this test"));
  v1::ListIndexTypesResponse types;
  EXPECT_EQ(Message(v1::ListIndexTypesRequest(), &types), "");
  EXPECT_EQ(types.types_size(), 5);
  EXPECT_FALSE(types.types(4).needs_build());
  EXPECT_THAT(types.types(4).text(), HasSubstr("It is switched off for this test"));
}

}  // namespace
}  // namespace pqcached::service
