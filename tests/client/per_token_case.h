// Steps whose query tokens have a selection each (PQC_STEP_SELECT_PER_TOKEN), and what is right
// about them: what a step of each token alone gives at the item's query position.
#ifndef PQCACHED_TESTS_CLIENT_PER_TOKEN_CASE_H_
#define PQCACHED_TESTS_CLIENT_PER_TOKEN_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/client/decode_case.h"

namespace pqcached::testing {

// Selections of query tokens, in order, and the attention over them.
struct TokenSelections {
  std::vector<std::vector<uint32_t>> positions;  // per token: [kv_heads, counts[token]]
  std::vector<uint32_t> counts;
  Attention attention;
};

inline Attention RoomFor(uint64_t tokens) {
  Attention room;
  room.output.assign(tokens * Layer::kQueryHeads * Layer::kValueDim, NAN);
  room.lse.assign(tokens * Layer::kQueryHeads, NAN);
  return room;
}

// Steps of one token each, which are abandoned.
inline TokenSelections SelectAlone(Client& client, const std::vector<DecodeItem>& batch,
                                   const DecodeArguments& from, uint32_t layer,
                                   const Selection& selection, uint64_t flags = 0) {
  constexpr size_t kQuery = Layer::kQueryHeads * Layer::kKeyDim;
  TokenSelections all;
  size_t begin = 0;
  for (const DecodeItem& item : batch) {
    for (uint32_t token = 0; token < item.length; ++token, begin += kQuery) {
      const StepItem alone[] = {{item.sequence, item.position}};
      Step step = Must(client.BeginStep(alone, &selection, 0, flags));
      const Tensor query(std::span(from.queries).subspan(begin, kQuery),
                         {1, Layer::kQueryHeads, Layer::kKeyDim});
      const Step::Positions best = Must(step.TopK(layer, query));
      all.positions.push_back(best.positions);
      all.counts.push_back(best.counts[0]);
      Attention attention = RoomFor(1);
      MustBeOk(step.Attend(layer, query, attention.output, attention.lse));
      Append(attention, &all.attention);
    }
  }
  return all;
}

// The attention of the engine over sinks and windows, merged into `attention`: the window of an
// item's first token, and the item's tokens up to each token's own.
inline void MergeOwn(const std::vector<DecodeItem>& batch, const DecodeArguments& from,
                     uint32_t layer, const Selection& selection, Attention* attention) {
  Attention own;
  for (size_t i = 0; i < batch.size(); ++i) {
    const DecodeItem& item = batch[i];
    const auto attend = [&](pqc_token_range range) {
      return from.cases[i].Expected((*item.model)[layer], range);
    };
    Attention of_item = attend({0, 0});
    const auto add = [&](uint64_t begin, uint64_t end) {
      for (const pqc_token_range& gap : selection.excluded) {
        if (begin < gap.begin) of_item.Merge(attend({begin, std::min(end, gap.begin)}));
        begin = std::max(begin, std::min(end, gap.end));
      }
      of_item.Merge(attend({begin, std::max(begin, end)}));
    };
    const uint64_t context = item.position + 1;
    const uint64_t sink_end = std::min(selection.sink_tokens, context);
    add(0, sink_end);
    add(std::max(sink_end, context - std::min(selection.window_tokens, context)),
        item.position + item.length);
    Append(of_item, &own);
  }
  attention->Merge(own);
}

// Whether two query tokens of one item have different selections.
inline bool SelectionsDiffer(const std::vector<DecodeItem>& batch, const TokenSelections& all) {
  size_t first = 0;
  bool differ = false;
  for (const DecodeItem& item : batch) {
    for (uint32_t token = 1; token < item.length; ++token) {
      differ |= all.positions[first] != all.positions[first + token];
    }
    first += item.length;
  }
  return differ;
}

inline void ExpectPositions(const std::vector<DecodeItem>& batch, const Step::Positions& found,
                            const TokenSelections& alone) {
  size_t token = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    uint64_t begin = found.offsets[i];
    for (uint32_t j = 0; j < batch[i].length; ++j, ++token) {
      ASSERT_EQ(found.counts[i], alone.counts[token]) << "token " << token;
      const std::vector<uint32_t>& expected = alone.positions[token];
      ASSERT_LE(begin + expected.size(), found.positions.size());
      const auto at = found.positions.begin() + static_cast<ptrdiff_t>(begin);
      ASSERT_EQ(std::vector<uint32_t>(at, at + static_cast<ptrdiff_t>(expected.size())), expected)
          << "token " << token;
      begin += expected.size();
    }
  }
}

// One layer of a step, by every call that selects; the step is abandoned. `differ`: there are
// tokens to choose from.
inline void ExpectOwnSelections(Client& client, const std::vector<DecodeItem>& batch,
                                uint32_t layer, const Selection& selection, bool differ) {
  const DecodeArguments from(batch, layer);
  const TokenSelections alone = SelectAlone(client, batch, from, layer, selection);
  ASSERT_EQ(SelectionsDiffer(batch, alone), differ);
  Step step = Must(client.BeginStep(ItemsOf(batch), &selection, 0, PQC_STEP_SELECT_PER_TOKEN));
  ExpectPositions(batch, Must(step.TopK(layer, from.query_tensor())), alone);
  Attention attended = RoomFor(from.tokens), beside = attended;
  std::vector<uint32_t> counts(batch.size(), 12345);
  MustBeOk(step.Attend(layer, from.query_tensor(), attended.output, attended.lse, nullptr, counts));
  ExpectAttention(attended, alone.attention, 1e-5f);
  size_t token = 0;
  for (size_t i = 0; i < batch.size(); token += batch[i++].length) {
    EXPECT_EQ(counts[i], alone.counts[token]);
  }
  MustBeOk(step.AttendBegin(layer, from.query_tensor(), beside.output, beside.lse));
  MustBeOk(step.AttendWait());
  ExpectAttention(beside, attended, 1e-6f);
  Attention decoded;
  MustBeOk(DecodeLayer(step, layer, from, &decoded));
  MergeOwn(batch, from, layer, selection, &attended);
  ExpectAttention(decoded, attended);
}

// With all candidates, the attention over selection, sink and window is full attention.
inline void ExpectFullWithOwn(Client& client, const std::vector<DecodeItem>& batch, uint32_t layer,
                              const Selection& selection, uint64_t flags) {
  const DecodeArguments from(batch, layer);
  const Attention full = FullAttention(batch, from, layer);
  Step step = Must(client.BeginStep(ItemsOf(batch), &selection, 0, flags));
  Attention attention = RoomFor(from.tokens);
  MustBeOk(step.Attend(layer, from.query_tensor(), attention.output, attention.lse));
  MergeOwn(batch, from, layer, selection, &attention);
  ExpectAttention(attention, full);
  MustBeOk(DecodeLayer(step, layer, from, &attention));
  ExpectAttention(attention, full);
}

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_PER_TOKEN_CASE_H_
