// A sequence in two processes of an engine, played by two clients of a daemon: the scheduler
// creates it, and the worker attaches to it by its id.
#include "pqcached/attach.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::SpecOf;

constexpr uint32_t kTokens = 500;
constexpr uint64_t kSink = 4, kWindow = 16;

class AttachTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  Sequence Store(bool has_live_index = false) {
    std::vector<uint32_t> ids = Range(0, kTokens);
    SequenceOptions options{.prompt = {.token_ids = ids}};
    if (has_live_index) options.live_index = LiveIndex{.iterations = 2};
    Sequence sequence = Must(planned_.CreateSequence(options));
    MustBeOk(sequence.Ingest(0, 0, layer_.keys(0, kTokens), layer_.values(0, kTokens)));
    return sequence;
  }
  // Attends to all tokens in a step of the worker, and stores the rows of token `position`.
  void Decode(Sequence& sequence, uint64_t position) {
    const StepItem items[] = {{&sequence, position, 1}};
    const Selection all{.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
    Step step = Must(worker_.BeginStep(items, &all));
    Attention attention{.output = std::vector<float>(Layer::kQueryHeads * Layer::kValueDim),
                        .lse = std::vector<float>(Layer::kQueryHeads)};
    MustBeOk(step.Attend(0, layer_.queries(), attention.output, attention.lse));
    MustBeOk(step.End(testing::RowsOf(layer_, position, position + 1, 1)));
    const Attention selected =
        layer_.Attend({Layer::kKvHeads, Range(kSink, position + 1 - kWindow)});
    for (size_t i = 0; i < attention.output.size(); ++i) {
      ASSERT_NEAR(attention.output[i], selected.output[i], 1e-4f);
    }
  }
  void ExpectMissing(Cache& cache, uint64_t id) {
    const auto attached = cache.Attach(id);
    EXPECT_EQ(attached.status().code(), PQC_NOT_FOUND) << attached.status().ToString();
    EXPECT_EQ(attached.status().field(), "sequence_id");
  }

  const Layer layer_{kTokens + 10, 1};
  Daemon daemon_;
  Client scheduler_ = daemon_.OpenClient("default", GetParam());
  Client worker_ = daemon_.OpenClient("default", GetParam());
  Cache planned_ = Must(scheduler_.OpenCache(SpecOf("shared", {0})));
  Cache served_ = Must(worker_.OpenCache(SpecOf("shared", {0})));
};

TEST_P(AttachTest, AWorkerContinuesWhatASchedulerCreated) {
  Sequence planned = Store();
  uint64_t tokens = 0;
  {
    Sequence served = Must(served_.Attach(planned.id(), &tokens));
    EXPECT_EQ(served.id(), planned.id());
    EXPECT_EQ(tokens, kTokens);
    MustBeOk(served.BuildIndex({.iterations = 2}));
    Decode(served, kTokens);
    Decode(served, kTokens + 1);
  }  // closes the handle, which stores the rows, and does not drop the sequence
  EXPECT_EQ(Must(planned.Describe()).token_count, kTokens + 2);
  const uint64_t end = kTokens + 2;
  std::vector<float> rows(Layer::kKvHeads * end * Layer::kKeyDim);
  MustBeOk(planned.FetchBlocks(0, {0, end}, PQC_KEY, std::as_writable_bytes(std::span(rows))));
  for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
    for (uint64_t token = 0; token < end; ++token) {
      const float* row = &rows[(head * end + token) * Layer::kKeyDim];
      ASSERT_EQ(
          std::vector<float>(row, row + Layer::kKeyDim),
          std::vector<float>(layer_.key(token, head), layer_.key(token, head) + Layer::kKeyDim));
    }
  }
}

TEST_P(AttachTest, AnAttachedHandleHasTheLiveIndex) {
  Sequence planned = Store(/*has_live_index=*/true);
  Sequence served = Must(served_.Attach(planned.id()));
  Decode(served, kTokens);  // no index is built by hand: the first step ends the prefill
  MustBeOk(served.Detach());
  EXPECT_EQ(Must(planned.Describe()).index_count, 1u);
}

TEST_P(AttachTest, TheSequenceEndsWithTheSessionThatCreatedIt) {
  Cache own = Must(scheduler_.OpenCache(SpecOf("own", {0})));
  auto creator = std::make_unique<Client>(daemon_.OpenClient("default", GetParam()));
  Cache created_in = Must(creator->OpenCache(SpecOf("shared", {0})));
  Sequence created = Must(created_in.CreateSequence());
  MustBeOk(created.Ingest(0, 0, layer_.keys(0, 100), layer_.values(0, 100)));
  const uint64_t id = created.id();
  ExpectMissing(own, id);
  MustBeOk(created.Detach());
  Sequence served = Must(served_.Attach(id));
  EXPECT_EQ(Must(served.Describe()).token_count, 100u);
  creator.reset();
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (served_.Attach(id).ok() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ExpectMissing(served_, id);
  EXPECT_EQ(served.Describe().status().code(), PQC_NOT_FOUND);
}

TEST_P(AttachTest, WhatIsNotThereIsNamed) {
  Sequence planned = Store();
  const uint64_t id = planned.id();
  Client foreign = daemon_.OpenClient("other", GetParam());
  Cache foreign_cache = Must(foreign.OpenCache(SpecOf("shared", {0})));
  ExpectMissing(foreign_cache, id);
  ExpectMissing(served_, id + 1000);
  Sequence served = Must(served_.Attach(id));
  MustBeOk(served.Drop());  // any process may drop it; a cached prefix remains
  EXPECT_EQ(Must(served_.MatchPrefix({.token_ids = Range(0, kTokens)})), 384u);
  ExpectMissing(served_, id);
  const std::string listed = Must(worker_.AdminJson("ListSequences"));
  const std::string name = "\"sequence_id\":\"";
  const size_t found = listed.find(name);
  ASSERT_NE(found, std::string::npos) << listed;
  ExpectMissing(served_, std::stoull(listed.substr(found + name.size())));

  pqc_sequence* sequence = nullptr;
  EXPECT_EQ(pqc_sequence_attach(nullptr, id, &sequence, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "cache");
  EXPECT_EQ(pqc_sequence_attach(served_.get(), id, nullptr, nullptr), PQC_INVALID_ARGUMENT);
  EXPECT_STREQ(pqc_last_error_field(), "sequence");
  EXPECT_EQ(pqc_sequence_detach(nullptr), PQC_OK);
}

INSTANTIATE_TEST_SUITE_P(Paths, AttachTest,
                         ::testing::Values(PQC_PATH_ONLY_LOCAL, PQC_PATH_ONLY_REMOTE),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
