#include "kvstore/read/resolve.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace pqcached::kvstore {
namespace {

using Fault = ResolvedSelection::Fault;

void Fail(Fault fault, std::string message, ResolvedSelection* resolved) {
  resolved->fault = fault;
  resolved->message = std::move(message);
}

// Returns the reason why a field is invalid; empty when all fields are valid.
std::string CheckFields(const Selection& selection, uint64_t query_position) {
  if (query_position >= kMaxSequenceTokens) {
    return "query_position is " + std::to_string(query_position) + "; it must be below " +
           std::to_string(kMaxSequenceTokens);
  }
  if (selection.rule < GroupRule::kSumSoftmax || selection.rule > GroupRule::kMaxLogit)
    return "group_rule is unknown";
  if (selection.excluded.size() > kMaxExcludedRanges) {
    return "excluded: " + std::to_string(selection.excluded.size()) + " ranges; at most " +
           std::to_string(kMaxExcludedRanges);
  }
  for (size_t i = 0; i < selection.excluded.size(); ++i) {
    const PositionRange& range = selection.excluded[i];
    const auto field = [i] { return "excluded[" + std::to_string(i) + "]"; };
    if (range.begin >= range.end) return field() + " is empty";
    if (range.end > kMaxSequenceTokens) return field() + " ends beyond the longest sequence";
    if (i > 0 && range.begin < selection.excluded[i - 1].end) {
      return field() + " begins before the end of the range before it";
    }
  }
  if (selection.budget_kind == BudgetKind::kRatio) {
    if (!(selection.budget_ratio > 0.0 && selection.budget_ratio <= 1.0)) {
      return "budget token_ratio is " + std::to_string(selection.budget_ratio) +
             "; it must lie in (0, 1]";
    }
  } else if (selection.budget_kind != BudgetKind::kCount) {
    return "budget is of an unknown kind";
  }
  return {};
}

// Calls take(range) for each piece of [begin, end) outside the excluded ranges; returns the number
// of tokens in the pieces.
template <typename Take>
uint32_t TakeWithout(const std::vector<PositionRange>& excluded, uint32_t begin, uint32_t end,
                     Take take) {
  uint32_t count = 0;
  const auto add = [&](PositionRange range) {
    take(range);
    count += range.end - range.begin;
  };
  for (const PositionRange& gap : excluded) {
    if (begin >= end) break;
    if (gap.end <= begin) continue;
    if (gap.begin >= end) break;
    if (gap.begin > begin) add({begin, gap.begin});
    begin = std::max(begin, gap.end);
  }
  if (begin < end) add({begin, end});
  return count;
}

}  // namespace

ResolvedSelection Resolve(const Selection& selection, uint64_t query_position,
                          uint32_t stored_tokens) {
  ResolvedSelection resolved;
  Resolve(selection, query_position, stored_tokens, &resolved);
  return resolved;
}

void Resolve(const Selection& selection, uint64_t query_position, uint32_t stored_tokens,
             ResolvedSelection* resolved) {
  resolved->fault = Fault::kNone;
  resolved->message.clear();
  resolved->candidates.clear();
  resolved->candidate_count = resolved->select_count = 0;
  resolved->sink_tokens = resolved->window_tokens = 0;
  if (std::string wrong = CheckFields(selection, query_position); !wrong.empty()) {
    return Fail(Fault::kInvalid, std::move(wrong), resolved);
  }
  const auto context = static_cast<uint32_t>(query_position) + 1;
  const uint32_t sink_end = std::min(selection.sink_tokens, context);
  const uint32_t window_begin =
      std::max(sink_end, context - std::min(selection.window_tokens, context));
  if (window_begin > sink_end && window_begin > stored_tokens) {
    return Fail(Fault::kNotStored,
                "query_position is " + std::to_string(query_position) +
                    ", so rows up to position " + std::to_string(window_begin) + " are needed; " +
                    std::to_string(stored_tokens) + " are stored",
                resolved);
  }
  const auto count_only = [](PositionRange) {};
  resolved->sink_tokens = TakeWithout(selection.excluded, 0, sink_end, count_only);
  resolved->window_tokens = TakeWithout(selection.excluded, window_begin, context, count_only);
  resolved->candidate_count =
      TakeWithout(selection.excluded, sink_end, window_begin,
                  [&](PositionRange range) { resolved->candidates.push_back(range); });

  const uint64_t kept = uint64_t{resolved->sink_tokens} + resolved->window_tokens;
  if (selection.budget_kind == BudgetKind::kCount) {
    const uint64_t most = kept + resolved->candidate_count;
    if (selection.budget_count <= kept || selection.budget_count > most) {
      return Fail(Fault::kInvalid,
                  "budget token_count is " + std::to_string(selection.budget_count) +
                      "; it must lie in [sink + window + 1, attendable tokens] = [" +
                      std::to_string(kept + 1) + ", " + std::to_string(most) + "]",
                  resolved);
    }
    resolved->select_count = static_cast<uint32_t>(selection.budget_count - kept);
  } else {
    const auto budget = static_cast<uint64_t>(std::floor(selection.budget_ratio * context));
    resolved->select_count = static_cast<uint32_t>(
        std::min<uint64_t>(budget > kept ? budget - kept : 0, resolved->candidate_count));
  }
}

}  // namespace pqcached::kvstore
