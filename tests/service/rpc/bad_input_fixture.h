// Bad input of every kind gets the documented status, its details name the field, and the store is
// byte for byte as before: the good calls that the tests spoil, one field at a time.
#ifndef PQCACHED_TESTS_SERVICE_RPC_BAD_INPUT_FIXTURE_H_
#define PQCACHED_TESTS_SERVICE_RPC_BAD_INPUT_FIXTURE_H_

#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "tests/service/rpc/rpc_fixture.h"

namespace pqcached::service {

inline constexpr uint64_t kTokens = 300;

class BadInputTest : public RpcTest {
 protected:
  void SetUp() override {
    Start();
    client_ = Connect();
    sequence_id_ = client_->Filled(kTokens);
    client_->Build(sequence_id_, Pq(4, 4));
    open_id_ = client_->Filled(kTokens);  // without an index: its prefill is open
    before_ = Dump(*client_, sequence_id_) + Dump(*client_, open_id_);
  }

  void TearDown() override { client_.reset(); }

  // Holds a status against what is expected of it, and the store against what it was.
  void Check(const std::string& what, const grpc::Status& status, grpc::StatusCode code,
             const std::string& field, const std::string& words = "") {
    EXPECT_TRUE(Failed(status, code, field, words)) << what;
    EXPECT_TRUE(Dump(*client_, sequence_id_) + Dump(*client_, open_id_) == before_)
        << what << " changed the store";
  }

  // Sends good rows of layer 1 and then the changed ones of layer 4: neither may stay.
  void CheckIngest(const std::string& what, const std::function<void(v1::IngestChunk&)>& change,
                   grpc::StatusCode code, const std::string& field, const std::string& words = "") {
    const auto context = client_->Context();
    v1::IngestResponse response;
    const auto writer = client_->kv().Ingest(context.get(), &response);
    v1::IngestRequest request;
    request.mutable_header()->set_sequence_id(open_id_);
    writer->Write(request);
    for (const uint32_t layer : kLayers) {
      v1::IngestChunk* chunk = request.mutable_chunk();
      chunk->Clear();
      chunk->set_first_position(kTokens);
      *chunk->mutable_rows() = RowsOf(layer, kTokens, 3);
      if (layer == 4) change(*chunk);
      writer->Write(request);
    }
    writer->WritesDone();
    Check(what, writer->Finish(), code, field, words);
  }

  void CheckAppend(const std::string& what, const std::function<void(v1::SequenceAppend&)>& change,
                   grpc::StatusCode code, const std::string& field, const std::string& words = "") {
    v1::AppendRequest request;
    v1::SequenceAppend* item = request.add_items();
    item->set_sequence_id(sequence_id_);
    item->set_first_position(kTokens);
    for (const uint32_t layer : kLayers) *item->add_rows() = RowsOf(layer, kTokens, 2);
    change(*item);
    v1::AppendResponse response;
    Check(what, client_->kv().Append(client_->Context().get(), request, &response), code, field,
          words);
  }

  // Changes one good TopK item; the same change must fail in Attend too.
  void CheckSelect(const std::string& what,
                   const std::function<void(v1::Query&, v1::Selection&)>& change,
                   grpc::StatusCode code, const std::string& field, const std::string& words = "") {
    v1::Query query = QueryAt(sequence_id_, 4, kTokens - 1);
    v1::Selection selection = TokenCountSelection(Pq(4, 4), 4, 16, 20);
    change(query, selection);
    v1::TopKRequest top_k;
    *top_k.add_items()->mutable_query() = QueryAt(sequence_id_, 1, kTokens - 1);
    *top_k.mutable_items(0)->mutable_selection() = TokenCountSelection(Pq(4, 4), 4, 16, 20);
    *top_k.add_items()->mutable_query() = query;
    *top_k.mutable_items(1)->mutable_selection() = selection;
    v1::TopKResponse selected;
    Check("TopK: " + what, client_->kv().TopK(client_->Context().get(), top_k, &selected), code,
          "items[1]" + field, words);
    v1::AttendRequest attend;
    *attend.add_items()->mutable_query() = query;
    *attend.mutable_items(0)->mutable_selection() = selection;
    v1::AttendResponse attention;
    Check("Attend: " + what, client_->kv().Attend(client_->Context().get(), attend, &attention),
          code, "items[0]" + field, words);
  }

  void CheckFetchTokens(const std::string& what,
                        const std::function<void(v1::FetchTokensRequest&)>& change,
                        grpc::StatusCode code, const std::string& field,
                        const std::string& words = "") {
    v1::FetchTokensRequest request;
    request.set_sequence_id(sequence_id_);
    request.set_layer(4);
    request.set_count(2);
    for (const uint32_t position : {1, 2, 3, 4}) request.add_positions(position);
    change(request);
    v1::FetchTokensResponse response;
    Check("FetchTokens: " + what,
          client_->kv().FetchTokens(client_->Context().get(), request, &response), code, field,
          words);
  }

  void CheckAttendPositions(const std::string& what,
                            const std::function<void(v1::TokenPositions&)>& change,
                            grpc::StatusCode code, const std::string& field) {
    v1::AttendRequest request;
    *request.add_items()->mutable_query() = QueryAt(sequence_id_, 4, kTokens - 1);
    v1::TokenPositions* positions = request.mutable_items(0)->mutable_positions();
    positions->set_count(2);
    for (const uint32_t position : {1, 2, 3, 4}) positions->add_positions(position);
    change(*positions);
    v1::AttendResponse response;
    Check("Attend: " + what, client_->kv().Attend(client_->Context().get(), request, &response),
          code, field);
  }

  // Changes the positions and logits of one good item.
  void CheckLogits(const std::string& what,
                   const std::function<void(v1::Tensor&, v1::TokenPositions&)>& change,
                   grpc::StatusCode code, const std::string& field) {
    v1::AttendRequest request;
    v1::AttendItem* item = request.add_items();
    *item->mutable_query() = QueryAt(sequence_id_, 4, kTokens - 1);
    v1::TokenPositions* positions = item->mutable_positions();
    positions->set_count(2);
    for (const uint32_t position : {1, 2, 3, 4}) positions->add_positions(position);
    v1::Tensor* logits = positions->mutable_logits();
    logits->set_dtype(v1::DTYPE_FLOAT32);
    for (const uint64_t size : {uint64_t{1}, item->query().queries().shape(1), uint64_t{2}}) {
      logits->add_shape(size);
    }
    logits->set_inline_data(std::string(logits->shape(1) * 2 * sizeof(float), '\0'));
    item->mutable_query()->clear_queries();
    v1::AttendResponse response;
    EXPECT_TRUE(client_->kv().Attend(client_->Context().get(), request, &response).ok());
    change(*logits, *positions);
    Check("Attend, logits: " + what,
          client_->kv().Attend(client_->Context().get(), request, &response), code, field);
  }

  // Changes one good AttendRange item, the second of two.
  void CheckAttendRange(const std::string& what,
                        const std::function<void(v1::AttendRangeItem&)>& change,
                        grpc::StatusCode code, const std::string& field) {
    v1::AttendRangeRequest request;
    for (int i = 0; i < 2; ++i) {
      v1::AttendRangeItem* item = request.add_items();
      *item->mutable_query() = QueryAt(sequence_id_, 4, kTokens - 1);
      item->mutable_tokens()->set_end(kTokens);
    }
    change(*request.mutable_items(1));
    v1::AttendRangeResponse response;
    Check("AttendRange: " + what,
          client_->kv().AttendRange(client_->Context().get(), request, &response), code,
          "items[1]" + field);
  }

  grpc::Status Build(const std::function<void(v1::BuildIndexRequest&)>& change) {
    v1::BuildIndexRequest request;
    request.set_sequence_id(sequence_id_);
    *request.mutable_index() = Pq(2, 4);
    change(request);
    const auto context = client_->Context();
    const auto reader = client_->kv().BuildIndex(context.get(), request);
    v1::BuildProgress progress;
    while (reader->Read(&progress)) {
    }
    return reader->Finish();
  }

  std::unique_ptr<TestClient> client_;
  uint64_t sequence_id_ = 0;
  uint64_t open_id_ = 0;
  std::string before_;
};

inline void SetElement(v1::Tensor* tensor, size_t index, float value) {
  std::memcpy(tensor->mutable_inline_data()->data() + index * sizeof(float), &value, sizeof(float));
}

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_RPC_BAD_INPUT_FIXTURE_H_
