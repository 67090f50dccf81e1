// That steps do not allocate on the thread of the engine once they are under way.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "tests/client/step/step_fixture.h"
#include "tests/sanitizers.h"
#include "tests/skip.h"

namespace {
thread_local bool counting = false;
thread_local uint64_t allocation_count = 0;
}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

void* Allocate(size_t size, size_t alignment) {
  if (counting) ++allocation_count;
  void* block = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (!block) throw std::bad_alloc();
  return block;
}

// Inlined where the allocation is not, it looks to GCC as if `new` were freed.
__attribute__((noinline)) void Free(void* memory) { std::free(memory); }

}  // namespace

void* operator new(size_t size) { return Allocate(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
#endif

namespace pqcached {
namespace {

using testing::kOutput;
using testing::Layer;
using testing::MustBeOk;

class StepAllocationTest : public testing::StepTest {
 protected:
  static constexpr uint64_t kPrompt = 300;
  static constexpr uint32_t kSequences = 3;
  static constexpr pqc_token_range kExcluded = {20, 30};

  StepAllocationTest() : layer_(480, 1) {
    for (uint32_t i = 0; i < kSequences; ++i) sequences_.push_back(Fill(layer_, kPrompt));
    own_.sink_tokens = testing::kSink;
    own_.window_tokens = testing::kWindow;
    own_.budget = PQC_BUDGET_COUNT;
    own_.token_count = 60;
    own_.excluded = &kExcluded;
    own_.excluded_count = 1;
    step_selection_ = own_;
    step_selection_.token_count = 50;
    for (uint32_t i = 0; i < kSequences; ++i) {
      items_.push_back(PQC_INIT(pqc_step_item));
      items_[i].sequence = sequences_[i].get();
      shape_[0] = kSequences;
    }
    const auto* numbers = static_cast<const float*>(layer_.queries().c().ptr);
    for (uint32_t i = 0; i < kSequences; ++i) {
      queries_.insert(queries_.end(), numbers, numbers + Layer::kQueryHeads * Layer::kKeyDim);
    }
    output_.resize(kSequences * kOutput);
    lse_.resize(kSequences * Layer::kQueryHeads);
    positions_.resize(kSequences * Layer::kKvHeads * 64);
    for (uint32_t i = 0; i < kLayers; ++i) {
      rows_.push_back(PQC_INIT(pqc_layer_rows));
      rows_[i].layer = i;
    }
  }

  // Rows of the three sequences are the same token's: a stride of nothing.
  pqc_tensor KeysAt(uint64_t position) const {
    pqc_tensor keys = layer_.keys(position, position + 1).c();
    keys.shape = keys_shape_;
    keys.strides = keys_strides_;
    return keys;
  }
  pqc_tensor ValuesAt(uint64_t position) const {
    pqc_tensor values = layer_.values(position, position + 1).c();
    values.shape = values_shape_;
    values.strides = values_strides_;
    return values;
  }
  pqc_tensor QueryTensor() {
    pqc_tensor queries = PQC_INIT(pqc_tensor);
    queries.ptr = queries_.data();
    queries.dtype = PQC_F32;
    queries.ndim = 3;
    queries.shape = shape_;
    return queries;
  }

  template <class Struct>
  static std::vector<unsigned char> BytesOf(const Struct& from) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&from);
    return {bytes, bytes + sizeof(from)};
  }

  // A batch of all sequences at one position, by the C ABI; returns its allocations.
  uint64_t Step(uint64_t position) {
    for (pqc_layer_rows& rows : rows_) {
      rows.keys = KeysAt(position);
      rows.values = ValuesAt(position);
    }
    for (pqc_step_item& item : items_) item.query_position = position;
    const pqc_tensor queries = QueryTensor();
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = output_.data();
    out.output_capacity = output_.size();
    out.lse = lse_.data();
    out.lse_capacity = lse_.size();
    uint64_t offsets[kSequences];
    uint32_t counts[kSequences];
    pqc_step_positions places = PQC_INIT(pqc_step_positions);
    places.offsets = offsets;
    places.counts = counts;
    places.positions = positions_.data();
    places.capacity = positions_.size();
    const int32_t chosen[kSequences][4] = {{9, 3, 5, -1}, {1, 2, 3, 4}, {-1}};
    pqc_position_lists lists = PQC_INIT(pqc_position_lists);
    lists.positions = chosen[0];
    lists.list_count = 1;
    lists.capacity = 4;
    const int32_t ascending[kSequences][4] = {{3, 5, 9, -1}, {1, 2, 3, 4}, {-1}};
    const uint64_t logits_shape[] = {kSequences, Layer::kQueryHeads, lists.capacity};
    pqc_tensor logits = QueryTensor();  // some numbers
    logits.shape = logits_shape;
    pqc_position_lists scored = lists;
    scored.positions = ascending[0];
    scored.logits = &logits;
    int32_t page_numbers[kSequences][32];
    uint32_t lengths[kSequences];
    pqc_page_options page_options = PQC_INIT(pqc_page_options);
    page_options.page_tokens = 16;
    page_options.heads = PQC_HEADS_SUM;
    pqc_step_pages pages = PQC_INIT(pqc_step_pages);
    pages.pages = page_numbers[0];
    pages.capacity = 32;
    pages.lengths = lengths;
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &step_selection_;
    pqc_step* step = nullptr;

    allocation_count = 0;
    counting = true;
    bool ok = pqc_step_begin(handle_, items_.data(), kSequences, &options, &step) == PQC_OK;
    ok = ok && pqc_step_attend(step, 0, &queries, nullptr, &out) == PQC_OK;
    ok = ok && pqc_step_topk(step, 0, &queries, &own_, &places) == PQC_OK;
    ok = ok && pqc_step_attend_begin(step, 1, &queries, &own_, &out) == PQC_OK;
    ok = ok && pqc_step_attend_wait(step) == PQC_OK;
    ok = ok && pqc_step_topk_pages(step, 0, &queries, nullptr, &page_options, &pages) == PQC_OK;
    ok = ok && pqc_step_attend_positions(step, 1, &queries, &lists, &out) == PQC_OK;
    ok = ok && pqc_step_attend_positions(step, 1, nullptr, &scored, &out) == PQC_OK;
    ok = ok && pqc_step_end(step, rows_.data(), kLayers, nullptr) == PQC_OK;
    counting = false;
    EXPECT_TRUE(ok) << pqc_last_error();
    return allocation_count;
  }

  // The same with complete attention, whose rows need not be passed at the end.
  uint64_t DecodeStep(uint64_t position) {
    const pqc_tensor keys = KeysAt(position), values = ValuesAt(position);
    for (pqc_step_item& item : items_) item.query_position = position;
    const pqc_tensor queries = QueryTensor();
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = output_.data();
    out.output_capacity = output_.size();
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &step_selection_;
    pqc_step* step = nullptr;

    allocation_count = 0;
    counting = true;
    bool ok = pqc_step_begin(handle_, items_.data(), kSequences, &options, &step) == PQC_OK;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ok = ok && pqc_step_decode(step, layer, &queries, &keys, &values, nullptr, &out) == PQC_OK;
    }
    ok = ok && pqc_step_end(step, nullptr, 0, nullptr) == PQC_OK;
    counting = false;
    EXPECT_TRUE(ok) << pqc_last_error();
    return allocation_count;
  }

  // Three query tokens for each of some sequences, each with a selection of its own; one remains.
  uint64_t TokensStep(uint64_t position, uint32_t item_count) {
    constexpr uint32_t kTokens = 3;
    const uint64_t tokens = uint64_t{item_count} * kTokens;
    const uint64_t shape[3] = {tokens, Layer::kQueryHeads, Layer::kKeyDim};
    const int64_t strides[3] = {0, Layer::kKeyDim, 1};
    const uint64_t keys_shape[3] = {tokens, Layer::kKvHeads, Layer::kKeyDim};
    const uint64_t values_shape[3] = {tokens, Layer::kKvHeads, Layer::kValueDim};
    pqc_tensor queries = QueryTensor(), keys = KeysAt(position), values = ValuesAt(position);
    queries.shape = shape;
    queries.strides = strides;
    keys.shape = keys_shape;
    values.shape = values_shape;
    rows_[0].keys = keys;
    rows_[0].values = values;
    for (pqc_step_item& item : items_) {
      item.query_position = position;
      item.query_length = kTokens;
    }
    output_.resize(tokens * kOutput);
    lse_.resize(tokens * Layer::kQueryHeads);
    positions_.resize(tokens * Layer::kKvHeads * 64);
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = output_.data();
    out.output_capacity = output_.size();
    out.lse = lse_.data();
    out.lse_capacity = lse_.size();
    uint64_t offsets[kSequences];
    uint32_t counts[kSequences];
    pqc_step_positions places = PQC_INIT(pqc_step_positions);
    places.offsets = offsets;
    places.counts = counts;
    places.positions = positions_.data();
    places.capacity = positions_.size();
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &step_selection_;
    options.flags = PQC_STEP_SELECT_PER_TOKEN;
    const uint32_t accepted[kSequences] = {1, 1, 1};
    pqc_step* step = nullptr;
    const auto structs = [&] {
      return std::vector{BytesOf(items_[0]), BytesOf(options),  BytesOf(step_selection_),
                         BytesOf(own_),      BytesOf(queries),  BytesOf(keys),
                         BytesOf(values),    BytesOf(rows_[0]), BytesOf(out)};
    };
    const auto before = structs();

    allocation_count = 0;
    counting = true;
    bool ok = pqc_step_begin(handle_, items_.data(), item_count, &options, &step) == PQC_OK;
    ok = ok && pqc_step_attend(step, 0, &queries, nullptr, &out) == PQC_OK;
    ok = ok && pqc_step_topk(step, 0, &queries, &own_, &places) == PQC_OK;
    ok = ok && pqc_step_attend_begin(step, 1, &queries, &own_, &out) == PQC_OK;
    ok = ok && pqc_step_attend_wait(step) == PQC_OK;
    ok = ok && pqc_step_decode(step, 1, &queries, &keys, &values, nullptr, &out) == PQC_OK;
    ok = ok && pqc_step_end(step, rows_.data(), 1, accepted) == PQC_OK;
    counting = false;
    EXPECT_TRUE(ok) << pqc_last_error();
    EXPECT_EQ(structs(), before) << "a call has changed its arguments";
    return allocation_count;
  }

  // Runs steps until they allocate no more, and expects that of the next 40.
  template <class RunStep>
  void ExpectNoAllocation(const RunStep& run) {
    // A tail of 128 tokens begins at 300; the image of the next one is new memory.
    uint64_t position = kPrompt;
    for (; position < kPrompt + 10; ++position) {
      run(position);
      FlushAll();
    }
    sidecar_.CloseGate();  // more steps on their way at once than ever after
    for (; position < kPrompt + 20; ++position) run(position);
    sidecar_.OpenGate();
    FlushAll();
    for (; position < kPrompt + 60; ++position) {
      EXPECT_EQ(run(position), 0u) << "at position " << position;
      FlushAll();
    }
    EXPECT_GT(sidecar_.staged_appends, 0u);
  }

  void FlushAll() {
    for (Sequence& sequence : sequences_) MustBeOk(sequence.Flush());
  }

  const Layer layer_;
  std::vector<Sequence> sequences_;
  pqc_selection own_ = PQC_INIT(pqc_selection);
  pqc_selection step_selection_;
  std::vector<pqc_step_item> items_;
  std::vector<pqc_layer_rows> rows_;
  std::vector<float> queries_;
  std::vector<uint32_t> positions_;
  uint64_t shape_[3] = {0, Layer::kQueryHeads, Layer::kKeyDim};
  const uint64_t keys_shape_[3] = {kSequences, Layer::kKvHeads, Layer::kKeyDim};
  const uint64_t values_shape_[3] = {kSequences, Layer::kKvHeads, Layer::kValueDim};
  const int64_t keys_strides_[3] = {0, Layer::kKeyDim, 1};
  const int64_t values_strides_[3] = {0, Layer::kValueDim, 1};
};

TEST_F(StepAllocationTest, StepsUnderWayDoNotAllocateOnTheCallersThread) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  PQC_SKIP("plain_build") << "the sanitizer has an operator new of its own";
#else
  ExpectNoAllocation([this](uint64_t position) { return Step(position); });
#endif
}

TEST_F(StepAllocationTest, DecodeCallsUnderWayDoNotAllocateEither) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  PQC_SKIP("plain_build") << "the sanitizer has an operator new of its own";
#else
  ExpectNoAllocation([this](uint64_t position) { return DecodeStep(position); });
#endif
}

TEST_F(StepAllocationTest, SelectionsOfEachTokenDoNotAllocateEither) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  PQC_SKIP("plain_build") << "the sanitizer has an operator new of its own";
#else
  ExpectNoAllocation([this](uint64_t position) { return TokensStep(position, kSequences); });
#endif
}

TEST_F(StepAllocationTest, NorDoThoseOfOneItemOnAllThreads) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  PQC_SKIP("plain_build") << "the sanitizer has an operator new of its own";
#else
  ExpectNoAllocation([this](uint64_t position) { return TokensStep(position, 1); });
#endif
}

TEST_F(StepAllocationTest, TheCounterCounts) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_GT(Step(kPrompt), 0u);
#endif
}

}  // namespace
}  // namespace pqcached
