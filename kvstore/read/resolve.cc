#include "kvstore/read/resolve.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

void Refuse(std::string_view field, std::string_view text, ResolvedSelection* resolved) {
  resolved->refusal.Set(StatusCode::kInvalidArgument, field, text);
}

void CheckExcluded(const Selection& selection, ResolvedSelection* resolved) {
  if (selection.excluded.size() > kMaxExcludedRanges) {
    return Refuse("selection.excluded",
                  std::to_string(selection.excluded.size()) + " ranges, must be at most " +
                      std::to_string(kMaxExcludedRanges),
                  resolved);
  }
  for (size_t i = 0; i < selection.excluded.size(); ++i) {
    const PositionRange& range = selection.excluded[i];
    const char* wrong = nullptr;
    if (range.begin >= range.end) {
      wrong = "empty";
    } else if (range.end > kMaxSequenceTokens) {
      wrong = "ends beyond the longest sequence";
    } else if (i > 0 && range.begin < selection.excluded[i - 1].end) {
      wrong = "begins before the end of the range before it";
    }
    if (wrong != nullptr) {
      return Refuse("selection.excluded[" + std::to_string(i) + "]", wrong, resolved);
    }
  }
}

void CheckMass(const Selection& selection, ResolvedSelection* resolved) {
  if (!(selection.budget_ratio > 0.0 && selection.budget_ratio <= 1.0)) {
    return Refuse("selection.attention_mass",
                  std::to_string(selection.budget_ratio) + ", must lie in (0, 1]", resolved);
  }
  const auto [least, most] = selection.mass_bounds();
  if (most > 0 && least > most) {
    Refuse("selection.least_tokens",
           std::to_string(least) + ", must be at most most_tokens, " + std::to_string(most),
           resolved);
  }
}

// Sets the refusal when a field is out of its range.
void CheckFields(const Selection& selection, uint64_t query_position, ResolvedSelection* resolved) {
  if (query_position >= kMaxSequenceTokens) {
    return Refuse(
        "query.query_position",
        std::to_string(query_position) + ", must be below " + std::to_string(kMaxSequenceTokens),
        resolved);
  }
  if (selection.group_rule < GroupRule::kSumSoftmax ||
      selection.group_rule > GroupRule::kMaxLogit) {
    return Refuse("selection.group_rule", "unknown", resolved);
  }
  if (!IsRerankFactor(double{selection.rerank_factor})) {
    return Refuse("selection.rerank_factor",
                  std::to_string(selection.rerank_factor) + ", must be 0 or lie in [1, " +
                      std::to_string(static_cast<int>(kMaxRerankFactor)) + "]",
                  resolved);
  }
  CheckExcluded(selection, resolved);
  if (!resolved->refusal.ok()) return;
  if (selection.budget_kind == BudgetKind::kRatio) {
    if (!(selection.budget_ratio > 0.0 && selection.budget_ratio <= 1.0)) {
      Refuse("selection.token_ratio",
             std::to_string(selection.budget_ratio) + ", must lie in (0, 1]", resolved);
    }
  } else if (selection.budget_kind == BudgetKind::kRetrieved) {
    if (selection.budget_count == 0) {
      Refuse("selection.retrieved_tokens", "0, must be at least 1", resolved);
    }
  } else if (selection.budget_kind == BudgetKind::kMass) {
    CheckMass(selection, resolved);
  } else if (selection.budget_kind != BudgetKind::kCount) {
    Refuse("selection.budget", "unknown kind", resolved);
  }
}

// Calls take(range) for each piece of [begin, end) outside the excluded ranges; returns the number
// of tokens in the pieces.
template <typename Take>
uint32_t TakeWithout(const ExcludedRanges& excluded, uint32_t begin, uint32_t end, Take take) {
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

uint32_t ShortlistCount(const Selection& selection, const ResolvedSelection& resolved) {
  if (!IsBuilt(selection.index) || selection.rerank_factor == 1.0f) {
    return resolved.select_count;
  }
  // The factor is a float: 1.1 of 10 tokens are 11, although the float next to 1.1 is larger.
  constexpr double kBelowOne = 1.0 - std::numeric_limits<float>::epsilon();
  const double wanted =
      std::ceil(double{selection.rerank_factor} * resolved.select_count * kBelowOne);
  return std::max(resolved.select_count,
                  static_cast<uint32_t>(std::min<double>(wanted, resolved.candidate_count)));
}

Selection TermsOf(LayerKind kind, const Selection& selection) {
  Selection terms = selection;
  if (kind == LayerKind::kSelected) return terms;
  terms.index = {};
  terms.budget_kind = BudgetKind::kRatio;
  terms.budget_ratio = 1.0;
  terms.rerank_factor = 1.0f;
  terms.tail_estimate = false;
  if (kind == LayerKind::kFull) return terms;
  // All tokens are the engine's own, and none of them is counted.
  terms.sink_tokens = 0;
  terms.window_tokens = kMaxSequenceTokens;
  terms.excluded = {{0, kMaxSequenceTokens}};
  return terms;
}

ResolvedSelection Resolve(const Selection& selection, uint64_t query_position,
                          uint32_t stored_tokens) {
  ResolvedSelection resolved;
  Resolve(selection, query_position, stored_tokens, &resolved);
  return resolved;
}

void Resolve(const Selection& selection, uint64_t query_position, uint32_t stored_tokens,
             ResolvedSelection* resolved) {
  resolved->refusal.Clear();
  resolved->candidates.clear();
  resolved->own.clear();
  resolved->candidate_count = resolved->select_count = 0;
  resolved->least_count = resolved->shortlist_count = 0;
  resolved->sink_tokens = resolved->window_tokens = 0;
  CheckFields(selection, query_position, resolved);
  if (!resolved->refusal.ok()) return;
  const auto context = static_cast<uint32_t>(query_position) + 1;
  const uint32_t sink_end = std::min(selection.sink_tokens, context);
  const uint32_t window_begin =
      std::max(sink_end, context - std::min(selection.window_tokens, context));
  if (window_begin > sink_end && window_begin > stored_tokens) {
    return resolved->refusal.Set(StatusCode::kOutOfRange, "query.query_position",
                                 std::to_string(query_position) + " needs rows up to position " +
                                     std::to_string(window_begin) + "; " +
                                     std::to_string(stored_tokens) + " are stored");
  }
  const auto add_own = [&](PositionRange range) { resolved->own.push_back(range); };
  resolved->sink_tokens = TakeWithout(selection.excluded, 0, sink_end, add_own);
  resolved->window_tokens = TakeWithout(selection.excluded, window_begin, context, add_own);
  resolved->candidate_count =
      TakeWithout(selection.excluded, sink_end, window_begin,
                  [&](PositionRange range) { resolved->candidates.push_back(range); });

  const uint64_t kept = uint64_t{resolved->sink_tokens} + resolved->window_tokens;
  if (selection.budget_kind == BudgetKind::kCount) {
    const uint64_t most = kept + resolved->candidate_count;
    if (selection.budget_count <= kept || selection.budget_count > most) {
      return Refuse("selection.token_count",
                    std::to_string(selection.budget_count) +
                        ", must lie in [sink + window + 1, attendable tokens] = [" +
                        std::to_string(kept + 1) + ", " + std::to_string(most) + "]",
                    resolved);
    }
    resolved->select_count = static_cast<uint32_t>(selection.budget_count - kept);
  } else if (selection.budget_kind == BudgetKind::kRetrieved) {
    resolved->select_count = static_cast<uint32_t>(
        std::min<uint64_t>(selection.budget_count, resolved->candidate_count));
  } else if (selection.budget_kind == BudgetKind::kMass) {
    const uint32_t most = selection.mass_bounds().most;
    resolved->select_count =
        most > 0 ? std::min(most, resolved->candidate_count) : resolved->candidate_count;
  } else {
    const auto budget = static_cast<uint64_t>(std::floor(selection.budget_ratio * context));
    resolved->select_count = static_cast<uint32_t>(
        std::min<uint64_t>(budget > kept ? budget - kept : 0, resolved->candidate_count));
  }
  // All of the attention are all candidates, which rounding must not decide.
  const bool counts = selection.budget_kind == BudgetKind::kMass && selection.budget_ratio < 1.0;
  resolved->least_count = counts ? std::min(selection.mass_bounds().least, resolved->select_count)
                                 : resolved->select_count;
  resolved->shortlist_count = ShortlistCount(selection, *resolved);
}

namespace {

Refusal NotStored(std::string field, uint32_t position, uint32_t stored) {
  return {StatusCode::kOutOfRange, std::move(field),
          std::to_string(position) + "; " + std::to_string(stored) + " tokens are stored"};
}

Refusal Descends(std::string field, uint32_t position, uint32_t before, const char* within) {
  return {StatusCode::kInvalidArgument, std::move(field),
          std::to_string(position) + " after " + std::to_string(before) +
              ", must ascend within a " + within};
}

}  // namespace

Refusal CheckTokens(TokenRange tokens, uint32_t stored) {
  const auto range = [&] {
    return std::string("[") + std::to_string(tokens.begin) + ", " + std::to_string(tokens.end) +
           ")";
  };
  if (tokens.begin >= tokens.end) {
    return {StatusCode::kInvalidArgument, "tokens", range() + " is empty"};
  }
  if (tokens.end > stored) {
    return {StatusCode::kOutOfRange, "tokens",
            range() + "; " + std::to_string(stored) + " tokens are stored"};
  }
  return {};
}

Refusal CheckPositions(const LayerView& view, std::span<const uint32_t> positions, bool ascending) {
  if (positions.size() % view.shape.kv_heads != 0) {
    return {StatusCode::kInvalidArgument, "positions",
            std::to_string(positions.size()) + " of them; not a multiple of kv_heads, " +
                std::to_string(view.shape.kv_heads)};
  }
  const uint32_t stored = view.token_count();
  const size_t per_head = positions.size() / view.shape.kv_heads;
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto field = [&] { return "positions[" + std::to_string(i) + "]"; };
    if (positions[i] >= stored) return NotStored(field(), positions[i], stored);
    if (ascending && i % per_head != 0 && positions[i] <= positions[i - 1]) {
      return Descends(field(), positions[i], positions[i - 1], "set");
    }
  }
  return {};
}

Refusal CheckList(std::span<const uint32_t> list, size_t head, uint32_t stored) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] < stored && (i == 0 || list[i] > list[i - 1])) continue;
    std::string field = "lists[" + std::to_string(head) + "][" + std::to_string(i) + "]";
    if (list[i] >= stored) return NotStored(std::move(field), list[i], stored);
    return Descends(std::move(field), list[i], list[i - 1], "list");
  }
  return {};
}

}  // namespace pqcached::kvstore
