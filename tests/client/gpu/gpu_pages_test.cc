// Steps on a GPU that select pages, by the C++ wrapper: the pages are those of steps on the CPU. One
// source for two programs: against the emulation of the device, and the real one.
#include <algorithm>
#include <iterator>
#include <vector>

#include "tests/client/gpu/gpu_wrapper_fixture.h"
#include "tests/client/range_case.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::RangeCase;
using testing::SpanOf;

constexpr uint64_t kAllFlags = PQC_PAGES_WITH_SINK | PQC_PAGES_WITH_WINDOW;
constexpr int32_t kUnwritten = -7;

// Lists on the device, with more room than they need.
struct DevicePages {
  DevicePages(size_t items, size_t lists, uint32_t room)
      : capacity(room),
        pages(std::vector<int32_t>(items * lists * room, kUnwritten)),
        lengths(std::vector<uint32_t>(items, 0)) {}

  uint32_t capacity;
  DeviceArray<int32_t> pages;
  DeviceArray<uint32_t> lengths;
};

class GpuPagesTest : public testing::GpuWrapperTest {
 protected:
  Result<uint32_t> Select(Step& step, uint32_t layer, const Tensors& tensors,
                          const PageOptions& options, const DevicePages& to) {
    return Gpu::TopKPages(step, layer, tensors.query(), options, SpanOf(to.pages), to.capacity,
                          SpanOf(to.lengths));
  }

  // The pages of a step on the CPU, which is abandoned.
  Step::Pages OnCpu(std::span<const StepItem> items, const Selection& selection, uint32_t layer,
                    const std::vector<float>& queries, const PageOptions& options) {
    Step step = Must(client_.BeginStep(items, &selection));
    const uint64_t tokens = queries.size() / (Layer::kQueryHeads * Layer::kKeyDim);
    return Must(
        step.TopKPages(layer, {queries, {tokens, Layer::kQueryHeads, Layer::kKeyDim}}, options));
  }

  // A page whose score rounds otherwise on a device may differ.
  void ExpectPages(const DevicePages& found, const Step::Pages& right) {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    ASSERT_EQ(found.lengths.Get(), right.lengths);
    const std::vector<int32_t> pages = found.pages.Get();
    for (size_t list = 0; list < right.lengths.size() * right.list_count; ++list) {
      const auto length = static_cast<ptrdiff_t>(right.lengths[list / right.list_count]);
      const auto begin = pages.begin() + static_cast<ptrdiff_t>(list * found.capacity);
      const auto first = right.pages.begin() + static_cast<ptrdiff_t>(list * right.capacity);
      ASSERT_TRUE(std::is_sorted(begin, begin + length));
      ASSERT_TRUE(std::all_of(begin + length, begin + found.capacity,
                              [](int32_t page) { return page == -1; }));
      std::vector<int32_t> common;
      std::set_intersection(begin, begin + length, first, first + length,
                            std::back_inserter(common));
#if defined(PQCACHED_CUDA_EMULATION)
      ASSERT_EQ(static_cast<ptrdiff_t>(common.size()), length) << "list " << list;
#else
      ASSERT_GE(static_cast<ptrdiff_t>(common.size()) + 1, length) << "list " << list;
#endif
    }
  }

  // One call of each layer, against the CPU.
  void Check(std::span<const StepItem> items, const Selection& selection,
             const std::vector<float>& queries, const PageOptions& options, uint64_t flags = 0) {
    const Tensors tensors(queries);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const Step::Pages right = OnCpu(items, selection, layer, queries, options);
      const DevicePages found(items.size(), right.list_count, right.capacity + 3);
      Step step = Must(gpu_->BeginStep(items, selection, stream_, 0, flags));
      EXPECT_EQ(Must(Select(step, layer, tensors, options, found)), right.capacity);
      ExpectPages(found, right);
      if (HasFatalFailure()) return;
    }
  }
};

TEST_F(GpuPagesTest, PagesAreThoseOfTheCpu) {
  const Layer layer(500, 3), other(400, 8);
  Sequence first = Fill(layer, 480), second = Fill(other, 389);
  for (const uint32_t length : {1u, 3u}) {
    const StepItem items[] = {{&first, 480, length}, {&second, 389, length}};
    std::vector<float> queries = RangeCase(length, 480, 4).queries;
    const std::vector<float> more = RangeCase(length, 389, 5).queries;
    queries.insert(queries.end(), more.begin(), more.end());
    uint32_t number = 0;  // the combinations take turns
    for (const pqc_group_rule rule :
         {PQC_SUM_SOFTMAX, PQC_MAX_SOFTMAX, PQC_MEAN_LOGIT, PQC_MAX_LOGIT}) {
      for (const pqc_head_rule heads : {PQC_HEADS_EACH, PQC_HEADS_MAX, PQC_HEADS_SUM}) {
        for (const uint64_t tokens : {1u, 40u, 170u, 10'000u}) {
          const uint32_t page_tokens = 16u << number++ % 3;
          SCOPED_TRACE(::testing::Message()
                       << "rule " << rule << " heads " << heads << " tokens " << tokens << " page "
                       << page_tokens << " length " << length);
          Selection selection{
              .sink_tokens = kSink, .window_tokens = kWindow, .retrieved_tokens = tokens};
          selection.group_rule = rule;
          if (tokens == 40) selection.excluded = {{0, 2}, {60, 95}, {128, 192}, {470, 490}};
          Check(items, selection, queries,
                {.page_tokens = page_tokens, .heads = heads, .flags = number / 4 % 4});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(GpuPagesTest, ShortSequencesHaveFewPagesOrNone) {
  const Layer layer(60, 3);
  for (const uint64_t tokens : {1u, 7u, 15u, 20u, 21u, 47u}) {
    Sequence sequence = Fill(layer, tokens);
    const StepItem items[] = {{&sequence, tokens, 2}};
    for (const uint64_t flags : {uint64_t{0}, uint64_t{PQC_PAGES_WITH_SINK}, kAllFlags}) {
      for (const uint64_t step_flags : {uint64_t{0}, uint64_t{PQC_STEP_DECODES}}) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens, flags " << flags);
        Check(items, selection_, RangeCase(2, tokens, 4).queries,
              {.page_tokens = 16, .heads = PQC_HEADS_SUM, .flags = flags}, step_flags);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(GpuPagesTest, AGraphListsThePagesOfItsStep) {
  const Layer layer(460, 3);
  Sequence sequence = Fill(layer, 420);
  const PageOptions options{.page_tokens = 16, .heads = PQC_HEADS_MAX, .flags = kAllFlags};
  Selection selection{.sink_tokens = kSink, .window_tokens = kWindow, .retrieved_tokens = 60};
  Tensors tensors(RangeCase(1, 420, 1).queries);
  constexpr uint32_t kRoom = 7;
  const DevicePages found(1, 1, kRoom);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  for (uint64_t position = 420; position < 450; ++position) {
    const std::vector<float> queries =
        RangeCase(1, position, static_cast<uint32_t>(position)).queries;
    tensors.queries.Set(queries);
    const StepItem items[] = {{&sequence, position, 1}};
    selection.retrieved_tokens = position % 2 == 0 ? 60 : 17;
    const Step::Pages right = OnCpu(items, selection, 1, queries, options);
    Step step = Must(gpu_->BeginStep(items, selection, stream_));
    if (!graph) {
      ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      Must(Select(step, 1, tensors, options, found));
      ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      ASSERT_EQ(found.pages.Get()[0], kUnwritten) << "a capture does no work";
    }
    ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
    ExpectPages(found, right);
    MustBeOk(step.End(Rows(layer, position, position + 1)));
    if (HasFatalFailure()) return;
  }
  // A step whose pages do not fit into the lists of the graph.
  selection.retrieved_tokens = 200;
  const StepItem items[] = {{&sequence, 450, 1}};
  const Step::Pages right = OnCpu(items, selection, 1, RangeCase(1, 449, 449).queries, options);
  Step step = Must(gpu_->BeginStep(items, selection, stream_));
  ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(found.lengths.Get()[0], kRoom);
  const std::vector<int32_t> pages = found.pages.Get();
  EXPECT_TRUE(std::equal(pages.begin(), pages.end(), right.pages.begin()));
  Expect(step.End(Rows(layer, 450, 451)), PQC_OUT_OF_RANGE, "out.capacity", "items[0]");
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(GpuPagesTest, WhatIsWrongIsRefusedByName) {
  const Layer layer(320, 3);
  Sequence sequence = Fill(layer, 300);
  const Tensors tensors(RangeCase(1, 300, 1).queries);
  const StepItem items[] = {{&sequence, 300, 1}};
  Step step = Must(gpu_->BeginStep(items, selection_, stream_));
  const DevicePages to(1, Layer::kKvHeads, 32);
  const auto expect = [&](const PageOptions& options, pqc_status code, const char* field) {
    Expect(Select(step, 0, tensors, options, to).status(), code, field);
  };
  for (const uint32_t page_tokens : {0u, 8u, 48u, 128u}) {
    expect({.page_tokens = page_tokens}, PQC_INVALID_ARGUMENT, "options.page_tokens");
  }
  expect({.flags = 4}, PQC_UNIMPLEMENTED, "options.flags");
  expect({.heads = static_cast<pqc_head_rule>(3)}, PQC_INVALID_ARGUMENT, "options.heads");
  Expect(Select(step, 9, tensors, {}, to).status(), PQC_INVALID_ARGUMENT, "layer");
  const auto call = [&](std::span<int32_t> pages, uint32_t capacity, std::span<uint32_t> lengths) {
    return Gpu::TopKPages(step, 0, tensors.query(), {}, pages, capacity, lengths);
  };
  Expect(call(SpanOf(to.pages), 32, {}).status(), PQC_INVALID_ARGUMENT, "out.lengths");
  std::vector<int32_t> pages(64);
  std::vector<uint32_t> lengths(1);
  Expect(call(pages, 32, SpanOf(to.lengths)).status(), PQC_INVALID_ARGUMENT, "gpu",
         "pages is pageable host memory");
  Expect(call(SpanOf(to.pages), 32, lengths).status(), PQC_INVALID_ARGUMENT, "gpu",
         "lengths is pageable host memory");
  // Candidates [4, 285): pages 0 to 17.
  EXPECT_EQ(Must(call({}, 0, SpanOf(to.lengths))), 18u);
  EXPECT_EQ(to.pages.Get()[0], kUnwritten);
  Expect(call(SpanOf(to.pages), 17, SpanOf(to.lengths)).status(), PQC_OUT_OF_RANGE, "out.capacity",
         "17, but 18 are needed");
  // The selection is that of the step.
  Expect(step.TopKPages(0, tensors.query(), {}, &selection_).status(), PQC_UNIMPLEMENTED,
         "selection");
  EXPECT_EQ(Must(call(SpanOf(to.pages), 18, SpanOf(to.lengths))), 18u);
  MustBeOk(step.End(Rows(layer, 300, 301)));
  const StepItem next[] = {{&sequence, 301, 1}};
  Step each = Must(gpu_->BeginStep(next, selection_, stream_, 0, PQC_STEP_SELECT_PER_TOKEN));
  Expect(Select(each, 0, tensors, {}, to).status(), PQC_UNIMPLEMENTED, "step");
  MustBeOk(each.End(Rows(layer, 301, 302)));
  const StepItem last[] = {{&sequence, 302, 1}};
  Step none = Must(gpu_->BeginStep(last, stream_));
  Expect(Select(none, 0, tensors, {}, to).status(), PQC_INVALID_ARGUMENT, "selection");
}

}  // namespace
}  // namespace pqcached
