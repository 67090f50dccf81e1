// Selection of pages: aligned runs of tokens [n x page_tokens, (n + 1) x page_tokens), page number
// n, for engines whose kernels attend to whole blocks of a page table.
//
// A token's score under a kv head is the value by which its group rule compares candidates
// (kernels/base/group_rule.h). The heads are either kept apart, or a token's score is the maximum
// or the sum over all kv heads. A page's score is the maximum over its candidate tokens. Pages with
// the largest scores are selected; of equal ones those with the lowest numbers.
//
//     PlanPages(selection, resolved, query, terms, &scratch.plan);
//     // logits of the candidates, unless scratch.plan.takes_all()
//     SelectPages(exec, args, parallel, &scratch, {lists, capacity, list_count});
#ifndef PQCACHED_KVSTORE_READ_SELECT_TOKEN_PAGES_H_
#define PQCACHED_KVSTORE_READ_SELECT_TOKEN_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/exec.h"
#include "kernels/select/head_rule.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/resolve.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

using kernels::HeadRule;

struct PageTerms {
  uint32_t page_tokens = 16;  // at least 1
  HeadRule heads = HeadRule::kEach;
  // Pages that hold a sink (window) token are in every list, and do not compete.
  bool with_sink = false;
  bool with_window = false;
};

// Number of lists for a layer.
constexpr uint32_t ListCount(const PageTerms& terms, uint32_t kv_heads) {
  return terms.heads == HeadRule::kEach ? kv_heads : 1;
}

struct PageQuery {
  uint64_t query_position = 0;
  uint32_t query_length = 1;
};

// Tokens of an item that are no candidates: the sink, and the window with the query tokens.
struct PageEnds {
  PositionRange sink;
  PositionRange window;
};

PageEnds EndsOf(const Selection& selection, const PageQuery& query);

// The pages of a selection, before any is scored.
struct PagePlan {
  std::vector<uint32_t> listed;     // in every list; ascending
  std::vector<uint32_t> competing;  // others with a candidate token; ascending
  uint32_t select_count = 0;        // of those that compete

  bool takes_all() const { return select_count == competing.size(); }
  // Number of pages in each list.
  uint32_t length() const { return static_cast<uint32_t>(listed.size()) + select_count; }
};

// Plans the pages of a resolved selection. The k tokens of the selection are
// ceil(k / page_tokens) pages that compete, at most all of them; all, when k is all candidates.
// REQUIRES: resolved.refusal is ok.
void PlanPages(const Selection& selection, const ResolvedSelection& resolved,
               const PageQuery& query, const PageTerms& terms, PagePlan* plan);

// Memory that is reused, so that selections do not allocate in steady state.
struct PageScratch {
  PagePlan plan;
  std::vector<float> logits;      // of the candidates, as SelectPagesArgs has them
  std::vector<float> values;      // [kv_heads, candidate tokens]
  std::vector<float> scores;      // [lists, competing pages]
  std::vector<float> work;        // likewise
  std::vector<uint32_t> indices;  // [lists, select_count]
};

// Resizes reused memory, with room for contexts that grow token by token.
template <class Element>
void ResizeWithRoom(size_t size, std::vector<Element>* elements) {
  if (elements->capacity() < size) elements->reserve(size + size / 2);
  elements->resize(size);
}

struct SelectPagesArgs {
  uint32_t kv_heads = 0;
  uint32_t group_size = 0;  // G: query heads of a kv head, times the query tokens
  GroupRule rule = GroupRule::kSumSoftmax;
  PageTerms terms;
  std::span<const PositionRange> candidates;
  // Logits of each range in turn, [kv_heads, G, tokens of the range]; of a plan that takes all,
  // none.
  std::span<const float> logits;
};

struct PageLists {
  int32_t* lists = nullptr;  // [list_count, capacity]
  uint32_t capacity = 0;     // at least the plan's length
};

// Selects by the plan in scratch->plan, and writes ListCount lists of plan.length() pages,
// ascending.
void SelectPages(const kernels::Exec& exec, const SelectPagesArgs& args,
                 const ParallelFor& parallel, PageScratch* scratch, const PageLists& out);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_SELECT_TOKEN_PAGES_H_
