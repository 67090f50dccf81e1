#include "kvstore/read/select/token_pages.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/select/score_select.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kMaxCandidateRanges = kMaxExcludedRanges + 1;

// Returns whether the range has a token that is not excluded.
bool HasToken(const ExcludedRanges& excluded, PositionRange range) {
  uint32_t count = range.end - range.begin;
  for (const PositionRange& gap : excluded) {
    const uint32_t begin = std::max(gap.begin, range.begin), end = std::min(gap.end, range.end);
    if (begin < end) count -= end - begin;
  }
  return count > 0;
}

// Calls take(page, tokens) for each page with tokens of the range.
template <class Take>
void ForEachPage(PositionRange range, uint32_t page_tokens, const Take& take) {
  for (uint32_t begin = range.begin; begin < range.end;) {
    const uint32_t page = begin / page_tokens;
    const uint64_t page_end = (uint64_t{page} + 1) * page_tokens;
    const auto end = static_cast<uint32_t>(std::min<uint64_t>(range.end, page_end));
    take(page, PositionRange{begin, end});
    begin = end;
  }
}

// Appends the pages of the range that hold a token which is not excluded. REQUIRES: the range does
// not begin below the pages so far.
void ListPages(const Selection& selection, PositionRange range, uint32_t page_tokens,
               std::vector<uint32_t>* pages) {
  ForEachPage(range, page_tokens, [&](uint32_t page, PositionRange tokens) {
    if (!pages->empty() && pages->back() == page) return;
    if (HasToken(selection.excluded, tokens)) pages->push_back(page);
  });
}

// Sets scores, [competing pages], to the maxima over the candidate tokens of each page.
void ScorePages(const SelectPagesArgs& args, const PagePlan& plan, const float* values,
                std::span<float> scores) {
  std::fill(scores.begin(), scores.end(), -std::numeric_limits<float>::infinity());
  size_t next = 0;  // in plan.competing
  for (const PositionRange& range : args.candidates) {
    ForEachPage(range, args.terms.page_tokens, [&](uint32_t page, PositionRange tokens) {
      const float* const end = values + (tokens.end - tokens.begin);
      while (next < plan.competing.size() && plan.competing[next] < page) ++next;
      if (next < plan.competing.size() && plan.competing[next] == page) {
        scores[next] = std::max(scores[next], *std::max_element(values, end));
      }
      values = end;
    });
  }
}

// Makes logits of one query head what the softmax rules compare: a single head's tokens have the
// same order by their logits, but heads are joined by their weights.
void ToWeights(GroupRule rule, std::span<float> values) {
  const float max = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (const float value : values) sum += std::exp(static_cast<double>(value) - max);
  const auto log_sum = static_cast<float>(std::log(sum));
  for (float& value : values) {
    value = value - max - log_sum;
    if (rule == GroupRule::kSumSoftmax) value = std::exp(value);
  }
}

// Writes the values of one kv head's candidates, [candidate tokens].
void HeadValues(const kernels::Exec& exec, const SelectPagesArgs& args, uint32_t kv_head,
                std::span<float> values) {
  kernels::ScoreSpan spans[kMaxCandidateRanges];
  const float* logits = args.logits.data();
  size_t count = 0;
  for (const PositionRange& range : args.candidates) {
    const uint32_t tokens = range.end - range.begin;
    const size_t head_floats = size_t{args.group_size} * tokens;
    spans[count++] = {.logits = logits + kv_head * head_floats,
                      .head_stride = tokens,
                      .token_count = tokens,
                      .first_position = range.begin};
    logits += args.kv_heads * head_floats;
  }
  kernels::ScoreValues(exec, {.group_size = args.group_size,
                              .rule = args.rule,
                              .spans = {spans, count},
                              .values = values});
  const bool softmax = args.rule == GroupRule::kSumSoftmax || args.rule == GroupRule::kMaxSoftmax;
  if (args.group_size == 1 && softmax && args.terms.heads != HeadRule::kEach) {
    ToWeights(args.rule, values);
  }
}

// Joins values [kv_heads, tokens] in the first head's.
void JoinHeads(HeadRule rule, uint32_t kv_heads, size_t tokens, float* values) {
  for (uint32_t kv_head = 1; kv_head < kv_heads; ++kv_head) {
    const float* const other = values + kv_head * tokens;
    for (size_t i = 0; i < tokens; ++i) {
      values[i] = rule == HeadRule::kSum ? values[i] + other[i] : std::max(values[i], other[i]);
    }
  }
}

// Writes the listed and the selected pages, ascending. `indices`: in plan.competing, ascending.
void WriteList(const PagePlan& plan, std::span<const uint32_t> indices, int32_t* to) {
  auto listed = plan.listed.begin();
  for (const uint32_t index : indices) {
    const uint32_t page = plan.competing[index];
    for (; listed != plan.listed.end() && *listed < page; ++listed) {
      *to++ = static_cast<int32_t>(*listed);
    }
    *to++ = static_cast<int32_t>(page);
  }
  for (; listed != plan.listed.end(); ++listed) *to++ = static_cast<int32_t>(*listed);
}

}  // namespace

PageEnds EndsOf(const Selection& selection, const PageQuery& query) {
  const auto context = static_cast<uint32_t>(query.query_position) + 1;
  const uint32_t sink_end = std::min(selection.sink_tokens, context);
  const uint32_t window_begin =
      std::max(sink_end, context - std::min(selection.window_tokens, context));
  return {.sink = {0, sink_end}, .window = {window_begin, context + query.query_length - 1}};
}

void PlanPages(const Selection& selection, const ResolvedSelection& resolved,
               const PageQuery& query, const PageTerms& terms, PagePlan* plan) {
  plan->listed.clear();
  plan->competing.clear();
  const PageEnds ends = EndsOf(selection, query);
  if (terms.with_sink) ListPages(selection, ends.sink, terms.page_tokens, &plan->listed);
  if (terms.with_window) ListPages(selection, ends.window, terms.page_tokens, &plan->listed);
  for (const PositionRange& range : resolved.candidates) {
    ForEachPage(range, terms.page_tokens, [&](uint32_t page, PositionRange) {
      if (!plan->competing.empty() && plan->competing.back() == page) return;
      if (std::binary_search(plan->listed.begin(), plan->listed.end(), page)) return;
      plan->competing.push_back(page);
    });
  }
  const auto competing = static_cast<uint32_t>(plan->competing.size());
  const uint64_t wanted =
      (uint64_t{resolved.select_count} + terms.page_tokens - 1) / terms.page_tokens;
  plan->select_count = resolved.select_count == resolved.candidate_count
                           ? competing
                           : static_cast<uint32_t>(std::min<uint64_t>(wanted, competing));
}

void SelectPages(const kernels::Exec& exec, const SelectPagesArgs& args,
                 const ParallelFor& parallel, PageScratch* scratch, const PageLists& out) {
  const PagePlan& plan = scratch->plan;
  const uint32_t list_count = ListCount(args.terms, args.kv_heads);
  const size_t competing = plan.competing.size();
  PQC_CHECK(out.capacity >= plan.length());
  PQC_CHECK(args.candidates.size() <= kMaxCandidateRanges);
  ResizeWithRoom(size_t{list_count} * plan.select_count, &scratch->indices);
  const auto indices_of = [&](uint32_t list) {
    return std::span(scratch->indices).subspan(size_t{list} * plan.select_count, plan.select_count);
  };
  if (plan.takes_all()) {
    for (uint32_t list = 0; list < list_count; ++list) {
      const std::span<uint32_t> indices = indices_of(list);
      for (uint32_t i = 0; i < plan.select_count; ++i) indices[i] = i;
      WriteList(plan, indices, out.lists + size_t{list} * out.capacity);
    }
    return;
  }
  size_t tokens = 0;
  for (const PositionRange& range : args.candidates) tokens += range.end - range.begin;
  PQC_CHECK(args.logits.size() == size_t{args.kv_heads} * args.group_size * tokens);
  ResizeWithRoom(args.kv_heads * tokens, &scratch->values);
  ResizeWithRoom(list_count * competing, &scratch->scores);
  ResizeWithRoom(list_count * competing, &scratch->work);
  const auto values_of = [&](uint32_t kv_head) {
    return std::span(scratch->values).subspan(kv_head * tokens, tokens);
  };
  const auto select = [&](uint32_t list) {
    const std::span<float> scores = std::span(scratch->scores).subspan(list * competing, competing);
    ScorePages(args, plan, values_of(list).data(), scores);
    kernels::SelectValues(exec,
                          {.values = scores,
                           .indices = indices_of(list),
                           .work = std::span(scratch->work).subspan(list * competing, competing)});
    WriteList(plan, indices_of(list), out.lists + size_t{list} * out.capacity);
  };
  const auto run_head = [&](uint32_t kv_head, uint32_t) {
    HeadValues(exec, args, kv_head, values_of(kv_head));
    if (args.terms.heads == HeadRule::kEach) select(kv_head);
  };
  parallel.run(args.kv_heads, std::cref(run_head));  // a reference, because a copy allocates
  if (args.terms.heads == HeadRule::kEach) return;
  JoinHeads(args.terms.heads, args.kv_heads, tokens, scratch->values.data());
  select(0);
}

}  // namespace pqcached::kvstore
