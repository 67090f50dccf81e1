// Steps and decoders against a real pqcached, on both paths.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::SpecOf;

constexpr uint64_t kSink = 4, kWindow = 16;
constexpr uint32_t kLayers = 2;
constexpr size_t kOutput = Layer::kQueryHeads * Layer::kValueDim;

void KillWorker(pid_t supervisor) {
  const std::string pid = std::to_string(supervisor);
  std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
  pid_t worker = 0;
  ASSERT_TRUE(workers >> worker);
  kill(worker, SIGKILL);
}

class DaemonStepTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  bool local() const { return GetParam() == PQC_PATH_ONLY_LOCAL; }

  Sequence Fill(const Layer& layer, uint64_t tokens) {
    return testing::FillIndexed(cache_, layer, tokens, kLayers, kSink);
  }

  static std::vector<LayerRows> Rows(const Layer& layer, uint64_t begin, uint64_t end) {
    return testing::RowsOf(layer, begin, end, kLayers);
  }

  void ExpectFull(const Layer& layer, uint64_t tokens, std::vector<float> output,
                  std::vector<float> lse) {
    std::vector<uint32_t> own = Range(0, kSink);
    for (const uint32_t token : Range(tokens - kWindow, tokens)) own.push_back(token);
    Attention attention{.output = std::move(output), .lse = std::move(lse)};
    attention.Merge(layer.Attend({Layer::kKvHeads, own}));
    const Attention full = layer.Attend({Layer::kKvHeads, Range(0, tokens)});
    for (size_t i = 0; i < kOutput; ++i) {
      ASSERT_NEAR(attention.output[i], full.output[i], 1e-4f) << tokens;
    }
  }

  void Decode(Sequence& sequence, const Layer& layer, uint64_t position,
              std::vector<uint32_t> accepted = {}, uint32_t length = 1) {
    const StepItem items[] = {{&sequence, position, length}};
    Step step = Must(client_.BeginStep(items, &selection_));
    std::vector<float> queries, output(length * kOutput), lse(length * Layer::kQueryHeads);
    for (uint32_t i = 0; i < length; ++i) {
      const auto* numbers = static_cast<const float*>(queries_.c().ptr);
      queries.insert(queries.end(), numbers, numbers + Layer::kQueryHeads * Layer::kKeyDim);
    }
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(step.Attend(number, {queries, {length, Layer::kQueryHeads, Layer::kKeyDim}}, output,
                           lse));
      EXPECT_EQ(Must(step.TopK(number, {queries, {length, Layer::kQueryHeads, Layer::kKeyDim}}))
                    .counts[0],
                position + 1 - kSink - kWindow);
    }
    MustBeOk(step.End(Rows(layer, position, position + length), accepted));
    output.resize(kOutput);
    lse.resize(Layer::kQueryHeads);
    if (position % 50 == 0) ExpectFull(layer, position + 1, output, lse);
  }

  const Layer layer_{700, 1};
  const Tensor queries_ = layer_.queries();
  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
  const Selection selection_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
};

TEST_P(DaemonStepTest, StepsGiveFullAttentionAndLocalOnesWaitForNoRpc) {
  EXPECT_EQ(client_.path(), local() ? PQC_PATH_LOCAL : PQC_PATH_REMOTE);
  Sequence sequence = Fill(layer_, 300);
  Decode(sequence, layer_, 300);
  const uint64_t before = Must(client_.Count()).rpcs;
  for (uint64_t position = 301; position < 650; ++position) Decode(sequence, layer_, position);
  if (local()) {
    EXPECT_EQ(Must(client_.Count()).rpcs, before);
  } else {
    EXPECT_GT(Must(client_.Count()).rpcs, before);
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 650u);
}

TEST_P(DaemonStepTest, SpeculationForksAndPreemption) {
  Sequence sequence = Fill(layer_, 300);
  Decode(sequence, layer_, 300, {2}, 4);
  Decode(sequence, layer_, 302, {}, 8);
  Decode(sequence, layer_, 305, {3}, 3);  // five of the eight are taken back
  Sequence child = Must(sequence.Fork());
  EXPECT_EQ(Must(child.Describe()).token_count, 308u);
  MustBeOk(sequence.Suspend());
  const StepItem items[] = {{&sequence, 308}};
  EXPECT_EQ(client_.BeginStep(items, &selection_).status().code(), PQC_FAILED_PRECONDITION);
  for (uint64_t position = 308; position < 360; ++position) Decode(child, layer_, position);
  EXPECT_EQ(Must(sequence.Resume()), 308u);
  for (uint64_t position = 308; position < 360; ++position) Decode(sequence, layer_, position);
  MustBeOk(child.Flush());
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(child.Describe()).token_count, 360u);
  EXPECT_EQ(Must(sequence.Describe()).token_count, 360u);
}

TEST_P(DaemonStepTest, ALiveIndexIsReadyWhenItIsNeeded) {
  uint64_t shared = 1;
  SequenceOptions options;
  options.live_index = LiveIndex{.sink_tokens = kSink};
  Sequence sequence = Must(cache_.CreateSequence(options, &shared));
  EXPECT_EQ(shared, 0u);
  for (uint64_t token = 0; token < 600; token += 200) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, token, layer_.keys(token, token + 200),
                               layer_.values(token, token + 200)));
    }
  }
  for (uint64_t position = 600; position < 640; ++position) Decode(sequence, layer_, position);
  MustBeOk(sequence.Flush());
  for (uint32_t number = 0; number < kLayers; ++number) {  // the next turn
    MustBeOk(sequence.Ingest(number, 640, layer_.keys(640, 670), layer_.values(640, 670)));
  }
  for (uint64_t position = 670; position < 700; ++position) Decode(sequence, layer_, position);
  MustBeOk(sequence.Flush());
}

TEST_P(DaemonStepTest, AForkOfALiveIndexEndsThePrefillToo) {
  SequenceOptions options;
  options.live_index = LiveIndex{.sink_tokens = kSink};
  Sequence parent = Must(cache_.CreateSequence(options));
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(parent.Ingest(number, 0, layer_.keys(0, 300), layer_.values(0, 300)));
  }
  Sequence child = Must(parent.Fork());
  for (uint64_t position = 300; position < 310; ++position) Decode(child, layer_, position);
  for (uint64_t position = 300; position < 310; ++position) Decode(parent, layer_, position);
  MustBeOk(child.Flush());
  MustBeOk(parent.Flush());
}

TEST_P(DaemonStepTest, BeamsAreReorderedInOneCall) {
  std::vector<Sequence> beams;
  beams.push_back(Fill(layer_, 300));
  const uint64_t first = beams[0].id();
  const auto calls = [&] { return Must(client_.Count()).rpcs; };
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{0, 0, 0, 0}));
  ASSERT_EQ(beams.size(), 4u);
  EXPECT_EQ(beams[0].id(), first);
  for (uint64_t position = 300; position < 304; ++position) {
    for (Sequence& beam : beams) Decode(beam, layer_, position);
    for (Sequence& beam : beams) MustBeOk(beam.Flush());
  }
  const uint64_t kept = beams[2].id(), moved = beams[1].id(), dropped = beams[3].id();
  const uint64_t before = calls();
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{2, 2, 1, 0}));
  EXPECT_EQ(calls(), before + 1);
  EXPECT_EQ(beams[0].id(), kept);
  EXPECT_EQ(beams[2].id(), moved);
  EXPECT_EQ(beams[3].id(), first);
  for (Sequence& beam : beams) {
    EXPECT_NE(beam.id(), dropped);
    EXPECT_EQ(Must(beam.Describe()).token_count, 304u);
    for (uint64_t position = 304; position < 308; ++position) Decode(beam, layer_, position);
    MustBeOk(beam.Flush());
  }
  // A permutation needs no call; an error changes nothing.
  const uint64_t unchanged = calls();
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{3, 2, 1, 0}));
  EXPECT_EQ(calls(), unchanged);
  const Status refused = Sequence::Reorder(&beams, std::vector<uint32_t>{0, 4});
  EXPECT_EQ(refused.code(), PQC_INVALID_ARGUMENT);
  EXPECT_EQ(refused.field(), "from[1]");
  {
    const StepItem items[] = {{&beams[1], 308}};
    const Step step = Must(client_.BeginStep(items));
    const Status aborted = Sequence::Reorder(&beams, std::vector<uint32_t>{0, 0});
    EXPECT_EQ(aborted.code(), PQC_ABORTED) << aborted.ToString();
    EXPECT_EQ(aborted.field(), "sequences[1].sequence") << aborted.ToString();
  }
  EXPECT_EQ(beams.size(), 4u);
  for (Sequence& beam : beams) Decode(beam, layer_, 308);
}

TEST_P(DaemonStepTest, WithoutAnIndexStepsMayAttendExactly) {
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(sequence.Ingest(number, 0, layer_.keys(0, 300), layer_.values(0, 300)));
  }
  const Selection few = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.1};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  std::vector<uint32_t> counts(1);
  const StepItem items[] = {{&sequence, 300}};
  const auto attend = [&](uint64_t flags) {
    auto step = client_.BeginStep(items, &few, 0, flags);
    return step.ok() ? step->Attend(0, queries_, output, lse, nullptr, counts) : step.status();
  };
  EXPECT_EQ(attend(0).code(), PQC_FAILED_PRECONDITION);
  MustBeOk(attend(PQC_STEP_EXACT_UNTIL_INDEXED));
  EXPECT_EQ(counts[0], 301 - kSink - kWindow);
  ExpectFull(layer_, 301, output, lse);
  Step step = Must(client_.BeginStep(items, &few, 0, PQC_STEP_EXACT_UNTIL_INDEXED));
  EXPECT_EQ(step.TopK(0, queries_).status().code(), PQC_FAILED_PRECONDITION);
  MustBeOk(step.End(Rows(layer_, 300, 301)));
  MustBeOk(sequence.BuildIndex({.iterations = 2, .sink_tokens = kSink}));
  const StepItem next[] = {{&sequence, 301}};
  do {  // until the client has the segment map with the index
    Step again = Must(client_.BeginStep(next, &few, 0, PQC_STEP_EXACT_UNTIL_INDEXED));
    MustBeOk(again.Attend(0, queries_, output, lse, nullptr, counts));
  } while (counts[0] == 302 - kSink - kWindow);
  EXPECT_EQ(counts[0], 10u);  // 30 of 302 tokens, less sink and window
}

TEST_P(DaemonStepTest, StepsRowsAndForksGoOnDuringABuild) {
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(sequence.Ingest(number, 0, layer_.keys(0, 300), layer_.values(0, 300)));
  }
  const auto decode = [&](Sequence& of, uint64_t position) {
    const StepItem items[] = {{&of, position}};
    std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
    Step step = Must(client_.BeginStep(items, &selection_, 0, PQC_STEP_EXACT_UNTIL_INDEXED));
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(step.Attend(number, queries_, output, lse));
    }
    MustBeOk(step.End(Rows(layer_, position, position + 1)));
    ExpectFull(layer_, position + 1, output, lse);
  };
  const auto go_on = [&] {
    decode(sequence, 300);
    MustBeOk(sequence.Flush());
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(sequence.Ingest(number, 301, layer_.keys(301, 310), layer_.values(301, 310)));
    }
    for (uint64_t position = 310; position < 320; ++position) decode(sequence, position);
    Sequence child = Must(sequence.Fork());
    for (uint64_t position = 320; position < 325; ++position) decode(child, position);
    MustBeOk(child.Flush());
    EXPECT_EQ(Must(child.Describe()).token_count, 325u);
  };
  std::thread engine;
  BuildOptions build = {.iterations = 20, .sink_tokens = kSink};
  build.progress = [&](const pqc_build_progress&) {
    if (!engine.joinable()) engine = std::thread(go_on);
    return true;
  };
  MustBeOk(sequence.BuildIndex(build));
  ASSERT_TRUE(engine.joinable());
  engine.join();
  for (uint64_t position = 320; position < 330; ++position) Decode(sequence, layer_, position);
  MustBeOk(sequence.Flush());
}

TEST_P(DaemonStepTest, APrefixIsFoundAndShared) {
  SequenceOptions options;
  for (uint32_t i = 0; i < 400; ++i) options.prompt.token_ids.push_back(i * 3);
  uint64_t shared = 1;
  Sequence first = Must(cache_.CreateSequence(options, &shared));
  EXPECT_EQ(shared, 0u);
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(first.Ingest(number, 0, layer_.keys(0, 400), layer_.values(0, 400)));
  }
  EXPECT_EQ(Must(cache_.MatchPrefix(options.prompt)), 384u);
  Sequence second = Must(cache_.CreateSequence(options, &shared));
  EXPECT_EQ(shared, 384u);
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(second.Ingest(number, 384, layer_.keys(384, 400), layer_.values(384, 400)));
  }
  MustBeOk(first.Drop());
  MustBeOk(second.BuildIndex({.iterations = 2, .sink_tokens = kSink}));
  for (uint64_t position = 400; position < 460; ++position) Decode(second, layer_, position);
}

TEST_P(DaemonStepTest, TheDecoderAtRatioOneIsFullAttention) {
  Sequence sequence = Must(cache_.CreateSequence());
  Decoder decoder = Must(Decoder::Open(sequence, selection_));
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(decoder.Prefill(number, layer_.keys(0, 300), layer_.values(0, 300)));
  }
  const auto token = [](const float* numbers, uint32_t dim) {
    return Tensor(std::span(numbers, Layer::kKvHeads * dim), {Layer::kKvHeads, dim});
  };
  for (uint64_t position = 300; position < 400; ++position) {
    std::vector<float> output(kOutput);
    for (uint32_t number = 0; number < kLayers; ++number) {
      MustBeOk(decoder.Decode(number, queries_, token(layer_.key(position, 0), Layer::kKeyDim),
                              token(layer_.value(position, 0), Layer::kValueDim), output));
    }
    if (position % 20 != 0) continue;
    const Attention full = layer_.Attend({Layer::kKvHeads, Range(0, position + 1)});
    for (size_t i = 0; i < kOutput; ++i) ASSERT_NEAR(output[i], full.output[i], 1e-4f);
  }
}

TEST_P(DaemonStepTest, ProgressCountsTheShortestOfTheIngestedLayers) {
  Sequence sequence = Fill(layer_, 300);
  const auto stored = [&] { return Must(sequence.Progress()).stored_tokens; };
  EXPECT_EQ(stored(), 300u);
  MustBeOk(sequence.Truncate(200));
  for (uint32_t number = 0; number < kLayers; ++number) {
    EXPECT_EQ(stored(), 200u);
    MustBeOk(sequence.Ingest(number, 200, layer_.keys(200, 250), layer_.values(200, 250)));
  }
  EXPECT_EQ(stored(), 250u);
  EXPECT_EQ(Must(sequence.Describe()).token_count, 250u);
}

TEST_P(DaemonStepTest, AStepThatDoesNotWaitBeginsAgainUntilItsSequenceIsReady) {
  Sequence sequence = Fill(layer_, 300);
  const auto begin = [&](uint64_t position) {
    const StepItem items[] = {{&sequence, position}};
    return client_.BeginStep(items, &selection_, 0, PQC_STEP_NO_WAIT);
  };
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  bool was_unavailable = false;
  for (uint64_t position = 300; position < 320;) {
    if (position == 310 && !was_unavailable) {
      KillWorker(daemon_.process().pid());
      while (!was_unavailable) {
        const auto step = begin(position);
        was_unavailable = step.status().code() == PQC_UNAVAILABLE;
        EXPECT_TRUE(step.ok() || step.status().retry_ms() > 0) << step.status().ToString();
      }
    }
    auto step = begin(position);
    if (!step.ok()) {
      ASSERT_GT(step.status().retry_ms(), 0u) << step.status().ToString();
      continue;
    }
    Status attended;
    for (uint32_t number = 0; attended.ok() && number < kLayers; ++number) {
      attended = step->Attend(number, queries_, output, lse);
    }
    if (!attended.ok()) {  // the worker's end was noticed within the step
      ASSERT_GT(attended.retry_ms(), 0u) << attended.ToString();
      continue;
    }
    if (step->End(Rows(layer_, position, position + 1)).ok()) ++position;
  }
  EXPECT_TRUE(was_unavailable);
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 320u);
  Decode(sequence, layer_, 320);
}

TEST_P(DaemonStepTest, AStepThatIsInProgressOutlivesItsWorker) {
  if (!local()) return;  // its calls are RPCs
  Sequence sequence = Fill(layer_, 300), other = Fill(layer_, 300);
  const StepItem others[] = {{&other, 300}};
  for (uint64_t position = 300; position < 303; ++position) {
    const StepItem items[] = {{&sequence, position}};
    Step step = Must(client_.BeginStep(items, &selection_));
    std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
    MustBeOk(step.Attend(0, queries_, output, lse));
    KillWorker(daemon_.process().pid());
    // The client notices the end and, every other time, the next worker.
    while (client_.BeginStep(others, nullptr, 0, PQC_STEP_NO_WAIT).status().code() !=
           PQC_UNAVAILABLE) {
      poll(nullptr, 0, 1);
    }
    if (position % 2 == 1) MustBeOk(client_.BeginStep(others, nullptr).status());
    MustBeOk(step.Attend(1, queries_, output, lse));
    MustBeOk(step.End(Rows(layer_, position, position + 1)));
    ExpectFull(layer_, position + 1, output, lse);
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 303u);
  Decode(sequence, layer_, 303);
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonStepTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached
