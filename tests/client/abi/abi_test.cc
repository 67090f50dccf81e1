// What the C ABI promises without a sidecar: sizes of structs, refusals, and what the library shows
// to the loader.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "pqcached/client.h"
#include "pqcached/client.hpp"

namespace {

using testing::Test;

::testing::AssertionResult Has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" has no \"" << part << '"';
}

// A pqc_ struct followed by bytes of a later version.
template <class Struct>
struct Later {
  Struct known;
  std::array<unsigned char, 16> tail;
};

pqc_client_options Options() {
  pqc_client_options options = PQC_INIT(pqc_client_options);
  options.endpoint = "unix:///nonexistent/pqcached.sock";
  return options;
}

TEST(AbiTest, StructsHaveAtLeastTheSizesOf01) {
  // The sizes of 0.1. Structs grow at their ends (tests/abi), except members of others.
  EXPECT_GE(sizeof(pqc_block_table), 40u);
  EXPECT_EQ(sizeof(pqc_tensor), 80u);
  EXPECT_GE(sizeof(pqc_client_options), 96u);
  EXPECT_GE(sizeof(pqc_layer_group), 88u);
  EXPECT_EQ(sizeof(pqc_index), 40u);
  EXPECT_GE(sizeof(pqc_cache_spec), 120u);
  EXPECT_GE(sizeof(pqc_sequence_info), 56u);
  EXPECT_GE(sizeof(pqc_layer_rows), 176u);
  EXPECT_GE(sizeof(pqc_build_progress), 64u);
  EXPECT_GE(sizeof(pqc_build_options), 104u);
  EXPECT_GE(sizeof(pqc_selection), 104u);
  EXPECT_GE(sizeof(pqc_query), 104u);
  EXPECT_EQ(sizeof(pqc_positions), 48u);
  EXPECT_GE(sizeof(pqc_attention), 88u);
  EXPECT_GE(sizeof(pqc_client_counts), 40u);
  EXPECT_GE(sizeof(pqc_sequence_options), 128u);
  EXPECT_GE(sizeof(pqc_step_item), 32u);
  EXPECT_GE(sizeof(pqc_step_options), 24u);
  EXPECT_GE(sizeof(pqc_step_positions), 48u);
  EXPECT_GE(sizeof(pqc_step_attention), 48u);
  EXPECT_EQ(offsetof(pqc_tensor, stream), 56u);
  EXPECT_EQ(offsetof(pqc_selection, token_count), 96u);
  EXPECT_EQ(offsetof(pqc_attention, selected), 40u);
  EXPECT_EQ(pqc_abi_version(), PQC_ABI_VERSION);
}

TEST(AbiTest, StatusesHaveNames) {
  EXPECT_STREQ(pqc_status_name(PQC_OK), "OK");
  EXPECT_STREQ(pqc_status_name(PQC_UNAUTHENTICATED), "UNAUTHENTICATED");
  EXPECT_STREQ(pqc_status_name(static_cast<pqc_status>(17)), "UNKNOWN_STATUS");
}

TEST(AbiTest, NullArgumentsAreRefusedByName) {
  pqc_client* client = nullptr;
  pqc_client_options options = PQC_INIT(pqc_client_options);
  EXPECT_EQ(pqc_client_open(nullptr, &client), PQC_INVALID_ARGUMENT);
  EXPECT_TRUE(Has(pqc_last_error(), "options"));
  EXPECT_EQ(pqc_client_open(&options, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_TRUE(Has(pqc_last_error(), "client"));
  EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT);
  EXPECT_TRUE(Has(pqc_last_error(), "options.endpoint"));
  EXPECT_EQ(client, nullptr);

  pqc_cache* cache = nullptr;
  pqc_sequence* sequence = nullptr;
  char* answer = nullptr;
  EXPECT_EQ(pqc_cache_open(nullptr, nullptr, &cache), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_sequence_create(nullptr, &sequence), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_admin_json(nullptr, "Stats", "{}", &answer), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_sequence_truncate(nullptr, 0), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_sequence_describe(nullptr, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_ingest(nullptr, 0, 0, nullptr, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_append(nullptr, 0, nullptr, 0, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_build_index(nullptr, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_index_make("pq", nullptr, 0, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_client_index_make(nullptr, "sq", nullptr, 0, nullptr), PQC_INVALID_ARGUMENT);
  pqc_index index = PQC_INIT(pqc_index);
  EXPECT_EQ(pqc_index_make(nullptr, nullptr, 0, &index), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_index_make("pq", nullptr, 1, &index), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_topk(nullptr, nullptr, nullptr, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_score(nullptr, nullptr, nullptr, {0, 1}, nullptr, 0, nullptr, nullptr),
            PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_fetch_blocks(nullptr, 0, {0, 1}, PQC_ROW, nullptr, 0), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_fetch_tokens(nullptr, 0, nullptr, 0, PQC_ROW, nullptr, 0), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_attend(nullptr, nullptr, nullptr, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(pqc_attend_positions(nullptr, nullptr, nullptr, 0, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_STRNE(pqc_last_error(), "");
}

TEST(AbiTest, NullHandlesMayBeClosed) {
  pqc_client_close(nullptr);
  pqc_cache_close(nullptr);
  EXPECT_EQ(pqc_sequence_drop(nullptr), PQC_OK);
  pqc_free(nullptr);
}

TEST(AbiTest, StructsOfALaterVersionAreReadWhenTheirNewFieldsAreZero) {
  Later<pqc_client_options> options = {Options(), {}};
  options.known.struct_size = sizeof(options);
  options.known.endpoint = "nonsense";  // found only after the size was accepted
  pqc_client* client = nullptr;
  EXPECT_EQ(pqc_client_open(&options.known, &client), PQC_INVALID_ARGUMENT);
  EXPECT_TRUE(Has(pqc_last_error(), "options.endpoint: \"nonsense\""));
  options.tail[15] = 1;
  EXPECT_EQ(pqc_client_open(&options.known, &client), PQC_UNIMPLEMENTED);
  EXPECT_TRUE(Has(pqc_last_error(), "options: bytes 136 to 152"));
}

TEST(AbiTest, StructsOfNoSizeOrTooSmallOnesAreRefused) {
  pqc_client* client = nullptr;
  pqc_client_options options = Options();
  for (const size_t size : {size_t{0}, size_t{8}, size_t{95}, size_t{1} << 40}) {
    options.struct_size = size;
    EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT) << size;
    EXPECT_TRUE(Has(pqc_last_error(), "options.struct_size: " + std::to_string(size)));
  }
}

TEST(AbiTest, EndpointsBeyondThisHostNeedTls) {
  pqc_client* client = nullptr;
  pqc_client_options options = Options();
  for (const char* endpoint : {"example.org:5000", "10.0.0.1:5000", "0.0.0.0:80"}) {
    options.endpoint = endpoint;
    EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT) << endpoint;
    EXPECT_TRUE(Has(pqc_last_error(), "options.tls_ca")) << pqc_last_error();
  }
  for (const char* endpoint : {"", "unix:", "host", ":80", "host:"}) {
    options.endpoint = endpoint;
    EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT) << endpoint;
    EXPECT_TRUE(Has(pqc_last_error(), "options.endpoint"));
  }
}

TEST(AbiTest, OptionsOfTlsBelongTogether) {
  const auto refused_field = [](const std::function<void(pqc_client_options&)>& change) {
    pqc_client* client = nullptr;
    pqc_client_options options = Options();
    options.endpoint = "10.0.0.1:5000";
    options.tls_ca = "/no/such/ca.pem";
    change(options);
    EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT);
    return std::string(pqc_last_error_field());
  };
  EXPECT_EQ(refused_field([](auto& o) { o.endpoint = "unix:///tmp/s"; }), "options.tls_ca");
  EXPECT_EQ(refused_field([](auto& o) { o.tls_key = "/key"; }), "options.tls_key");
  EXPECT_EQ(refused_field([](auto& o) { o.tls_certificate = "/pem"; }), "options.tls_key");
  EXPECT_EQ(refused_field([](auto& o) {
              o.tls_ca = nullptr;
              o.token_file = "/token";
            }),
            "options.token_file");
}

TEST(AbiTest, TenantsAndClientNamesHaveLimits) {
  pqc_client* client = nullptr;
  pqc_client_options options = Options();
  const std::string long_tenant(65, 'a');
  for (const char* tenant : {"", "Upper", "sl/ash", long_tenant.c_str()}) {
    options.tenant = tenant;
    EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT) << tenant;
    EXPECT_TRUE(Has(pqc_last_error(), "options.tenant"));
  }
  options.tenant = nullptr;
  const std::string long_name(129, 'n');
  options.client_name = long_name.c_str();
  EXPECT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT);
  EXPECT_TRUE(Has(pqc_last_error(), "options.client_name"));
}

TEST(AbiTest, AnRpcLibraryThatCannotBeLoadedIsNamed) {
  pqc_client* client = nullptr;
  pqc_client_options options = Options();
  options.rpc_library_path = "/nonexistent/libpqcached_rpc.so";
  EXPECT_EQ(pqc_client_open(&options, &client), PQC_FAILED_PRECONDITION);
  EXPECT_TRUE(Has(pqc_last_error(), "/nonexistent/libpqcached_rpc.so"));
  options.rpc_library_path = "libm.so.6";
  EXPECT_EQ(pqc_client_open(&options, &client), PQC_FAILED_PRECONDITION);
  EXPECT_TRUE(Has(pqc_last_error(), "libm.so.6 has no pqcached_rpc_entry"));
}

TEST(AbiTest, LastErrorBelongsToItsThreadAndIsClearedBySuccess) {
  pqc_client* client = nullptr;
  EXPECT_EQ(pqc_client_open(nullptr, &client), PQC_INVALID_ARGUMENT);
  std::thread([] { EXPECT_STREQ(pqc_last_error(), ""); }).join();
  EXPECT_STRNE(pqc_last_error(), "");
  EXPECT_EQ(pqc_sequence_drop(nullptr), PQC_OK);
  EXPECT_STREQ(pqc_last_error(), "");
}

TEST(AbiTest, FailuresInManyThreadsKeepTheirOwnReasons) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      const std::string tenant = "Bad" + std::to_string(i);
      pqc_client* client = nullptr;
      pqc_client_options options = Options();
      options.endpoint = tenant.c_str();
      for (int repeat = 0; repeat < 200; ++repeat) {
        ASSERT_EQ(pqc_client_open(&options, &client), PQC_INVALID_ARGUMENT);
        ASSERT_TRUE(Has(pqc_last_error(), tenant));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(AbiTest, IndexesAreMadeFromTypedParameters) {
  const auto made = pqcached::Index::Make("pq", {{"subspaces", 2}, {"layout", "contiguous"}});
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  EXPECT_EQ(made->kind, PQC_INDEX_PQ);
  EXPECT_EQ(made->subspaces, 2u);
  EXPECT_EQ(made->bits, 8u);  // the default
  EXPECT_EQ(made->reserved[PQC_INDEX_LAYOUT], PQC_SUBSPACES_CONTIGUOUS);
  EXPECT_EQ(pqcached::Index::Make("flat")->kind, PQC_INDEX_FLAT);
  for (const auto& [type, parameter, field] :
       std::vector<std::tuple<std::string, pqcached::IndexParameter, std::string>>{
           {"hnsw", {"m", 16}, "type"},
           {"pq", {"lists", 16}, "parameters[lists]"},
           {"flat", {"bits", 4}, "parameters[bits]"},
           {"pq", {"bits", 0}, "parameters[bits]"},
           {"pq", {"bits", (uint64_t{1} << 32) + 4}, "parameters[bits]"},
           {"pq", {"layout", "odd"}, "parameters[layout]"},
           {"pq", {"layout", 1}, "parameters[layout]"}}) {
    const auto refused = pqcached::Index::Make(type, {parameter});
    EXPECT_EQ(refused.status().code(), PQC_INVALID_ARGUMENT) << type << " " << parameter.name;
    EXPECT_EQ(refused.status().field(), field);
  }
  EXPECT_EQ(pqcached::Index::Make("pq", {{"bits", 4}, {"bits", 4}}).status().field(),
            "parameters[bits]");
}

}  // namespace
