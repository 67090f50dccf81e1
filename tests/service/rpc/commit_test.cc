// Rows out of staging: what Ingest, Commit and Append take, and what clients may do to the memory meanwhile.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <atomic>
#include <limits>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/service/rpc/hooked_store.h"
#include "tests/service/session/broker_fixture.h"

namespace pqcached::service {
namespace {

using grpc::StatusCode;

constexpr uint64_t kSlotBytes = 1 << 20;

class CommitTest : public RpcTest {
 protected:
  void SetUp() override {
    Start();
    client_ = std::make_unique<LocalClient>(endpoint());
    cache_id_ = client_->OpenCache();
    sequence_id_ = client_->CreateSequence(cache_id_);
    staging_ = client_->connection().OpenStaging(kSlotBytes, 4);
    ASSERT_NE(staging_.data(), nullptr);
    observer_ = Connect();
  }
  void TearDown() override {
    client_.reset();
    observer_.reset();
  }

  // Rows of both layers in one slot.
  v1::CommitRequest Rows(uint64_t first, uint64_t tokens, uint32_t slot, uint64_t generation) {
    v1::CommitRequest request;
    request.set_sequence_id(sequence_id_);
    request.set_first_position(first);
    uint64_t offset = 0;
    for (const uint32_t layer : kLayers) {
      *request.add_rows() = RowsOf(layer, first, tokens);
      offset = Stage(staging_, kSlotBytes, slot, generation, offset,
                     request.mutable_rows(request.rows_size() - 1));
    }
    return request;
  }
  grpc::Status Commit(const v1::CommitRequest& request, uint64_t* token_count = nullptr) {
    v1::CommitResponse response;
    const grpc::Status status = client_->Rpc(&v1::KvCache::Stub::Commit, request, &response);
    if (token_count != nullptr) *token_count = response.token_count();
    return status;
  }
  // Refused, and nothing has changed.
  void Refuse(const std::string& name, const v1::CommitRequest& request, StatusCode code,
              const std::string& field) {
    SCOPED_TRACE(name);
    const std::string before = Dump(*observer_, sequence_id_);
    EXPECT_TRUE(Failed(Commit(request), code, field));
    EXPECT_EQ(Dump(*observer_, sequence_id_), before);
  }

  // The same rows as chunks of one Ingest, each a message.
  grpc::Status Ingest(const std::vector<v1::CommitRequest>& parts,
                      uint64_t* token_count = nullptr) {
    const auto context = client_->Context();
    v1::IngestResponse response;
    const auto stream = client_->kv().Ingest(context.get(), &response);
    v1::IngestRequest message;
    message.mutable_header()->set_sequence_id(parts.front().sequence_id());
    bool written = stream->Write(message);
    for (const v1::CommitRequest& part : parts) {
      for (const v1::LayerRows& rows : part.rows()) {
        message.mutable_chunk()->set_first_position(part.first_position());
        *message.mutable_chunk()->mutable_rows() = rows;
        written = written && stream->Write(message);
      }
    }
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    if (token_count != nullptr) *token_count = response.token_count();
    return status;
  }
  void RefuseIngest(const std::string& name, const v1::CommitRequest& last, StatusCode code,
                    const std::string& field) {
    SCOPED_TRACE(name);
    const std::string before = Dump(*observer_, sequence_id_);
    EXPECT_TRUE(Failed(Ingest({last}), code, field));
    EXPECT_EQ(Dump(*observer_, sequence_id_), before);
  }

  std::unique_ptr<LocalClient> client_;
  std::unique_ptr<TestClient> observer_;
  uint64_t cache_id_ = 0;
  uint64_t sequence_id_ = 0;
  SharedMapping staging_;
};

TEST_F(CommitTest, StagedRowsAreStoredAsInlineOnes) {
  uint64_t token_count = 0;
  ASSERT_TRUE(Commit(Rows(0, 200, 1, 1), &token_count).ok());
  EXPECT_EQ(token_count, 200u);
  ASSERT_TRUE(Commit(Rows(200, 200, 1, 2), &token_count).ok());
  EXPECT_EQ(token_count, 400u);
  const uint64_t inline_id = observer_->Filled(400);
  for (const uint32_t layer : kLayers) {
    const auto fetch = [&](uint64_t sequence_id) {
      v1::FetchBlocksRequest request;
      request.set_sequence_id(sequence_id);
      request.set_layer(layer);
      request.add_ranges()->set_end(400);
      v1::FetchBlocksResponse response;
      EXPECT_TRUE(observer_->kv().FetchBlocks(observer_->Context().get(), request, &response).ok());
      response.clear_rows_epoch();  // of the sequence
      return response.SerializeAsString();
    };
    EXPECT_EQ(fetch(sequence_id_), fetch(inline_id));
  }
}

TEST_F(CommitTest, IngestTakesStagedRowsAndTellsWhenItIsDoneWithTheirSlots) {
  // The messages of a slot's rows claim it one by one: each has a generation of its own.
  const auto part = [&](uint64_t first, uint64_t tokens, uint32_t slot) {
    v1::CommitRequest request = Rows(first, tokens, slot, 1);
    for (v1::Tensor* tensor :
         {request.mutable_rows(1)->mutable_keys(), request.mutable_rows(1)->mutable_values()}) {
      tensor->mutable_staging()->set_generation(2);
    }
    return request;
  };
  uint64_t token_count = 0;
  const grpc::Status status =
      Ingest({part(0, 100, 0), part(100, 60, 1), part(160, 40, 2)}, &token_count);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(token_count, 200u);
  for (uint32_t slot = 0; slot < 4; ++slot) {
    EXPECT_EQ(client_->SlotWord(slot), slot < 3 ? 3u : 0u) << slot;
  }
  v1::FetchBlocksRequest request;
  request.set_layer(kLayers[1]);
  request.add_ranges()->set_end(200);
  const auto fetch = [&](uint64_t sequence_id) {
    request.set_sequence_id(sequence_id);
    v1::FetchBlocksResponse response;
    EXPECT_TRUE(observer_->kv().FetchBlocks(observer_->Context().get(), request, &response).ok());
    response.clear_rows_epoch();  // of the sequence
    return response.SerializeAsString();
  };
  EXPECT_EQ(fetch(sequence_id_), fetch(observer_->Filled(200)));
}

TEST_F(CommitTest, AnIngestWithWrongReferencesStoresNothing) {
  v1::CommitRequest rows = Rows(0, 8, 1, 1);
  rows.mutable_rows()->RemoveLast();
  const auto with = [&](uint64_t generation,
                        const std::function<void(v1::StagingReference&)>& change) {
    v1::CommitRequest request = rows;
    request.mutable_rows(0)->mutable_keys()->mutable_staging()->set_generation(generation);
    v1::StagingReference& values = *request.mutable_rows(0)->mutable_values()->mutable_staging();
    values.set_generation(generation);
    change(values);
    return request;
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  const std::string field = "chunk.rows.values.staging";
  RefuseIngest("slot", with(1, [](auto& r) { r.set_slot(4); }), invalid, field + ".slot");
  RefuseIngest("offset", with(2, [](auto& r) { r.set_offset_bytes(kSlotBytes); }), invalid,
               field + ".offset_bytes");
  RefuseIngest("odd offset", with(3, [](auto& r) { r.set_offset_bytes(3); }), invalid,
               field + ".offset_bytes");
  RefuseIngest("two generations", with(4, [](auto& r) { r.set_generation(100); }),
               StatusCode::FAILED_PRECONDITION, field + ".generation");
  RefuseIngest("stale", with(4, [](auto&) {}), StatusCode::FAILED_PRECONDITION,
               "chunk.rows.keys.staging.generation");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const v1::CommitRequest good = with(5, [](auto&) {});
  const v1::StagingReference& values = good.rows(0).values().staging();
  std::byte* const last =
      staging_.data() + kSlotBytes + values.offset_bytes() + values.size_bytes() - 4;
  std::byte kept[4];
  std::memcpy(kept, last, 4);
  std::memcpy(last, &nan, 4);
  RefuseIngest("nan", good, invalid, "chunk.rows.values");
  std::memcpy(last, kept, 4);
  EXPECT_TRUE(Ingest({with(6, [](auto&) {})}).ok());
}

TEST_F(CommitTest, ACallThatReadsNothingEndsThoseBeforeThatNameItsSlot) {
  v1::CommitRequest late = Rows(0, 8, 1, 4);
  v1::CommitRequest retire;
  for (v1::Tensor* tensor :
       {retire.add_rows()->mutable_keys(), retire.mutable_rows(0)->mutable_values()}) {
    tensor->set_dtype(v1::DTYPE_BFLOAT16);
    for (int i = 0; i < 3; ++i) tensor->add_shape(1);
    tensor->mutable_staging()->set_slot(1);
    tensor->mutable_staging()->set_generation(5);
  }
  EXPECT_TRUE(Failed(Commit(retire), StatusCode::NOT_FOUND, "sequence_id"));
  EXPECT_EQ(client_->SlotWord(1), 6u);
  EXPECT_TRUE(Failed(Commit(late), StatusCode::FAILED_PRECONDITION,
                     "rows[0].keys.staging.generation", "stale"));
}

TEST_F(CommitTest, AppendTakesStagedRowsAndTellsNewAttachments) {
  ASSERT_TRUE(Commit(Rows(0, 128, 0, 1)).ok());
  v1::AttachResponse attached;
  ASSERT_TRUE(client_->Attach(sequence_id_, &attached).ok());
  const v1::CommitRequest rows = Rows(128, 10, 0, 2);
  v1::AppendRequest request;
  v1::SequenceAppend* item = request.add_items();
  item->set_sequence_id(sequence_id_);
  item->set_first_position(128);
  *item->mutable_rows() = rows.rows();
  item->mutable_lease()->set_lease_id(attached.lease_id());
  item->mutable_lease()->set_known_version(attached.attachment().version());
  v1::AppendResponse response;
  const grpc::Status status = client_->Rpc(&v1::KvCache::Stub::Append, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.token_counts(0), 138u);
  ASSERT_EQ(response.attachments_size(), 1);
  EXPECT_GT(response.attachments(0).version(), attached.attachment().version());
  const SharedMapping pool = client_->connection().OpenPool(cache_id_);
  EXPECT_EQ(MappedRows(response.attachments(0).image(), pool, 1, 138).size(),
            size_t{138} * kKvHeads * (kKeyDim + kValueDim) * 4);

  item->set_first_position(138);
  item->mutable_lease()->set_known_version(response.attachments(0).version());
  *item->mutable_rows() = Rows(138, 1, 0, 3).rows();
  ASSERT_TRUE(client_->Rpc(&v1::KvCache::Stub::Append, request, &response).ok());
  EXPECT_TRUE(response.attachments(0).image().empty());

  item->mutable_lease()->set_lease_id(99);
  item->set_first_position(139);
  *item->mutable_rows() = Rows(139, 1, 0, 4).rows();
  EXPECT_TRUE(Failed(client_->Rpc(&v1::KvCache::Stub::Append, request, &response),
                     StatusCode::NOT_FOUND, "items[0].lease.lease_id"));
}

TEST_F(CommitTest, WrongReferencesAreRefused) {
  ASSERT_TRUE(Commit(Rows(0, 8, 0, 1)).ok());
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  const auto with = [&](const std::function<void(v1::StagingReference&)>& change) {
    v1::CommitRequest request = Rows(8, 8, 1, 1);
    change(*request.mutable_rows(1)->mutable_values()->mutable_staging());
    return request;
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  const std::string field = "rows[1].values.staging";
  Refuse("stale", Rows(8, 8, 0, 1), StatusCode::FAILED_PRECONDITION,
         "rows[0].keys.staging.generation");
  Refuse("slot", with([](auto& r) { r.set_slot(4); }), invalid, field + ".slot");
  // Each try uses up its generation of slot 1.
  uint64_t generation = 2;
  const auto again = [&](const std::function<void(v1::StagingReference&)>& change) {
    v1::CommitRequest request = Rows(8, 8, 1, generation++);
    change(*request.mutable_rows(1)->mutable_values()->mutable_staging());
    return request;
  };
  Refuse("offset", again([](auto& r) { r.set_offset_bytes(kSlotBytes); }), invalid,
         field + ".offset_bytes");
  Refuse("overflow", again([&](auto& r) { r.set_offset_bytes(most - 3); }), invalid,
         field + ".offset_bytes");
  Refuse("size", again([&](auto& r) { r.set_size_bytes(most); }), invalid,
         "rows[1].values.staging.offset_bytes");
  Refuse("short", again([](auto& r) { r.set_size_bytes(100); }), invalid, "rows[1].values.shape");
  Refuse("odd offset", again([](auto& r) { r.set_offset_bytes(3); }), invalid,
         field + ".offset_bytes");
  Refuse("two generations", again([](auto& r) { r.set_generation(100); }),
         StatusCode::FAILED_PRECONDITION, field + ".generation");
  v1::CommitRequest request = Rows(8, 8, 1, generation++);
  request.mutable_rows(0)->mutable_keys()->mutable_shape()->Set(0, 9);
  Refuse("shape", request, invalid, "rows[0].keys.shape");
  request = Rows(8, 8, 1, generation++);
  request.mutable_rows(1)->set_layer(1);
  Refuse("layer twice", request, invalid, "rows[1].layer");
  request.mutable_rows(1)->set_layer(2);
  Refuse("layer not stored", request, invalid, "rows[1].layer");
  Refuse("gap", Rows(9, 8, 1, generation++), invalid, "first_position");
  request.clear_rows();
  Refuse("no rows", request, invalid, "rows");
  request = Rows(8, 8, 1, generation++);
  request.set_sequence_id(999);
  Refuse("sequence", request, StatusCode::NOT_FOUND, "sequence_id");
  ASSERT_TRUE(Commit(Rows(8, 8, 1, generation)).ok());
}

TEST_F(CommitTest, GarbageIsRefusedAndChangesNothing) {
  const v1::CommitRequest request = Rows(0, 100, 0, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // In the last rows of the last layer, when everything else has been copied.
  const auto& last = request.rows(1).values().staging();
  std::memcpy(staging_.data() + last.offset_bytes() + last.size_bytes() - 4, &nan, 4);
  Refuse("nan", request, StatusCode::INVALID_ARGUMENT, "rows[1].values");
}

TEST_F(CommitTest, ASlotInFlightIsRefused) {
  const std::string session = "local#1";
  const auto held = store_->ClaimStaging(session, {.slot = 2, .size_bytes = 4, .generation = 7});
  ASSERT_TRUE(held.ok()) << held.status();
  Refuse("in flight", Rows(0, 8, 2, 8), StatusCode::FAILED_PRECONDITION,
         "rows[0].keys.staging.slot");
}

TEST_F(CommitTest, StagingOfAnotherSessionIsNotReached) {
  LocalClient other(endpoint(), "", "other");
  const v1::CommitRequest request = Rows(0, 8, 0, 1);
  v1::CommitResponse response;
  EXPECT_TRUE(Failed(other.Rpc(&v1::KvCache::Stub::Commit, request, &response),
                     StatusCode::FAILED_PRECONDITION, "rows[0].keys.staging", "no staging"));
  EXPECT_TRUE(Failed(observer_->kv().Commit(observer_->Context().get(), request, &response),
                     StatusCode::FAILED_PRECONDITION, "rows[0].keys.staging", "local"));
  const auto context = observer_->Context();
  v1::IngestResponse ingested;
  const auto stream = observer_->kv().Ingest(context.get(), &ingested);
  v1::IngestRequest message;
  message.mutable_header()->set_sequence_id(observer_->NewSequence());
  stream->Write(message);
  *message.mutable_chunk()->mutable_rows() = request.rows(0);
  stream->Write(message);
  EXPECT_TRUE(Failed(stream->Finish(), StatusCode::FAILED_PRECONDITION, "chunk.rows.keys.staging",
                     "local"));
}

TEST_F(CommitTest, AClientThatPullsAtItsStagingHarmsOnlyItsRows) {
  std::atomic<bool> done = false;
  std::thread hand([&] {
    const uint32_t garbage[] = {0x7fc00000u, 0xffffffffu, 0x7f800000u, 0x3f800000u};
    for (uint32_t round = 0; !done; ++round) {
      fallocate(staging_.descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kSlotBytes);
      EXPECT_NE(ftruncate(staging_.descriptor(), 4096), 0);
      for (size_t i = 0; i < kSlotBytes; i += 4096) {
        std::memcpy(staging_.data() + i + round % 64 * 4, &garbage[round % 4], 4);
      }
    }
  });
  uint64_t tokens = 0;
  for (uint64_t generation = 1; generation <= 40; ++generation) {
    const grpc::Status status = Commit(Rows(tokens, 100, 0, generation));
    if (status.ok()) {
      tokens += 100;
    } else {
      EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
      EXPECT_THAT(RefusedBy(status).field, testing::MatchesRegex("rows.*(keys|values)"));
    }
  }
  done = true;
  hand.join();
  EXPECT_TRUE(Commit(Rows(tokens, 8, 1, 1)).ok());
  // Whatever was taken can be indexed.
  v1::BuildIndexRequest build;
  build.set_sequence_id(sequence_id_);
  *build.mutable_index() = Pq(2, 4);
  const auto context = client_->Context();
  const auto progress = client_->kv().BuildIndex(context.get(), build);
  for (v1::BuildProgress each; progress->Read(&each);) {
  }
  const grpc::Status built = progress->Finish();
  EXPECT_TRUE(built.ok()) << built.error_message();
}

// With four threads, two may be at work on rows of prompts.
TEST_F(RpcTest, RowsOfPromptsWaitForEachOtherAndBriefCallsDoNot) {
  std::atomic<int> at_work = 0;
  absl::Notification keep_going;
  StoreHooks hooks;
  hooks.before_ingest = [&] {
    ++at_work;
    keep_going.WaitForNotification();
  };
  Start({}, [&](std::unique_ptr<kvstore::Store> store) {
    return std::make_unique<HookedStore>(std::move(store), hooks);
  });
  LocalClient client(endpoint());
  const uint64_t cache_id = client.OpenCache();
  const SharedMapping staging = client.connection().OpenStaging(kSlotBytes, 3);
  const auto request = [&](uint32_t slot) {
    v1::CommitRequest commit;
    commit.set_sequence_id(client.CreateSequence(cache_id));
    *commit.add_rows() = RowsOf(1, 0, 8);
    Stage(staging, kSlotBytes, slot, 1, 0, commit.mutable_rows(0));
    return commit;
  };
  std::vector<std::thread> threads;
  for (uint32_t slot = 0; slot < 3; ++slot) {
    threads.emplace_back([&client, commit = request(slot)] {
      v1::CommitResponse response;
      const grpc::Status status = client.Rpc(&v1::KvCache::Stub::Commit, commit, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  }
  const uint64_t streamed = client.CreateSequence(cache_id);
  threads.emplace_back([&] {
    const auto context = client.Context();
    v1::IngestResponse response;
    const auto writer = client.kv().Ingest(context.get(), &response);
    v1::IngestRequest message;
    message.mutable_header()->set_sequence_id(streamed);
    writer->Write(message);
    for (const uint32_t layer : kLayers) {
      *message.mutable_chunk()->mutable_rows() = RowsOf(layer, 0, 8);
      writer->Write(message);
    }
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.token_count(), 8u);
  });
  while (at_work < 2) std::this_thread::yield();
  for (int i = 0; i < 8; ++i) {
    client.CreateSequence(cache_id);
    EXPECT_EQ(at_work, 2);
  }
  // One that waits too long has changed nothing.
  const v1::CommitRequest late = request(2);
  const auto context = client.Context();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::CommitResponse response;
  EXPECT_TRUE(Failed(client.kv().Commit(context.get(), late, &response),
                     StatusCode::DEADLINE_EXCEEDED, ""));
  keep_going.Notify();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(at_work, 4);
}

}  // namespace
}  // namespace pqcached::service
