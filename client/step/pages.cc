// Steps that select pages.
#include <algorithm>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/step/read_backend.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/resolve.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

pqc_status ReadPageOptions(const pqc_page_options* from, kvstore::PageTerms* terms) {
  pqc_page_options options;
  RETURN_IF_ERROR(ReadStruct(from, "options", &options));
  if (options.page_tokens != 16 && options.page_tokens != 32 && options.page_tokens != 64) {
    return Fail(PQC_INVALID_ARGUMENT, "options.page_tokens", "%u, must be 16, 32 or 64",
                options.page_tokens);
  }
  const uint32_t heads = RawEnum(options.heads);
  if (heads > PQC_HEADS_SUM) {
    return Fail(PQC_INVALID_ARGUMENT, "options.heads", "%u, must be at most %u", heads,
                uint32_t{PQC_HEADS_SUM});
  }
  constexpr uint64_t kFlags = PQC_PAGES_WITH_SINK | PQC_PAGES_WITH_WINDOW;
  if (options.flags & ~kFlags) {
    return Fail(PQC_UNIMPLEMENTED, "options.flags", "%llu has flags that this version lacks",
                LongLong{options.flags});
  }
  *terms = {.page_tokens = options.page_tokens,
            .heads = static_cast<kvstore::HeadRule>(heads),
            .with_sink = (options.flags & PQC_PAGES_WITH_SINK) != 0,
            .with_window = (options.flags & PQC_PAGES_WITH_WINDOW) != 0};
  return PQC_OK;
}

// Writes the elements of a list behind its pages.
void Pad(const PageCall& pages, size_t item, uint32_t length) {
  for (uint32_t list = 0; list < pages.list_count; ++list) {
    int32_t* const begin = pages.ListsOf(item).lists + size_t{list} * pages.capacity;
    std::fill(begin + length, begin + pages.capacity, -1);
  }
}

// Plans the pages of all items. Sets the largest length and, on the CPU, the lengths.
pqc_status PlanPagesInStep(pqc_step* step, uint32_t* needed) {
  *needed = 0;
  for (size_t i = 0; i < step->items.size(); ++i) {
    const pqc_status status = PlanItemPages(step->call, step->items[i]);
    if (status != PQC_OK) return PrefixItem(i, status);
    const uint32_t length = (*step->items[i].scratch)->pages.plan.length();
    if (!step->gpu) step->page_call.lengths[i] = length;
    *needed = std::max(*needed, length);
  }
  return PQC_OK;
}

}  // namespace

pqc_status PlanItemPages(const LayerCall& call, StepItem& item) {
  kvstore::ReadScratch& scratch = **item.scratch;
  kvstore::Resolve(*call.selection, item.query_position, kvstore::kMaxSequenceTokens,
                   &scratch.resolved);
  if (!scratch.resolved.refusal.ok()) return FailInStep(scratch.resolved.refusal);
  kvstore::PlanPages(*call.selection, scratch.resolved, {item.query_position, item.query_length},
                     call.pages->terms, &scratch.pages.plan);
  return PQC_OK;
}

pqc_status SelectPagesInStep(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                             const pqc_selection* selection, const pqc_page_options* options,
                             pqc_step_pages* caller_out) {
  RETURN_IF_ERROR(ReadLayerCall(step, layer, queries));
  if (step->select_per_token) {
    return Fail(PQC_UNIMPLEMENTED, "step",
                "it has PQC_STEP_SELECT_PER_TOKEN, with which pages are not supported");
  }
  RETURN_IF_ERROR(ReadCallSelection(step, selection));
  if (step->gpu && !step->call.shape.has_index()) {
    return Fail(PQC_UNIMPLEMENTED, "layer",
                "layer %u has no index, and pages of such layers are not listed on a GPU", layer);
  }
  if (step->call.selection->per_query_head) {
    return Fail(PQC_UNIMPLEMENTED, "selection.group_rule",
                "PQC_PER_QUERY_HEAD: block tables have no list of pages for each query head");
  }
  if (step->call.selection->rerank_factor != 1.0f) {
    return Fail(PQC_UNIMPLEMENTED, "selection.rerank_factor",
                "pages are selected by the index alone; must be 0 or 1");
  }
  if (step->call.selection->budget_kind == kvstore::BudgetKind::kMass) {
    return Fail(PQC_UNIMPLEMENTED, "selection.attention_mass",
                "lists of pages have a length that is known before; not supported for pages");
  }
  if (step->call.selection->tail_estimate) {
    return Fail(PQC_UNIMPLEMENTED, "selection.tail_estimate",
                "pages have no attention to add it to; must be 0");
  }
  PageCall& pages = step->page_call;
  step->call.pages = &pages;
  RETURN_IF_ERROR(ReadPageOptions(options, &pages.terms));
  pqc_step_pages out;
  RETURN_IF_ERROR(ReadStruct(caller_out, "out", &out));
  if (!out.lengths) return Fail(PQC_INVALID_ARGUMENT, "out.lengths", "must not be NULL");
  pages.list_count = kvstore::ListCount(pages.terms, step->call.shape.kv_heads);
  pages.lists = out.pages;
  pages.capacity = out.capacity;
  pages.lengths = out.lengths;
  RETURN_IF_ERROR(PlanPagesInStep(step, &out.needed));
  caller_out->list_count = pages.list_count;
  caller_out->needed = out.needed;
  if (!out.pages) return PQC_OK;  // the caller only asked for the other fields
  RETURN_IF_ERROR(CheckCapacity("out.capacity", out.capacity, out.needed));
  if (step->gpu) return step->gpu->SelectPages(step->call);
  const pqc_status status = step->client->reads->StepTopPages(step->call);
  if (status != PQC_OK) return AdviseInStep(status, step->no_wait, /*ended=*/false);
  for (size_t i = 0; i < step->items.size(); ++i) Pad(pages, i, out.lengths[i]);
  return PQC_OK;
}

}  // namespace pqcached::client
