// Attention over ranges by the C ABI on the local path: single calls, steps, and results in tensors
// of the engine's.
#include <cmath>

#include "kernels/base/dtype.h"
#include "tests/client/range_case.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::ExpectAttention;
using testing::FillIndexed;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::RangeCase;
using testing::StepTest;

class RangeTest : public StepTest {};

// Memory of an engine for the attention of some tokens, of any dtype and order.
struct Place {
  Place(uint64_t token_count, pqc_dtype element, bool heads_first, pqc_log_base base)
      : tokens(token_count), dtype(element), transposed(heads_first), lse_base(base) {
    bytes.assign(kOutputs() * Size(), std::byte{0x7f});
    lse_bytes.assign(tokens * Layer::kQueryHeads * Size(), std::byte{0x7f});
  }
  size_t kOutputs() const { return tokens * Layer::kQueryHeads * Layer::kValueDim * 2; }
  size_t Size() const { return dtype == PQC_F32 ? 4 : 2; }

  // Output dims are two elements apart.
  AttentionMemory memory() {
    constexpr int64_t kHeads = Layer::kQueryHeads, kDim = Layer::kValueDim;
    const auto count = static_cast<int64_t>(tokens);
    if (transposed) {
      return {{bytes.data(), dtype, {tokens, kHeads, kDim}, {2 * kDim, 2 * kDim * count, 2}},
              {lse_bytes.data(), dtype, {tokens, kHeads}, {1, count}},
              lse_base};
    }
    return {{bytes.data(), dtype, {tokens, kHeads, kDim}, {2 * kDim * kHeads, 2 * kDim, 2}},
            {lse_bytes.data(), dtype, {tokens, kHeads}},
            lse_base};
  }

  // The contents as floats with natural logarithms.
  Attention Contents() const {
    Attention attention;
    const auto type = static_cast<kernels::DType>(dtype);
    for (uint64_t token = 0; token < tokens; ++token) {
      for (uint64_t head = 0; head < Layer::kQueryHeads; ++head) {
        const uint64_t row = transposed ? head * tokens + token : token * Layer::kQueryHeads + head;
        const float lse = kernels::LoadElement(type, lse_bytes.data(), row);
        attention.lse.push_back(lse_base == PQC_LOG_BASE2 ? lse * std::log(2.0f) : lse);
        for (uint64_t i = 0; i < Layer::kValueDim; ++i) {
          attention.output.push_back(
              kernels::LoadElement(type, bytes.data(), (row * Layer::kValueDim + i) * 2));
        }
      }
    }
    return attention;
  }

  uint64_t tokens;
  pqc_dtype dtype;
  bool transposed;
  pqc_log_base lse_base;
  std::vector<std::byte> bytes, lse_bytes;
};

// Calls `check(place, tolerance)` for every kind of place.
template <class Check>
void ForEachPlace(uint64_t tokens, const Check& check) {
  for (const pqc_dtype dtype : {PQC_F32, PQC_F16, PQC_BF16}) {
    for (const bool transposed : {false, true}) {
      for (const pqc_log_base base : {PQC_LOG_NATURAL, PQC_LOG_BASE2}) {
        SCOPED_TRACE(::testing::Message()
                     << "dtype " << dtype << " transposed " << transposed << " base " << base);
        // Rounding of an lse up to 8 in its base.
        const float tolerance = dtype == PQC_F32 ? 1e-4f : dtype == PQC_F16 ? 6e-3f : 5e-2f;
        check(Place(tokens, dtype, transposed, base), tolerance);
      }
    }
  }
}

TEST_F(RangeTest, IsCausalAttentionInPlainLoops) {
  const Layer layer(600, 3);
  Sequence sequence = Fill(layer, 600);
  for (const uint64_t tokens : {uint64_t{1}, uint64_t{5}, uint64_t{90}}) {
    for (const pqc_token_range range : {pqc_token_range{0, 600}, pqc_token_range{77, 512},
                                        pqc_token_range{600, 600}, pqc_token_range{0, 1}}) {
      const RangeCase behind(tokens, 600, 4), inside(tokens, 300, 5);
      ExpectAttention(Must(sequence.AttendRange(behind.query(), range)),
                      behind.Expected(layer, range));
      ExpectAttention(Must(sequence.AttendRange(inside.query(1), range)),
                      inside.Expected(layer, range));
    }
  }
}

TEST_F(RangeTest, NeedsNoIndex) {
  const Layer layer(200, 3);
  Sequence sequence = Must(cache_.CreateSequence());
  MustBeOk(sequence.Ingest(1, 0, layer.keys(0, 200), layer.values(0, 200)));
  const RangeCase one(3, 200, 4);
  ExpectAttention(Must(sequence.AttendRange(one.query(1), {0, 200})),
                  one.Expected(layer, {0, 200}));
}

TEST_F(RangeTest, ResultsAreTensorsOfTheEngine) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  const RangeCase one(9, 300, 4);
  const Attention expected = one.Expected(layer, {10, 290});
  ForEachPlace(9, [&](Place place, float tolerance) {
    MustBeOk(sequence.AttendRange(one.query(), {10, 290}, place.memory()));
    ExpectAttention(place.Contents(), expected, tolerance);
  });
}

TEST_F(RangeTest, SelectionsAreWrittenToTensorsToo) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  const RangeCase one(2, 298, 4);
  for (const double ratio : {0.3, 1.0}) {
    const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = ratio};
    const Attention expected = Must(sequence.Attend(one.query(), selection));
    ForEachPlace(2, [&](Place place, float tolerance) {
      const Selected selected = Must(sequence.Attend(one.query(), selection, place.memory()));
      EXPECT_EQ(selected.count, expected.selected.count);
      ExpectAttention(place.Contents(), expected, tolerance);
    });
  }
}

TEST_F(RangeTest, StepsAttendToARangeOfEachItem) {
  const Layer layer(400, 3), other(300, 8);
  Sequence first = Fill(layer, 380), second = Fill(other, 290);
  const RangeCase one(1, 380, 4), two(3, 290, 5);
  std::vector<float> queries = one.queries;
  queries.insert(queries.end(), two.queries.begin(), two.queries.end());
  const Tensor packed{queries, {4, Layer::kQueryHeads, Layer::kKeyDim}};
  const pqc_token_range ranges[] = {{0, 380}, {16, 270}};
  Attention expected = one.Expected(layer, ranges[0]);
  const Attention rest = two.Expected(other, ranges[1]);
  expected.output.insert(expected.output.end(), rest.output.begin(), rest.output.end());
  expected.lse.insert(expected.lse.end(), rest.lse.begin(), rest.lse.end());

  const StepItem items[] = {{&first, 380, 1}, {&second, 290, 3}};
  Step step = Must(client_.BeginStep(items, nullptr));  // no selection, and no index is used
  Attention attention{std::vector<float>(4 * testing::kOutput),
                      std::vector<float>(4 * Layer::kQueryHeads)};
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(step.AttendRange(number, packed, ranges, attention.output, attention.lse));
    ExpectAttention(attention, expected);
  }
  ForEachPlace(4, [&](Place place, float tolerance) {
    MustBeOk(step.AttendRange(0, packed, ranges, place.memory()));
    ExpectAttention(place.Contents(), expected, tolerance);
  });
  std::vector<LayerRows> rows = Rows(layer, 380, 384);
  MustBeOk(step.End(rows));
}

// Rows of the steps before are in flight when the next one begins.
TEST_F(RangeTest, StepsWaitForTheRowsOfEarlierSteps) {
  const Layer layer(330, 3);
  Sequence sequence = Fill(layer, 300);
  for (uint64_t position = 300; position < 330; ++position) {
    const RangeCase one(1, position, static_cast<uint32_t>(position));
    const StepItem items[] = {{&sequence, position, 1}};
    Step step = Must(client_.BeginStep(items, nullptr));
    const pqc_token_range range[] = {{0, position}};
    Attention attention{std::vector<float>(testing::kOutput),
                        std::vector<float>(Layer::kQueryHeads)};
    MustBeOk(step.AttendRange(1, one.query().queries, range, attention.output, attention.lse));
    ExpectAttention(attention, one.Expected(layer, range[0]));
    MustBeOk(step.End(Rows(layer, position, position + 1)));
  }
}

TEST_F(RangeTest, StepsAttendInTensorsBySelectionToo) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 299);
  const RangeCase one(1, 299, 4);
  const Attention expected = one.Expected(layer, {kSink, 300 - kWindow});
  const StepItem items[] = {{&sequence, 299, 1}};
  Step step = Must(client_.BeginStep(items, &selection_));  // all candidates
  ForEachPlace(1, [&](Place place, float tolerance) {
    MustBeOk(step.Attend(0, one.query().queries, place.memory()));
    ExpectAttention(place.Contents(), expected, tolerance);
  });
}

TEST_F(RangeTest, MergesTensorsOfAnyKind) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  const RangeCase one(7, 295, 4);
  const Attention expected = one.Expected(layer, {0, 300});
  const Attention head = Must(sequence.AttendRange(one.query(), {0, 100}));
  ForEachPlace(7, [&](Place place, float tolerance) {
    MustBeOk(sequence.AttendRange(one.query(), {100, 300}, place.memory()));
    const uint64_t tokens = 7;
    const AttentionMemory other{{head.output, {tokens, Layer::kQueryHeads, Layer::kValueDim}},
                                {head.lse, {tokens, Layer::kQueryHeads}}};
    MustBeOk(place.memory().Merge(other));
    ExpectAttention(place.Contents(), expected, tolerance);
  });
}

TEST_F(RangeTest, BadArgumentsAreNamed) {
  const Layer layer(300, 3);
  Sequence sequence = Fill(layer, 300);
  const RangeCase one(2, 298, 4);
  const auto range = [&](const RangeCase& query, pqc_token_range tokens) {
    return sequence.AttendRange(query.query(), tokens).status();
  };
  Expect(range(one, {0, 301}), PQC_OUT_OF_RANGE, "tokens");
  Expect(range(one, {3, 2}), PQC_INVALID_ARGUMENT, "tokens");
  Expect(range(RangeCase(8193, 0, 1), {0, 1}), PQC_INVALID_ARGUMENT, "query.queries.shape[0]",
         "8192");
  Expect(range(RangeCase(2, (uint64_t{1} << 30) - 1, 1), {0, 1}), PQC_INVALID_ARGUMENT,
         "query.query_position");
  RangeCase infinite = one;
  infinite.queries[Layer::kKeyDim] = INFINITY;
  Expect(range(infinite, {0, 300}), PQC_INVALID_ARGUMENT, "query.queries", "query head 1");

  const auto into = [&](const AttentionMemory& memory) {
    return sequence.AttendRange(one.query(), {0, 300}, memory);
  };
  Place place(2, PQC_F16, false, PQC_LOG_NATURAL);
  AttentionMemory memory = place.memory();
  memory.lse = {place.lse_bytes.data(), PQC_F16, {3, Layer::kQueryHeads}};
  Expect(into(memory), PQC_INVALID_ARGUMENT, "out.lse_tensor.shape[0]");
  memory = place.memory();
  memory.output = {
      place.bytes.data(), PQC_F16, {2, Layer::kQueryHeads, Layer::kValueDim}, {0, 32, 1}};
  Expect(into(memory), PQC_INVALID_ARGUMENT, "out.output_tensor.strides[0]");
  // By the C call, because C++ must not copy a value that the enum does not have.
  const AttentionMemory whole = place.memory();
  const pqc_partial good = whole.c();
  pqc_attention out = PQC_INIT(pqc_attention);
  out.output_tensor = &good.output;
  out.lse_tensor = &good.lse;
  const uint32_t unknown = 2;
  std::memcpy(&out.lse_base, &unknown, sizeof(unknown));
  const Query asked = one.query();
  pqc_query query = PQC_INIT(pqc_query);
  query.query_position = asked.query_position;
  query.queries = asked.queries.c();
  Expect(Status(pqc_attend_range(sequence.get(), &query, {0, 300}, &out)), PQC_INVALID_ARGUMENT,
         "out.lse_base");

  const StepItem items[] = {{&sequence, 300, 2}};
  Step step = Must(client_.BeginStep(items, nullptr));
  Attention attention{std::vector<float>(2 * testing::kOutput),
                      std::vector<float>(2 * Layer::kQueryHeads)};
  const auto in_step = [&](pqc_token_range tokens) {
    const pqc_token_range ranges[] = {tokens};
    return step.AttendRange(0, one.query().queries, ranges, attention.output, attention.lse);
  };
  Expect(in_step({0, 301}), PQC_INVALID_ARGUMENT, "ranges[0]");
  Expect(in_step({5, 4}), PQC_INVALID_ARGUMENT, "ranges[0]");
  MustBeOk(in_step({5, 5}));
  EXPECT_EQ(attention.output[0], 0.0f);
}

}  // namespace
}  // namespace pqcached
