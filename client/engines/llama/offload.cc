#include "client/engines/llama/offload.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "client/engines/llama/log.h"
#include "pqcached/client.h"

namespace pqcached::llama {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLostTokens = "the sidecar has lost offloaded tokens";
constexpr auto kPause = std::chrono::milliseconds(2);  // before a read is repeated

bool IsTransient(pqc_status status) {
  return status == PQC_UNAVAILABLE || status == PQC_DEADLINE_EXCEEDED || status == PQC_ABORTED;
}

}  // namespace

Offload::Offload(const Settings& settings, Histories* histories, FingerprintOf fingerprint,
                 const void* context, int32_t rope_op, ShortenHistory shorten)
    : settings_(settings),
      histories_(histories),
      fingerprint_(fingerprint),
      fingerprint_context_(context),
      rope_op_(rope_op),
      shorten_(std::move(shorten)),
      seen_(histories->cell_count()) {}

bool Offload::Fail(const char* problem) {
  if (problem_ != problem) {
    problem_ = problem;
    Log("llama_decode fails: " + problem_);
  }
  return false;
}

// Ends following. Returns false when tokens have been offloaded, so that the graph must fail.
bool Offload::CannotFollow(const char* reason) {
  rows_.clear();
  if (histories_->has_offloaded()) return Fail(reason);
  is_usable_ = false;
  Log(std::string("cannot offload tokens: ") + reason);
  return true;
}

bool Offload::Follow(const Attention& attention, std::span<const uint32_t> written,
                     Sidecar* sidecar, DroppedRows* dropped) {
  const uint32_t count = attention.streams * attention.tokens;
  is_ended_ = true;
  graph_has_offloaded_ = false;
  deadline_ = {};
  rows_.clear();
  group_of_.assign(count, -1);
  written_.assign(written.begin(), written.end());
  positions_ = PositionsOf(attention, rope_op_);
  if (positions_.size() != count) return CannotFollow("the queries show no positions");
  if (written.size() != count || attention.first_cell % 64 != 0 ||
      attention.stream_cells % 64 != 0) {
    return CannotFollow("the cells of its tokens are not known");
  }
  const uint64_t losses = dropped == nullptr ? 0 : dropped->losses();
  for (uint32_t row = 0; row < count; ++row) {
    if (!FollowRow(attention, row, sidecar, dropped)) return false;
    if (!is_usable_) return true;
  }
  // The histories of these query tokens, or others, have lost rows that some of them may see.
  if (dropped != nullptr && dropped->losses() != losses) return Fail(kLostTokens);
  for (const FollowedRows& rows : rows_) {
    graph_has_offloaded_ = graph_has_offloaded_ || rows.history->has_offloaded();
  }
  is_ended_ = false;
  return true;
}

bool Offload::FollowRow(const Attention& attention, uint32_t row, Sidecar* sidecar,
                        DroppedRows* dropped) {
  const uint32_t stream = row / attention.tokens, token = row % attention.tokens;
  const uint32_t base = attention.first_cell + stream * attention.stream_cells;
  seen_.Clear();
  if (!ReadSeen(attention, stream, token, seen_.words().subspan(base / 64))) {
    return CannotFollow("its masks have other values than 0 and minus infinity");
  }
  uint32_t before = row;
  while (before > 0 && !seen_.Has(written_[before - 1])) --before;
  for (const uint32_t cell : written_) seen_.Remove(cell);
  if (dropped != nullptr && dropped->SeesLost(seen_)) return Fail(kLostTokens);
  if (before > 0 ? !Continue(row, before - 1) : !Begin(row, positions_[row], sidecar)) return false;
  return dropped == nullptr || BringUnread(row, dropped);
}

// Fetches the rows that a query token sees and that are away for another history than its own: they
// are read in llama.cpp's memory.
bool Offload::BringUnread(uint32_t row, DroppedRows* dropped) {
  const int32_t group = group_of_[row];
  if (group >= 0 && rows_[static_cast<size_t>(group)].first_row != row) return true;
  dropped->FindAway(seen_, &away_);
  if (away_.empty()) return true;
  if (group >= 0) {
    const History& history = *rows_[static_cast<size_t>(group)].history;
    CellSet own(histories_->cell_count());
    for (uint32_t i = history.offloaded_begin; i < history.offloaded_end; ++i) {
      own.Add(history.cells[i]);
    }
    std::erase_if(away_, [&own](uint32_t cell) { return own.Has(cell); });
  }
  return dropped->Bring(away_) || Fail("rows that were given back could not be read");
}

// Follows a query token that sees an earlier one of the graph, `before` being the last of these.
bool Offload::Continue(uint32_t row, uint32_t before) {
  if (group_of_[before] < 0) return true;  // not followed: it has no offloaded tokens
  FollowedRows& rows = rows_[static_cast<size_t>(group_of_[before])];
  const bool is_next = rows.first_row + rows.count == row && before + 1 == row &&
                       positions_[row] == positions_[before] + 1 &&
                       std::ranges::equal(seen_.words(), rows.seen.words());
  if (is_next) {
    ++rows.count;
    group_of_[row] = group_of_[before];
    return true;
  }
  if (rows.history->lacks_cells()) return Fail("a sequence with offloaded tokens was copied");
  rows.history->is_ordered = false;
  return true;
}

// Follows the first query token of a sequence in the graph.
bool Offload::Begin(uint32_t row, int32_t position, Sidecar* sidecar) {
  std::shared_ptr<History> history;
  const auto at = static_cast<uint64_t>(position);
  const auto has = [this](const std::shared_ptr<History>& wanted) {
    return std::any_of(rows_.begin(), rows_.end(),
                       [&](const FollowedRows& rows) { return rows.history == wanted; });
  };
  switch (histories_->FindOffloaded(seen_, at, fingerprint_, fingerprint_context_, &history)) {
    case Histories::Match::kBroken:
      return Fail("a sequence with offloaded tokens was copied, shifted or changed");
    case Histories::Match::kFound:
      if (has(history)) return Fail("a sequence with offloaded tokens was copied");
      if (at < history->size()) shorten_(history, static_cast<uint32_t>(at));
      histories_->Use(history.get());
      break;
    case Histories::Match::kNone: {
      std::vector<std::shared_ptr<History>> taken;
      for (const FollowedRows& rows : rows_) taken.push_back(rows.history);
      history = histories_->Continue(seen_, taken, fingerprint_, fingerprint_context_, shorten_);
      if (history == nullptr || has(history)) return true;
      const int64_t offset = position - static_cast<int64_t>(history->size());
      if (history->has_offset && history->offset != offset) {
        // Positions were shifted, which the last layer's keys may not show: the rows are new ones.
        shorten_(history, 0);
        return Begin(row, position, sidecar);
      }
      history->has_offset = true;
      history->offset = offset;
      if (offset != 0) history->is_ordered = false;
    }
  }
  if (history->is_lost) return Fail(kLostTokens);
  StoredHistory* stored = nullptr;
  const bool is_stored = history->has_offloaded() || history->size() >= settings_.min_tokens;
  if (sidecar != nullptr && is_stored) stored = &sidecar->Of(history);
  group_of_[row] = static_cast<int32_t>(rows_.size());
  rows_.push_back({history, stored, row, 1, history->size(), seen_});
  return true;
}

bool Offload::Attend(const Attention& attention, uint32_t layer, Sidecar* sidecar,
                     std::span<kernels::Partial> partials) {
  results_.resize(std::max(results_.size(), rows_.size()));
  const size_t heads = size_t{attention.kv_heads} * attention.group_size;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const FollowedRows& rows = rows_[i];
    if (!rows.history->has_offloaded() || partials[rows.first_row].output != nullptr) continue;
    if (!AttendRows(attention, layer, rows, sidecar, &results_[i])) return false;
    const float* const output = results_[i].data();
    const float* const lse = output + rows.count * heads * attention.value_dim;
    for (uint32_t row = 0; row < rows.count; ++row) {
      partials[rows.first_row + row] = {output + row * heads * attention.value_dim,
                                        lse + row * heads};
    }
  }
  return true;
}

bool Offload::AttendRows(const Attention& attention, uint32_t layer, const FollowedRows& rows,
                         Sidecar* sidecar, std::vector<float>* results) {
  const uint32_t heads = attention.kv_heads * attention.group_size;
  queries_.resize(size_t{rows.count} * heads * attention.key_dim);
  float* to = queries_.data();
  for (uint32_t row = rows.first_row; row < rows.first_row + rows.count; ++row) {
    for (uint32_t head = 0; head < heads; ++head, to += attention.key_dim) {
      LoadQuery(attention, row / attention.tokens, row % attention.tokens, head, to);
    }
  }
  const size_t outputs = size_t{rows.count} * heads * attention.value_dim;
  results->resize(outputs + size_t{rows.count} * heads);
  const uint64_t shape[] = {rows.count, heads, attention.key_dim};
  pqc_query query = PQC_INIT(pqc_query);
  query.layer = layer;
  query.query_position = rows.base;
  query.queries.ptr = queries_.data();
  query.queries.dtype = PQC_F32;
  query.queries.ndim = 3;
  query.queries.shape = shape;
  const pqc_token_range range{rows.history->offloaded_begin, rows.history->offloaded_end};
  pqc_attention out = PQC_INIT(pqc_attention);
  out.output = results->data();
  out.output_capacity = outputs;
  out.lse = results->data() + outputs;
  out.lse_capacity = size_t{rows.count} * heads;
  for (;;) {
    pqc_sequence* const sequence = sidecar->BeginReading(*rows.stored);
    const pqc_status status =
        sequence == nullptr ? PQC_UNAVAILABLE : pqc_attend_range(sequence, &query, range, &out);
    sidecar->EndReading();
    if (status == PQC_OK) return true;
    {
      const auto lock = sidecar->Lock();
      if (sidecar->IsLost(*rows.stored)) return Fail(kLostTokens);
      if (sequence != nullptr) sidecar->ReportFailure(rows.stored, status);
    }
    if (deadline_ == Clock::time_point()) {
      deadline_ = Clock::now() + std::chrono::milliseconds(settings_.deadline_ms);
    }
    if (!IsTransient(status) || Clock::now() > deadline_) {
      return Fail("offloaded tokens could not be read from the sidecar");
    }
    std::this_thread::sleep_for(kPause);
  }
}

void Offload::EndGraph() {
  if (is_ended_) return;
  is_ended_ = true;
  for (const FollowedRows& rows : rows_) {
    if (rows.history->size() != rows.base) continue;  // a step has added them
    for (uint32_t row = rows.first_row; row < rows.first_row + rows.count; ++row) {
      Histories::Append(rows.history.get(), written_[row],
                        fingerprint_(fingerprint_context_, written_[row]));
    }
  }
}

// Finds the one history with this many tokens.
std::shared_ptr<History> Offload::Find(uint64_t tokens, std::string* problem) const {
  std::shared_ptr<History> found;
  for (const std::shared_ptr<History>& history : histories_->all()) {
    if (!history->is_ordered || history->size() != tokens) continue;
    if (found != nullptr) {
      *problem = "several sequences have " + std::to_string(tokens) + " tokens";
      return nullptr;
    }
    found = history;
  }
  if (found == nullptr) {
    *problem = "no sequence of " + std::to_string(tokens) +
               " tokens was decoded from its first token on without changes by other calls";
  }
  return found;
}

pqc_status Offload::Take(uint64_t tokens, Sidecar* sidecar, uint32_t* begin, uint32_t* end,
                         std::string* problem) {
  std::unique_lock lock = sidecar->Lock();
  EndGraph();
  const auto sink = static_cast<uint32_t>(settings_.sink_tokens);
  const auto last = static_cast<uint32_t>(tokens - std::min(tokens, settings_.window_tokens));
  *begin = *end = sink;
  if (last <= sink) return PQC_OK;
  const std::shared_ptr<History> history = Find(tokens, problem);
  if (history == nullptr) return PQC_FAILED_PRECONDITION;
  if (last <= history->offloaded_end) {
    *end = history->offloaded_end;
    return PQC_OK;
  }
  if (!Histories::IsUnchanged(*history, fingerprint_, fingerprint_context_)) {
    *problem = "the sequence has other keys than its batches have given it";
    return PQC_FAILED_PRECONDITION;
  }
  const auto deadline = Clock::now() + std::chrono::milliseconds(settings_.deadline_ms);
  if (!sidecar->WaitUntilStored(history, last, deadline, &lock)) {
    *problem = "the sidecar has not stored the rows in time";
    return PQC_DEADLINE_EXCEEDED;
  }
  histories_->Offload(history.get(), sink, last);
  *end = last;
  return PQC_OK;
}

}  // namespace pqcached::llama
