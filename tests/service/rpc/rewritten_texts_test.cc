// A refused call of every rpc: its code, its field, a path in the request, and its retry time. They do
// not depend on the words of messages, so this program runs twice (tests/rewritten_texts.h).
#include <type_traits>

#include "kvstore/refusal.h"
#include "pqcached/v1/status_details.pb.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "tests/rewritten_texts.h"
#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;
using kvstore::kNoRetry;
using kvstore::kRetryConflict;
using kvstore::kRetryMemory;
using Kv = v1::KvCache::Stub;
using Admin = v1::Admin::Stub;

constexpr uint64_t kNoId = 999;
constexpr uint64_t kStored = 300;

struct Expected {
  StatusCode code;
  const char* field;
  uint32_t retry_ms = kNoRetry;
};

class RewrittenTextsTest : public RpcTest {
 protected:
  void SetUp() override {
    Start();
    client_ = Connect();
    sequence_id_ = client_->Filled(kStored);
    cache_id_ = client_->OpenCache();
  }
  void TearDown() override { client_.reset(); }

  static void Check(const std::string& what, const grpc::Status& status, const Expected& expected) {
    SCOPED_TRACE(what);
    EXPECT_EQ(status.error_code(), expected.code) << status.error_message();
    const Refused refused = RefusedBy(status);
    EXPECT_EQ(refused.field, expected.field);
    EXPECT_EQ(refused.retry_ms, expected.retry_ms);
    EXPECT_TRUE(HasText(status.error_message(), expected.field)) << status.error_message();
    v1::StatusDetails details;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    EXPECT_EQ(details.code(), status.error_code());
    EXPECT_EQ(details.message(), status.error_message());
  }

  // Calls with a request that `change` makes wrong.
  template <class Stub, class Request, class Response>
  void Refuse(Stub& stub, const std::string& what,
              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const std::function<void(std::type_identity_t<Request>&)>& change,
              const Expected& expected) {
    Request request;
    change(request);
    Response response;
    Check(what, (stub.*method)(client_->Context().get(), request, &response), expected);
  }
  // A call that is meant for another worker.
  template <class Stub, class Request, class Response>
  void RefuseForeign(Stub& stub, const std::string& what,
                     grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                  Response*)) {
    const auto context = client_->Context();
    context->AddMetadata("pqcached-boot", "0123456789abcdef");
    Response response;
    Check(what, (stub.*method)(context.get(), Request(), &response),
          {StatusCode::ABORTED, "pqcached-boot", kRetryConflict});
  }

  grpc::Status Ingest(const std::vector<v1::IngestRequest>& requests) {
    const auto context = client_->Context();
    v1::IngestResponse response;
    const auto writer = client_->kv().Ingest(context.get(), &response);
    for (const v1::IngestRequest& request : requests) writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  }
  v1::IngestRequest Header(uint64_t sequence_id) const {
    v1::IngestRequest request;
    request.mutable_header()->set_sequence_id(sequence_id);
    return request;
  }
  v1::IngestRequest Chunk(uint64_t first_position) const {
    v1::IngestRequest request;
    request.mutable_chunk()->set_first_position(first_position);
    *request.mutable_chunk()->mutable_rows() = RowsOf(1, first_position, 2);
    return request;
  }

  std::unique_ptr<TestClient> client_;
  uint64_t cache_id_ = 0;
  uint64_t sequence_id_ = 0;
};

TEST_F(RewrittenTextsTest, TheFunctionIsReplacedInTheSecondRunAlone) {
  const std::string message = kvstore::MessageOf("field", "text");
  EXPECT_EQ(message, TextsAreRewritten() ? kRewrittenText : "field: text");
}

TEST_F(RewrittenTextsTest, SequencesAndCaches) {
  const StatusCode missing = StatusCode::NOT_FOUND;
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  v1::KvCache::Stub& kv = client_->kv();
  const auto id = [](auto& request) { request.set_sequence_id(kNoId); };
  Refuse(kv, "OpenCache", &Kv::OpenCache,
         [](auto& r) {
           r = CacheRequest("wrong");
           r.mutable_layer_groups(0)->set_key_dim(36);
         },
         {invalid, "layer_groups[0].key_dim"});
  Refuse(kv, "OpenCache", &Kv::OpenCache,
         [](auto& r) {
           r = CacheRequest("wrong");
           *r.mutable_default_index() = Pq(3, 4);
         },
         {invalid, "default_index.pq.subspaces"});
  Refuse(kv, "CreateSequence", &Kv::CreateSequence, [](auto& r) { r.set_cache_id(kNoId); },
         {missing, "cache_id"});
  Refuse(kv, "CreateSequence", &Kv::CreateSequence,
         [&](auto& r) {
           r.set_cache_id(cache_id_);
           *r.mutable_live_index()->mutable_index() = Pq(2, 9);
         },
         {invalid, "live_index.index.pq.bits"});
  Refuse(kv, "DropSequence", &Kv::DropSequence, id, {missing, "sequence_id"});
  Refuse(kv, "TruncateSequence", &Kv::TruncateSequence, id, {missing, "sequence_id"});
  Refuse(kv, "TruncateSequence", &Kv::TruncateSequence,
         [&](auto& r) {
           r.set_sequence_id(sequence_id_);
           r.set_token_count(kStored + 1);
         },
         {invalid, "token_count"});
  Refuse(kv, "ForkSequence", &Kv::ForkSequence, id, {missing, "sequence_id"});
  Refuse(kv, "ForkSequences", &Kv::ForkSequences,
         [](auto& r) { r.add_items()->set_sequence_id(kNoId); }, {missing, "items[0].sequence_id"});
  Refuse(kv, "SuspendSequence", &Kv::SuspendSequence, id, {missing, "sequence_id"});
  Refuse(kv, "ResumeSequence", &Kv::ResumeSequence, id, {missing, "sequence_id"});
  Refuse(kv, "ClosePrefill", &Kv::ClosePrefill, id, {missing, "sequence_id"});
  Refuse(kv, "OpenPageCache", &Kv::OpenPageCache, [](auto& r) { r.set_name("pages"); },
         {invalid, "capacity_bytes"});
  Refuse(kv, "PutPages", &Kv::PutPages, [](auto& r) { r.add_pages()->set_key("short"); },
         {invalid, "pages[0].data"});
  Refuse(kv, "PutPages", &Kv::PutPages,
         [](auto& r) {
           r.add_pages()->set_key("short");
           r.mutable_pages(0)->set_content("bytes");
         },
         {invalid, "pages[0].key"});
  Refuse(kv, "GetPages", &Kv::GetPages, [](auto& r) { r.add_pages()->set_key("short"); },
         {invalid, "pages[0].key"});
  Refuse(kv, "FindPages", &Kv::FindPages, [](auto& r) { r.add_keys("short"); },
         {invalid, "keys[0]"});
  Refuse(kv, "FindPages", &Kv::FindPages,
         [](auto& r) {
           r.add_keys("a key of 16 bytes");
           r.set_lease_ms(3600001);
         },
         {invalid, "lease_ms"});
  Refuse(kv, "FindPages", &Kv::FindPages, [](auto& r) { r.add_keys("a key of 16 bytes"); },
         {missing, "cache_id"});
  Refuse(kv, "MatchPrefix", &Kv::MatchPrefix, [](auto& r) { r.set_cache_id(kNoId); },
         {missing, "cache_id"});
  Refuse(kv, "MatchPrefix", &Kv::MatchPrefix,
         [&](auto& r) {
           r.set_cache_id(cache_id_);
           r.set_extra_key(std::string(257, 'k'));
         },
         {invalid, "extra_key"});
  v1::WatchEventsRequest watch;
  watch.set_cache_id(kNoId);
  const auto context = client_->Context();
  Check("WatchEvents", kv.WatchEvents(context.get(), watch)->Finish(), {missing, "cache_id"});
  Refuse(kv, "Admit", &Kv::Admit, [](auto& r) { r.set_cache_id(kNoId); }, {missing, "cache_id"});
}

TEST_F(RewrittenTextsTest, RowsAndIndexes) {
  const StatusCode missing = StatusCode::NOT_FOUND;
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  v1::KvCache::Stub& kv = client_->kv();
  Check("no header", Ingest({Chunk(kStored)}), {invalid, "header"});
  Check("no sequence", Ingest({Header(kNoId)}), {missing, "header.sequence_id"});
  // A refusal of first_position is about the chunk, and not about its rows.
  Check("gap", Ingest({Header(sequence_id_), Chunk(kStored + 1)}),
        {invalid, "chunk.first_position"});
  v1::IngestRequest bad = Chunk(kStored);
  *bad.mutable_chunk()->mutable_rows()->mutable_keys() = FloatTensor({2, kKvHeads, 8}, 1);
  Check("shape", Ingest({Header(sequence_id_), bad}), {invalid, "chunk.rows.keys.shape"});
  Refuse(kv, "Commit", &Kv::Commit, [](auto& r) { r.set_sequence_id(kNoId); }, {invalid, "rows"});
  Refuse(kv, "Commit", &Kv::Commit,
         [&](auto& r) {
           r.set_sequence_id(sequence_id_);
           r.set_first_position(kStored + 1);
           *r.add_rows() = RowsOf(1, 0, 2);
           r.mutable_rows(0)->mutable_keys()->mutable_staging();
         },
         {StatusCode::FAILED_PRECONDITION, "rows[0].keys.staging"});
  const auto append = [&](v1::AppendRequest& r, uint64_t sequence_id) {
    v1::SequenceAppend* item = r.add_items();
    item->set_sequence_id(sequence_id);
    item->set_first_position(kStored);
    for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, kStored, 1);
  };
  Refuse(kv, "Append", &Kv::Append, [](auto&) {}, {invalid, "items"});
  // The blamed item is the second one.
  Refuse(kv, "Append", &Kv::Append,
         [&](auto& r) {
           append(r, sequence_id_);
           append(r, kNoId);
         },
         {missing, "items[1].sequence_id"});
  Refuse(kv, "Append", &Kv::Append,
         [&](auto& r) {
           append(r, sequence_id_);
           r.mutable_items(0)->mutable_lease()->set_lease_id(77);
         },
         {StatusCode::FAILED_PRECONDITION, "items[0].lease"});
  const auto build = [&](const std::function<void(v1::BuildIndexRequest&)>& change) {
    v1::BuildIndexRequest request;
    request.set_sequence_id(sequence_id_);
    *request.mutable_index() = Pq(2, 4);
    change(request);
    const auto context = client_->Context();
    return kv.BuildIndex(context.get(), request)->Finish();
  };
  Check("BuildIndex", build([](auto& r) { r.set_sequence_id(kNoId); }), {missing, "sequence_id"});
  Check("BuildIndex", build([](auto& r) { *r.mutable_index() = Pq(3, 4); }),
        {invalid, "index.pq.subspaces"});
}

TEST_F(RewrittenTextsTest, Reads) {
  const StatusCode missing = StatusCode::NOT_FOUND;
  const StatusCode invalid = StatusCode::INVALID_ARGUMENT;
  const StatusCode beyond = StatusCode::OUT_OF_RANGE;
  v1::KvCache::Stub& kv = client_->kv();
  const v1::Query query = QueryAt(sequence_id_, 1, kStored - 1);
  Refuse(kv, "TopK", &Kv::TopK,
         [&](auto& r) {
           *r.add_items()->mutable_query() = query;
           r.mutable_items(0)->mutable_selection()->set_token_ratio(1.5);
         },
         {invalid, "items[0].selection.token_ratio"});
  Refuse(kv, "TopK", &Kv::TopK,
         [&](auto& r) {
           *r.add_items()->mutable_query() = query;
           *r.mutable_items(0)->mutable_selection() = TokenCountSelection(Pq(4, 4), 4, 16, 20);
         },
         {StatusCode::FAILED_PRECONDITION, "items[0].selection.index"});
  Refuse(kv, "Score", &Kv::Score,
         [&](auto& r) {
           *r.add_items()->mutable_query() = query;
           r.mutable_items(0)->mutable_tokens()->set_end(kStored + 1);
         },
         {beyond, "items[0].tokens"});
  Refuse(kv, "FetchBlocks", &Kv::FetchBlocks,
         [&](auto& r) {
           r.set_sequence_id(sequence_id_);
           r.set_layer(1);
           r.add_ranges()->set_end(1);
           r.add_ranges()->set_end(kStored + 1);
         },
         {beyond, "ranges[1]"});
  Refuse(kv, "FetchTokens", &Kv::FetchTokens,
         [&](auto& r) {
           r.set_sequence_id(sequence_id_);
           r.set_layer(3);
           r.set_count(1);
           for (int i = 0; i < 2; ++i) r.add_positions(0);
         },
         {invalid, "layer"});
  Refuse(kv, "Attend", &Kv::Attend,
         [&](auto& r) {
           *r.add_items()->mutable_query() = query;
           v1::TokenPositions* positions = r.mutable_items(0)->mutable_positions();
           positions->set_count(1);
           positions->add_positions(0);
           positions->add_positions(kStored);
         },
         {beyond, "items[0].positions.positions[1]"});
  Refuse(kv, "AttendRange", &Kv::AttendRange,
         [&](auto& r) {
           *r.add_items()->mutable_query() = query;
           r.mutable_items(0)->mutable_tokens()->set_end(kStored + 1);
         },
         {beyond, "items[0].tokens"});
  Refuse(kv, "Attach", &Kv::Attach, [](auto& r) { r.set_sequence_id(kNoId); },
         {missing, "sequence_id"});
  Refuse(kv, "Attach", &Kv::Attach, [&](auto& r) { r.set_sequence_id(sequence_id_); },
         {StatusCode::FAILED_PRECONDITION, "pqcached-session"});
  Refuse(kv, "Detach", &Kv::Detach, [](auto& r) { r.set_lease_id(77); },
         {StatusCode::FAILED_PRECONDITION, "pqcached-session"});
}

TEST_F(RewrittenTextsTest, Administration) {
  const StatusCode missing = StatusCode::NOT_FOUND;
  v1::Admin::Stub& admin = client_->admin();
  const auto id = [](auto& request) { request.set_sequence_id(kNoId); };
  Refuse(admin, "DescribeSequence", &Admin::DescribeSequence, id, {missing, "sequence_id"});
  Refuse(admin, "Evict", &Admin::Evict, id, {missing, "sequence_id"});
  Refuse(admin, "Pin", &Admin::Pin, id, {missing, "sequence_id"});
  Refuse(admin, "Pin", &Admin::Pin, [](auto& r) { r.set_ttl_ms(uint64_t{1} << 60); },
         {StatusCode::INVALID_ARGUMENT, "ttl_ms"});
  Refuse(admin, "SetLogLevel", &Admin::SetLogLevel, [](auto& r) { r.set_level("loud"); },
         {StatusCode::INVALID_ARGUMENT, "level"});
}

// What a client makes UNAVAILABLE of.
TEST_F(RewrittenTextsTest, CallsForAnotherWorker) {
  v1::KvCache::Stub& kv = client_->kv();
  RefuseForeign(kv, "OpenCache", &Kv::OpenCache);
  RefuseForeign(kv, "CreateSequence", &Kv::CreateSequence);
  RefuseForeign(kv, "DropSequence", &Kv::DropSequence);
  RefuseForeign(kv, "TruncateSequence", &Kv::TruncateSequence);
  RefuseForeign(kv, "ForkSequence", &Kv::ForkSequence);
  RefuseForeign(kv, "ForkSequences", &Kv::ForkSequences);
  RefuseForeign(kv, "SuspendSequence", &Kv::SuspendSequence);
  RefuseForeign(kv, "ResumeSequence", &Kv::ResumeSequence);
  RefuseForeign(kv, "MatchPrefix", &Kv::MatchPrefix);
  RefuseForeign(kv, "OpenPageCache", &Kv::OpenPageCache);
  RefuseForeign(kv, "PutPages", &Kv::PutPages);
  RefuseForeign(kv, "GetPages", &Kv::GetPages);
  RefuseForeign(kv, "FindPages", &Kv::FindPages);
  RefuseForeign(kv, "Commit", &Kv::Commit);
  RefuseForeign(kv, "Append", &Kv::Append);
  RefuseForeign(kv, "ClosePrefill", &Kv::ClosePrefill);
  RefuseForeign(kv, "TopK", &Kv::TopK);
  RefuseForeign(kv, "Score", &Kv::Score);
  RefuseForeign(kv, "FetchBlocks", &Kv::FetchBlocks);
  RefuseForeign(kv, "FetchTokens", &Kv::FetchTokens);
  RefuseForeign(kv, "Attend", &Kv::Attend);
  RefuseForeign(kv, "AttendRange", &Kv::AttendRange);
  RefuseForeign(kv, "Attach", &Kv::Attach);
  RefuseForeign(kv, "Detach", &Kv::Detach);
  RefuseForeign(kv, "Admit", &Kv::Admit);
  v1::Admin::Stub& admin = client_->admin();
  RefuseForeign(admin, "GetServerInfo", &Admin::GetServerInfo);
  RefuseForeign(admin, "ListCaches", &Admin::ListCaches);
  RefuseForeign(admin, "ListSequences", &Admin::ListSequences);
  RefuseForeign(admin, "DescribeSequence", &Admin::DescribeSequence);
  RefuseForeign(admin, "Stats", &Admin::Stats);
  RefuseForeign(admin, "SetLogLevel", &Admin::SetLogLevel);
  RefuseForeign(admin, "ListLeases", &Admin::ListLeases);
  RefuseForeign(admin, "Evict", &Admin::Evict);
  RefuseForeign(admin, "Pin", &Admin::Pin);
  RefuseForeign(admin, "Drain", &Admin::Drain);
  RefuseForeign(admin, "SelfTest", &Admin::SelfTest);
}

TEST_F(RewrittenTextsTest, DrainsAreWorthWaitingFor) {
  v1::DrainResponse drained;
  ASSERT_TRUE(client_->admin().Drain(client_->Context().get(), {}, &drained).ok());
  Refuse(client_->kv(), "CreateSequence", &Kv::CreateSequence, [](auto&) {},
         {StatusCode::UNAVAILABLE, "", kRetryMemory});
}

TEST_F(RewrittenTextsTest, SessionsAreUnknown) {
  grpc::ClientContext context;
  context.AddMetadata("pqcached-session", "unknown");
  v1::OpenCacheResponse response;
  Check("OpenCache", client_->kv().OpenCache(&context, CacheRequest(), &response),
        {StatusCode::UNAUTHENTICATED, "pqcached-session"});
  grpc::ClientContext stream_context;
  const auto stream = client_->kv().Session(&stream_context);
  v1::SessionRequest open;
  open.mutable_open()->set_protocol_version(1);
  open.mutable_open()->set_tenant("Not A Tenant");
  stream->Write(open);
  Check("Session", stream->Finish(), {StatusCode::INVALID_ARGUMENT, "open.tenant"});
}

// The details as tools see them that know google.rpc alone.
TEST(WireDetailsTest, FieldAndRetryTimeAreThereWhereTheRefusalHasThem) {
  const auto types_of = [](const absl::Status& status) {
    v1::StatusDetails details;
    EXPECT_TRUE(details.ParseFromString(ToGrpc(status).error_details()));
    std::vector<std::string> types;
    for (const google::protobuf::Any& detail : details.details())
      types.push_back(detail.type_url());
    return types;
  };
  const std::string prefix = "type.googleapis.com/google.rpc.";
  using Types = std::vector<std::string>;
  EXPECT_EQ(types_of(Internal("broken")), Types());
  EXPECT_EQ(types_of(absl::UnknownError("of another library")), Types());
  EXPECT_EQ(types_of(InvalidArgument("count", "0")), Types{prefix + "BadRequest"});
  EXPECT_EQ(types_of(Unavailable("", "draining", 1000)), Types{prefix + "RetryInfo"});
  EXPECT_EQ(types_of(Aborted("sequence_id", "in use", 10)),
            (Types{prefix + "BadRequest", prefix + "RetryInfo"}));
  const Refused refused = RefusedBy(ToGrpc(Aborted("sequence_id", "in use", 2'010)));
  EXPECT_EQ(refused.field, "sequence_id");
  EXPECT_EQ(refused.text, "in use");
  EXPECT_EQ(refused.retry_ms, 2'010u);
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).error_details().empty());
}

}  // namespace
}  // namespace pqcached::service
