#include "proto/codec/selection.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"
#include "proto/codec/index.h"

namespace pqcached::codec {
namespace {

using kvstore::GroupRule;
using kvstore::Refusal;
using kvstore::StatusCode;

constexpr std::pair<GroupRule, v1::GroupRule> kGroupRules[] = {
    {GroupRule::kSumSoftmax, v1::GROUP_RULE_SUM_SOFTMAX},
    {GroupRule::kMaxSoftmax, v1::GROUP_RULE_MAX_SOFTMAX},
    {GroupRule::kMeanLogit, v1::GROUP_RULE_MEAN_LOGIT},
    {GroupRule::kMaxLogit, v1::GROUP_RULE_MAX_LOGIT},
};

static_assert(static_cast<int>(kvstore::HeadRule::kEach) + 1 == v1::HEAD_RULE_EACH);
static_assert(static_cast<int>(kvstore::HeadRule::kMax) + 1 == v1::HEAD_RULE_MAX);
static_assert(static_cast<int>(kvstore::HeadRule::kSum) + 1 == v1::HEAD_RULE_SUM);

Refusal Refuse(StatusCode code, std::string field, std::string text) {
  return {.code = code, .field = std::move(field), .text = std::move(text)};
}

v1::GroupRule MessageOf(GroupRule rule) {
  for (const auto& [value, message] : kGroupRules) {
    if (value == rule) return message;
  }
  return v1::GROUP_RULE_UNSPECIFIED;
}

Refusal DecodeRule(v1::GroupRule message, const std::string& field, GroupRule* rule) {
  if (message == v1::GROUP_RULE_UNSPECIFIED) message = v1::GROUP_RULE_SUM_SOFTMAX;
  for (const auto& [value, known] : kGroupRules) {
    if (known != message) continue;
    *rule = value;
    return {};
  }
  if (message == v1::GROUP_RULE_PER_QUERY_HEAD) {
    return Refuse(StatusCode::kUnimplemented, field,
                  "GROUP_RULE_PER_QUERY_HEAD is not implemented in this version");
  }
  return Refuse(StatusCode::kInvalidArgument, field,
                std::to_string(static_cast<int>(message)) + ", must be a GroupRule");
}

Refusal DecodeMass(const v1::Selection& message, const std::string& field,
                   kvstore::Selection* selection) {
  kvstore::Selection::MassBounds bounds;
  RETURN_IF_ERROR(DecodeTokens(message.least_tokens(), field + ".least_tokens", &bounds.least));
  RETURN_IF_ERROR(DecodeTokens(message.most_tokens(), field + ".most_tokens", &bounds.most));
  selection->budget_kind = kvstore::BudgetKind::kMass;
  selection->budget_count = kvstore::Selection::CountOf(bounds);
  selection->budget_ratio = message.attention_mass();
  return {};
}

Refusal DecodeBudget(const v1::Selection& message, const std::string& field,
                     kvstore::Selection* selection) {
  if (!message.has_attention_mass() &&
      (message.least_tokens() != 0 || message.most_tokens() != 0)) {
    return Refuse(StatusCode::kInvalidArgument,
                  field + (message.least_tokens() != 0 ? ".least_tokens" : ".most_tokens"),
                  "only with attention_mass; must be 0");
  }
  switch (message.budget_case()) {
    case v1::Selection::kTokenCount:
      selection->budget_kind = kvstore::BudgetKind::kCount;
      selection->budget_count = message.token_count();
      return {};
    case v1::Selection::kTokenRatio:
      selection->budget_kind = kvstore::BudgetKind::kRatio;
      selection->budget_ratio = message.token_ratio();
      return {};
    case v1::Selection::kRetrievedTokens:
      selection->budget_kind = kvstore::BudgetKind::kRetrieved;
      selection->budget_count = message.retrieved_tokens();
      return {};
    case v1::Selection::kAttentionMass:
      return DecodeMass(message, field, selection);
    case v1::Selection::BUDGET_NOT_SET:
      break;
  }
  return Refuse(StatusCode::kInvalidArgument, field + ".budget",
                "missing: token_count, token_ratio, retrieved_tokens or attention_mass");
}

Refusal DecodeExcluded(const v1::Selection& message, const std::string& field,
                       kvstore::ExcludedRanges* excluded) {
  const auto count = static_cast<uint32_t>(message.excluded_size());
  if (count > kvstore::kMaxExcludedRanges) {
    return Refuse(StatusCode::kInvalidArgument, field,
                  std::to_string(count) + " ranges, must be at most " +
                      std::to_string(kvstore::kMaxExcludedRanges));
  }
  for (int i = 0; i < message.excluded_size(); ++i) {
    const std::string path = field + "[" + std::to_string(i) + "]";
    kvstore::PositionRange range;
    RETURN_IF_ERROR(DecodeTokens(message.excluded(i).begin(), path + ".begin", &range.begin));
    RETURN_IF_ERROR(DecodeTokens(message.excluded(i).end(), path + ".end", &range.end));
    excluded->push_back(range);
  }
  return {};
}

}  // namespace

Refusal DecodeTokens(uint64_t tokens, const std::string& field, uint32_t* decoded) {
  *decoded = static_cast<uint32_t>(tokens);
  if (tokens <= kvstore::kMaxSequenceTokens) return {};
  return Refuse(
      StatusCode::kInvalidArgument, field,
      std::to_string(tokens) + ", must be at most " + std::to_string(kvstore::kMaxSequenceTokens));
}

void Encode(const kvstore::Selection& selection, v1::Selection* message) {
  Encode(selection.index, message->mutable_index());
  message->set_group_rule(selection.per_query_head ? v1::GROUP_RULE_PER_QUERY_HEAD
                                                   : MessageOf(selection.group_rule));
  message->set_sink_tokens(selection.sink_tokens);
  message->set_window_tokens(selection.window_tokens);
  if (selection.rerank_factor != 1.0f) message->set_rerank_factor(selection.rerank_factor);
  if (selection.tail_estimate) message->set_tail_estimate(true);
  for (const kvstore::PositionRange& excluded : selection.excluded) {
    v1::TokenRange* range = message->add_excluded();
    range->set_begin(excluded.begin);
    range->set_end(excluded.end);
  }
  if (selection.budget_kind == kvstore::BudgetKind::kCount) {
    message->set_token_count(selection.budget_count);
  } else if (selection.budget_kind == kvstore::BudgetKind::kRetrieved) {
    message->set_retrieved_tokens(selection.budget_count);
  } else if (selection.budget_kind == kvstore::BudgetKind::kMass) {
    message->set_attention_mass(selection.budget_ratio);
    message->set_least_tokens(selection.mass_bounds().least);
    message->set_most_tokens(selection.mass_bounds().most);
  } else {
    message->set_token_ratio(selection.budget_ratio);
  }
}

Refusal Decode(const v1::Selection& message, const std::string& field,
               kvstore::Selection* selection) {
  *selection = {};
  selection->per_query_head = message.group_rule() == v1::GROUP_RULE_PER_QUERY_HEAD;
  if (!selection->per_query_head) {
    RETURN_IF_ERROR(
        DecodeRule(message.group_rule(), field + ".group_rule", &selection->group_rule));
  }
  RETURN_IF_ERROR(
      DecodeTokens(message.sink_tokens(), field + ".sink_tokens", &selection->sink_tokens));
  RETURN_IF_ERROR(
      DecodeTokens(message.window_tokens(), field + ".window_tokens", &selection->window_tokens));
  if (message.rerank_factor() != 0) {
    if (!kvstore::IsRerankFactor(message.rerank_factor())) {
      return Refuse(StatusCode::kInvalidArgument, field + ".rerank_factor",
                    std::to_string(message.rerank_factor()) + ", must be 0 or lie in [1, " +
                        std::to_string(static_cast<int>(kvstore::kMaxRerankFactor)) + "]");
    }
    selection->rerank_factor = static_cast<float>(message.rerank_factor());
  }
  selection->tail_estimate = message.tail_estimate();
  RETURN_IF_ERROR(DecodeExcluded(message, field + ".excluded", &selection->excluded));
  return DecodeBudget(message, field, selection);
}

void Encode(const kvstore::PageTerms& terms, v1::PageTerms* message) {
  message->set_page_tokens(terms.page_tokens);
  message->set_heads(static_cast<v1::HeadRule>(static_cast<int>(terms.heads) + 1));
  message->set_with_sink(terms.with_sink);
  message->set_with_window(terms.with_window);
}

Refusal Decode(const v1::PageTerms& message, const std::string& field, kvstore::PageTerms* terms) {
  const uint32_t tokens = message.page_tokens();
  if (tokens != 16 && tokens != 32 && tokens != 64) {
    return Refuse(StatusCode::kInvalidArgument, field + ".page_tokens",
                  std::to_string(tokens) + ", must be 16, 32 or 64");
  }
  const int heads = message.heads();
  if (heads < v1::HEAD_RULE_UNSPECIFIED || heads > v1::HEAD_RULE_SUM) {
    return Refuse(StatusCode::kInvalidArgument, field + ".heads",
                  std::to_string(heads) + ", must be a HeadRule");
  }
  *terms = {.page_tokens = tokens,
            .heads = static_cast<kvstore::HeadRule>(std::max(heads, 1) - 1),
            .with_sink = message.with_sink(),
            .with_window = message.with_window()};
  return {};
}

}  // namespace pqcached::codec
