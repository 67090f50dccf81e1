// A server whose store can be held up, and what tests of its life ask again and again.
#ifndef PQCACHED_TESTS_SERVICE_RPC_LIFECYCLE_FIXTURE_H_
#define PQCACHED_TESTS_SERVICE_RPC_LIFECYCLE_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_replace.h"
#include "tests/service/rpc/hooked_store.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {

class LifecycleTest : public RpcTest {
 protected:
  ~LifecycleTest() override { server_.reset(); }

  void StartHooked(const std::function<void(Config&)>& change = {}) {
    Start(change, [this](std::unique_ptr<kvstore::Store> store) {
      return std::make_unique<HookedStore>(std::move(store), hooks_);
    });
  }

  static v1::StatsResponse Stats(TestClient& client) {
    v1::StatsResponse stats;
    EXPECT_TRUE(client.admin().Stats(client.Context().get(), {}, &stats).ok());
    return stats;
  }

  // Asks until the answer is the wanted one: for what the server learns in its own time.
  static void AwaitSessions(TestClient& client, uint32_t count) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (Stats(client).session_count() != count || Stats(client).sequence_count() != count) {
      ASSERT_LT(std::chrono::steady_clock::now(), until)
          << "sessions: " << Stats(client).session_count();
    }
  }

  // All of a sequence but whether its tail is open: a build that fails leaves that closed, nothing else.
  static std::string DumpButTail(TestClient& client, uint64_t sequence_id) {
    return absl::StrReplaceAll(Dump(client, sequence_id), {{" state: SEGMENT_STATE_CLOSED", ""},
                                                           {" state: SEGMENT_STATE_SEALED", ""}});
  }

  // Once the build whose caller has gone is wound up, which must not take long.
  static void ExpectDumpAfterBuild(TestClient& client, uint64_t sequence_id,
                                   const std::string& wanted) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (Stats(client).builds_in_flight() != 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_EQ(DumpButTail(client, sequence_id), wanted) << "the build left something behind";
  }

  // Until a file has the text.
  static void AwaitText(const std::string& path, const std::string& text) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (std::string all; all.find(text) == std::string::npos; std::this_thread::yield()) {
      ASSERT_LT(std::chrono::steady_clock::now(), until) << all;
      std::ifstream file(path);
      all.assign(std::istreambuf_iterator<char>(file), {});
    }
  }

  // Until no writer has the sequence: truncating to where it ends changes nothing.
  static void AwaitWriters(TestClient& client, uint64_t sequence_id, uint64_t token_count) {
    v1::TruncateSequenceRequest request;
    request.set_sequence_id(sequence_id);
    request.set_token_count(token_count);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (true) {
      v1::TruncateSequenceResponse response;
      const grpc::Status status =
          client.kv().TruncateSequence(client.Context().get(), request, &response);
      if (status.error_code() != grpc::StatusCode::ABORTED) {
        EXPECT_TRUE(status.ok()) << status.error_message();
        return;
      }
      ASSERT_LT(std::chrono::steady_clock::now(), until);
    }
  }

  static grpc::Status TopK(TestClient& client, uint64_t sequence_id,
                           std::chrono::milliseconds timeout) {
    v1::TopKRequest request;
    *request.add_items()->mutable_query() = QueryAt(sequence_id, 1, 9);
    *request.mutable_items(0)->mutable_selection() = TokenCountSelection(Flat(), 1, 1, 2);
    v1::TopKResponse response;
    const auto context = client.Context();
    context->set_deadline(std::chrono::system_clock::now() + timeout);
    return client.kv().TopK(context.get(), request, &response);
  }

  StoreHooks hooks_;
};

inline constexpr auto kLong = std::chrono::milliseconds(60'000);

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_RPC_LIFECYCLE_FIXTURE_H_
