#include "client/conform/contract.h"

#include <algorithm>
#include <iterator>

namespace pqcached::conform {
namespace {

constexpr uint32_t kStored = kChanges | kStoresRows;  // a change first waits for rows

constexpr Rule kRules[] = {
    {"pqc_client_open", "client", nullptr, kHidesArguments},
    {"pqc_client_close", nullptr, "client", 0},
    {"pqc_client_set_threads", nullptr, nullptr, 0},
    {"pqc_client_count", nullptr, nullptr, kOnlyReports},
    {"pqc_client_event_fd", nullptr, nullptr, kOnlyReports},
    {"pqc_client_next_event", nullptr, nullptr, kOnlyReports},
    {"pqc_client_index_make", nullptr, nullptr, kHidesArguments},
    {"pqc_admin_json", nullptr, nullptr, kHidesArguments},

    {"pqc_cache_open", "cache", nullptr, kHidesArguments},
    {"pqc_cache_close", nullptr, "cache", 0},
    {"pqc_cache_drop", nullptr, nullptr, 0},
    {"pqc_match_prefix", nullptr, nullptr, kHidesArguments},
    {"pqc_match_prefix_with", nullptr, nullptr, kHidesArguments},
    {"pqc_admit", nullptr, nullptr, 0},
    {"pqc_prefix_keys", nullptr, nullptr, kHidesArguments},
    {"pqc_cache_events_open", "events", nullptr, kHidesArguments},
    {"pqc_cache_events_next", nullptr, nullptr, kOnlyReports},
    {"pqc_cache_events_close", nullptr, "events", 0},

    {"pqc_page_cache_open", "page_cache", nullptr, kHidesArguments},
    {"pqc_page_cache_close", nullptr, "page_cache", 0},
    {"pqc_page_cache_drop", nullptr, nullptr, 0},
    {"pqc_page_put", nullptr, nullptr, kHidesArguments},
    {"pqc_page_get", nullptr, nullptr, kHidesArguments},
    {"pqc_page_exists", nullptr, nullptr, kHidesArguments},

    {"pqc_sequence_create", "sequence", nullptr, kCreates},
    {"pqc_sequence_create_with", "sequence", nullptr, kCreates | kHidesArguments},
    {"pqc_sequence_fork", "child", nullptr, kStored | kCreates},
    {"pqc_sequence_attach", "sequence", nullptr, 0},
    {"pqc_sequence_detach", nullptr, "sequence", kStoresRows},
    {"pqc_sequence_drop", nullptr, "sequence", 0},
    {"pqc_sequence_truncate", nullptr, nullptr, kStored},
    {"pqc_sequence_suspend", nullptr, nullptr, kStored},
    {"pqc_sequence_resume", nullptr, nullptr, kStored},
    {"pqc_sequence_pin", nullptr, nullptr, 0},
    {"pqc_sequence_describe", nullptr, nullptr, 0},
    {"pqc_sequence_progress", nullptr, nullptr, kOnlyReports},
    {"pqc_sequence_flush", nullptr, nullptr, kStoresRows},
    {"pqc_sequence_name_tokens", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_sequences_reorder", nullptr, nullptr, kStored | kHidesArguments},

    {"pqc_ingest", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_ingest_with", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_append", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_append_with", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_enqueue_rows", nullptr, nullptr, kChanges | kPassesRows | kHidesArguments},
    {"pqc_add_query_samples", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_build_index", nullptr, nullptr, kBuilds | kStoresRows | kHidesArguments},

    {"pqc_sequence_flush_begin", "operation", nullptr, 0},
    {"pqc_build_index_begin", "operation", nullptr, kBuilds | kHidesArguments},
    {"pqc_ingest_begin", "operation", nullptr, kChanges | kHidesArguments},
    {"pqc_load_begin", "operation", nullptr, kHidesArguments},
    {"pqc_load_wait", nullptr, nullptr, kOnlyReports},
    {"pqc_operation_poll", nullptr, nullptr, kOnlyReports},
    {"pqc_operation_wait", nullptr, nullptr, kOnlyReports},
    {"pqc_operation_cancel", nullptr, nullptr, kOnlyReports},
    {"pqc_operation_close", nullptr, "operation", kOnlyReports},

    {"pqc_topk", nullptr, nullptr, kHidesArguments},
    {"pqc_score", nullptr, nullptr, kHidesArguments},
    {"pqc_fetch_blocks", nullptr, nullptr, kHidesArguments},
    {"pqc_fetch_tokens", nullptr, nullptr, kHidesArguments},
    {"pqc_attend", nullptr, nullptr, kHidesArguments},
    {"pqc_attend_range", nullptr, nullptr, kHidesArguments},
    {"pqc_attend_positions", nullptr, nullptr, kHidesArguments},
    {"pqc_load", nullptr, nullptr, kHidesArguments},
    {"pqc_prefetch", nullptr, nullptr, 0},

    {"pqc_step_begin", "step", nullptr, kBeginsStep | kHidesArguments},
    {"pqc_step_topk", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_topk_pages", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_attend", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_attend_range", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_attend_positions", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_attend_begin", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_attend_wait", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_decode", nullptr, nullptr, kInStep | kHidesArguments},
    {"pqc_step_check", nullptr, nullptr, kInStep},
    {"pqc_step_end", nullptr, "step", kPassesRows | kHidesArguments},
    {"pqc_step_end_with", nullptr, "step", kPassesRows | kHidesArguments},
    {"pqc_step_abandon", nullptr, "step", 0},

    {"pqc_decoder_open", "decoder", nullptr, kHidesArguments},
    {"pqc_decoder_close", nullptr, "decoder", 0},
    {"pqc_decoder_prefill", nullptr, nullptr, kHidesArguments},
    {"pqc_decoder_prefill_with", nullptr, nullptr, kHidesArguments},
    {"pqc_decoder_decode", nullptr, nullptr, kPassesRows | kHidesArguments},
    {"pqc_decoder_decode_with", nullptr, nullptr, kPassesRows | kHidesArguments},

    {"pqc_gpu_open", "gpu", nullptr, kHidesArguments},
    {"pqc_gpu_close", nullptr, "gpu", 0},
    {"pqc_gpu_count", nullptr, nullptr, kOnlyReports},
    {"pqc_gpu_ingest", nullptr, nullptr, kChanges | kPassesRows | kHidesArguments},
    {"pqc_gpu_ingest_with", nullptr, nullptr, kChanges | kPassesRows | kHidesArguments},
    {"pqc_gpu_add_query_samples", nullptr, nullptr, kStored | kHidesArguments},
    {"pqc_gpu_step_begin", "step", nullptr, kBeginsStep | kHidesArguments},
    {"pqc_gpu_step_topk", nullptr, nullptr, kInStep | kHidesArguments},
};

}  // namespace

Kind KindOf(std::string_view key) {
  if (key == "client") return Kind::kClient;
  if (key == "cache") return Kind::kCache;
  if (key == "step") return Kind::kStep;
  if (key == "operation") return Kind::kOperation;
  if (key == "gpu") return Kind::kGpu;
  if (key == "decoder") return Kind::kDecoder;
  if (key == "events") return Kind::kEvents;
  if (key == "page_cache") return Kind::kPageCache;
  return Kind::kSequence;  // "sequence", "parent", "child"
}

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kClient:
      return "client";
    case Kind::kCache:
      return "cache";
    case Kind::kSequence:
      return "sequence";
    case Kind::kStep:
      return "step";
    case Kind::kOperation:
      return "operation";
    case Kind::kGpu:
      return "gpu";
    case Kind::kDecoder:
      return "decoder";
    case Kind::kEvents:
      return "stream of events";
    case Kind::kPageCache:
      return "page cache";
  }
  return "handle";
}

const Rule* FindRule(std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kRules, [&](const Rule& rule) { return name == rule.name; });
  return found == std::end(kRules) ? nullptr : found;
}

}  // namespace pqcached::conform
