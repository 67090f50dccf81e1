// Steps on a GPU that attend to stored ranges, in one part or in several, launched and captured. One source for two
// programs: against the emulation of the device, and the real one.
#include <vector>

#include "gpu/graph.h"
#include "tests/client/decode_case.h"
#include "tests/client/gpu/gpu_wrapper_fixture.h"
#include "tests/client/range_case.h"

namespace pqcached {
namespace {

using testing::Append;
using testing::Expect;
using testing::ExpectAttention;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::RangeCase;
using testing::SpanOf;

constexpr uint32_t kLength = 3;

class GpuRangesTest : public testing::GpuWrapperTest {
 protected:
  // The pointer is passed on and never read.
  static std::span<const pqc_token_range> RangesOf(const DeviceArray<pqc_token_range>& ranges) {
    return {ranges.data(), ranges.size()};
  }
  static Status Attend(Step& step, const Tensors& tensors,
                       const DeviceArray<pqc_token_range>& ranges, uint32_t layer = 1) {
    return step.AttendRange(layer, tensors.query(), RangesOf(ranges), SpanOf(tensors.output),
                            SpanOf(tensors.lse));
  }
};

TEST_F(GpuRangesTest, AnyRangesGiveTheirExactAttention) {
  const Layer layer(400, 3), other(300, 8);
  Sequence first = Fill(layer, 380), second = Fill(other, 290);
  const StepItem items[] = {{&first, 380, kLength}, {&second, 290, kLength}};
  const RangeCase queries[] = {RangeCase(kLength, 380, 4), RangeCase(kLength, 290, 5)};
  std::vector<float> all = queries[0].queries;
  all.insert(all.end(), queries[1].queries.begin(), queries[1].queries.end());
  const Tensors tensors(all);
  // Parts of less than a range, of exactly one, and of more.
  for (const uint64_t capacity : {100u, 127u, 290u, 380u, 512u}) {
    Open(capacity);
    for (const std::vector<pqc_token_range>& ranges :
         {std::vector<pqc_token_range>{{0, 380}, {0, 290}},
          {{5, 5}, {289, 290}},
          {{0, 0}, {0, 0}},
          {{17, 144}, {3, 103}},
          {{379, 380}, {100, 201}}}) {
      SCOPED_TRACE(::testing::Message() << capacity << ": " << ranges[0].begin);
      const DeviceArray<pqc_token_range> device_ranges(ranges);
      Step step = Must(gpu_->BeginStep(items, stream_));
      MustBeOk(Attend(step, tensors, device_ranges));
      Attention right = queries[0].Expected(layer, ranges[0]);
      Append(queries[1].Expected(other, ranges[1]), &right);
      ExpectAttention(tensors.Get(stream_), right);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(GpuRangesTest, AGraphReadsTheRangesOfItsReplay) {
  Open(95);
  const Layer layer(420, 3);
  Sequence sequence = Fill(layer, 380);
  DeviceArray<pqc_token_range> ranges(1);
  Tensors tensors(RangeCase(1, 0, 1).queries);
  gpu::Graph graph;
  for (uint64_t position = 380; position < 386; ++position) {
    const StepItem items[] = {{&sequence, position, 1}};
    const RangeCase query(1, position, static_cast<uint32_t>(position));
    // The graph was captured in a step of fewer rows, which had fewer parts.
    Step step = Must(gpu_->BeginStep(items, stream_));
    if (position == 380) {
      ASSERT_TRUE(graph.Begin(stream_).ok());
      MustBeOk(Attend(step, tensors, ranges));
      ASSERT_TRUE(graph.End().ok());
    }
    tensors.queries.Set(query.queries);
    const pqc_token_range range = {position % 3, position};
    ranges.Set({range});
    ASSERT_TRUE(graph.Launch(stream_).ok());
    ExpectAttention(tensors.Get(stream_), query.Expected(layer, range));
    MustBeOk(step.End(Rows(layer, position, position + 1)));
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(Must(gpu_->Count()).loaded, 0u) << "ranges are no requests of the block cache";
}

TEST_F(GpuRangesTest, RangesAndSelectionsTakeTurnsInAStep) {
  const Layer layer(420, 3);
  Sequence sequence = Fill(layer, 400);
  const RangeCase query(1, 400, 4);
  const Tensors tensors(query.queries);
  const pqc_token_range range = {10, 385};  // to the window of the selection
  const DeviceArray<pqc_token_range> ranges(std::vector<pqc_token_range>{range});
  const StepItem items[] = {{&sequence, 400, 1}};
  Step step = Must(gpu_->BeginStep(items, selection_, stream_));
  for (int i = 0; i < 3; ++i) {
    MustBeOk(Attend(step, tensors, ranges));
    ExpectAttention(tensors.Get(stream_), query.Expected(layer, range));
    MustBeOk(step.Attend(1, tensors.query(), SpanOf(tensors.output), SpanOf(tensors.lse)));
    ExpectAttention(tensors.Get(stream_), query.Expected(layer, {testing::kSink, 385}));
  }
  MustBeOk(step.End(Rows(layer, 400, 401)));
  EXPECT_GT(Must(gpu_->Count()).loaded, 0u);
}

TEST_F(GpuRangesTest, WhatIsWrongIsRefusedByName) {
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, 300);
  const Tensors tensors(RangeCase(1, 300, 1).queries);
  const StepItem items[] = {{&sequence, 300, 1}};
  const auto run = [&](pqc_token_range range, const Selection* selection) {
    const DeviceArray<pqc_token_range> ranges(std::vector<pqc_token_range>{range});
    Step step = Must(selection ? gpu_->BeginStep(items, *selection, stream_)
                               : gpu_->BeginStep(items, stream_));
    MustBeOk(Attend(step, tensors, ranges, 0));
    return step.End(Rows(layer, 300, 301));
  };
  Expect(run({0, 301}, nullptr), PQC_INVALID_ARGUMENT, "ranges[0]", "in layer 0");
  Expect(run({7, 6}, nullptr), PQC_INVALID_ARGUMENT, "ranges[0]", "in layer 0");
  Expect(run({0, 286}, &selection_), PQC_INVALID_ARGUMENT, "ranges[0]", "in layer 0");
  Step step = Must(gpu_->BeginStep(items, stream_));
  const std::vector<pqc_token_range> on_host = {{0, 1}};
  Expect(step.AttendRange(0, tensors.query(), on_host, SpanOf(tensors.output), SpanOf(tensors.lse)),
         PQC_INVALID_ARGUMENT, "gpu", "ranges is pageable host memory");
  MustBeOk(step.End(Rows(layer, 300, 301)));
}

}  // namespace
}  // namespace pqcached
