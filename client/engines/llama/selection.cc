#include "client/engines/llama/selection.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "client/engines/llama/log.h"

namespace pqcached::llama {
namespace {

// Query tokens of a sequence in a step, and of these times the group (pqc_query).
constexpr uint32_t kMostItemTokens = 8;
constexpr uint32_t kMostItemHeads = 64;
constexpr uint32_t kClientThreads = 256;

// Measures a wait, from its construction to its end.
class WaitTimer {
 public:
  explicit WaitTimer(double* longest_ms) : longest_ms_(longest_ms) {}
  ~WaitTimer() {
    const std::chrono::duration<double, std::milli> time =
        std::chrono::steady_clock::now() - begin_;
    *longest_ms_ = std::max(*longest_ms_, time.count());
  }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  double* longest_ms_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Set on the thread that computes the graph, which alone may use the engine's other threads.
thread_local bool is_engine_thread = false;

}  // namespace

Selection::Selection(const Settings& settings, EngineThreads* threads, int32_t rope_op)
    : settings_(settings), threads_(threads), rope_op_(rope_op) {}

Selection::~Selection() {
  if (step_ != nullptr) pqc_step_abandon(step_);
  if (sidecar_ != nullptr) sidecar_->SetBring(nullptr);
}

void Selection::Write(const LayerArrays& arrays, const Attention& shape,
                      std::span<const uint32_t> cells) {
  if (is_off_) return;
  const std::optional<uint32_t> layer = LayerOf(arrays.keys_root);
  if (!is_learned_ && layer == 0) EndLearning();
  if (layer == 0 || layers_.arrays.empty()) {
    if (histories_ == nullptr) MakeHistories(arrays);
    BeginGraph(cells);
  }
  if (!is_learned_) return Learn(arrays, shape);
  if (!layer) return TurnOff("layers that its first graph lacked");
  if (!std::equal(cells.begin(), cells.end(), written_.begin(), written_.end())) {
    TurnOff("layers that have cells of their own");
  }
}

void Selection::MakeHistories(const LayerArrays& arrays) {
  const GgmlTensor& keys = *arrays.keys_root;
  histories_ = std::make_unique<Histories>(
      static_cast<uint32_t>(keys.ne[1] * std::max<int64_t>(1, keys.ne[2])));
  seen_ = CellSet(histories_->cell_count());
  if (!settings_.offloads && !settings_.drops) return;
  offload_ = std::make_unique<Offload>(
      settings_, histories_.get(), &Selection::Fingerprint, this, rope_op_,
      [this](const std::shared_ptr<History>& history, uint32_t keep) { Shorten(history, keep); });
}

// The first graph has ended, so that all layers are known.
void Selection::EndLearning() {
  is_learned_ = true;
  sidecar_ =
      std::make_unique<Sidecar>(settings_, layers_, &Selection::ParallelFor, this, kClientThreads);
  if (!settings_.drops || offload_ == nullptr) return;
  std::string problem;
  dropped_ = DroppedRows::Open(layers_, histories_->cell_count(), sidecar_.get(),
                               std::chrono::milliseconds(settings_.deadline_ms), &problem);
  if (dropped_ == nullptr) return Log("gives no memory back: " + problem);
  sidecar_->SetBring([this](std::span<const uint32_t> cells) { return dropped_->Bring(cells); });
}

// Makes a history shorter. With the histories' lock.
void Selection::Shorten(const std::shared_ptr<History>& history, uint32_t keep) {
  if (dropped_ != nullptr && keep < history->offloaded_end) dropped_->Return(*history, keep);
  if (sidecar_ != nullptr) sidecar_->Shorten(*history, keep);
  Histories::Shorten(history.get(), keep);
}

// Locks the histories, which only this thread knows before there is a sidecar.
std::unique_lock<std::mutex> Selection::LockHistories() {
  return sidecar_ == nullptr ? std::unique_lock<std::mutex>() : sidecar_->Lock();
}

// Attends exactly from now on.
void Selection::TurnOff(const char* reason) {
  if (step_ != nullptr) Abandon(PQC_OK);
  is_off_ = true;
  fails_ = !ReturnAll();
  if (sidecar_ != nullptr) {
    const auto lock = sidecar_->Lock();
    for (const auto& history : histories_->all()) history->is_gone = true;  // drops the sequences
  }
  Log(std::string(fails_ ? "llama_decode fails" : "attends exactly") + ", because the model has " +
      reason);
  offload_.reset();
}

// Adds a layer of the first graph.
void Selection::Learn(const LayerArrays& arrays, const Attention& shape) {
  const Attention& first = layers_.shape;
  const bool is_same = first.key_dim == shape.key_dim && first.value_dim == shape.value_dim &&
                       first.kv_heads == shape.kv_heads && first.group_size == shape.group_size &&
                       first.dtype == shape.dtype && first.cell_bytes == shape.cell_bytes &&
                       first.scale == shape.scale && first.softcap == shape.softcap;
  if (shape.group_size > kMostItemHeads) return TurnOff("more than 64 query heads per kv head");
  if (layers_.arrays.empty()) {
    layers_.shape = shape;
  } else if (!is_same) {
    return TurnOff("layers of different shapes");
  }
  const auto cells_of = [](const GgmlTensor& root) { return root.ne[1] * root.ne[2]; };
  const int64_t cells = cells_of(*(layers_.arrays.empty() ? arrays : layers_.arrays[0]).keys_root);
  if (cells_of(*arrays.keys_root) != cells || cells_of(*arrays.values_root) != cells) {
    return TurnOff("layers with different numbers of cells");
  }
  layers_.arrays.push_back(arrays);
}

void Selection::BeginGraph(std::span<const uint32_t> cells) {
  const WaitTimer timer(&longest_wait_ms_);
  if (step_ != nullptr) Abandon(PQC_OK);
  is_fresh_ = true;
  written_.assign(cells.begin(), cells.end());
  const auto lock = LockHistories();
  if (offload_ != nullptr && is_learned_) offload_->EndGraph();
  histories_->Write(written_, [this](const std::shared_ptr<History>& history, uint32_t keep) {
    Shorten(history, keep);
  });
  if (dropped_ != nullptr) dropped_->Write(written_);
}

std::optional<uint32_t> Selection::LayerOf(const GgmlTensor* keys_root) const {
  for (uint32_t i = 0; i < layers_.arrays.size(); ++i) {
    if (layers_.arrays[i].keys_root == keys_root) return i;
  }
  return std::nullopt;
}

bool Selection::Arrive(const Attention& attention) {
  layer_ = LayerOf(RootOf(attention.node->src[1]));
  if (is_off_ || fails_) return !fails_;
  is_engine_thread = true;
  if (offload_ != nullptr && !Follow(attention)) return false;
  if (!is_learned_ || layer_ != 0) return true;
  if (step_ != nullptr) Abandon(PQC_OK);
  is_to_plan_ = std::exchange(is_fresh_, false);
  return true;
}

std::span<const uint64_t* const> Selection::Prepare(const Attention& attention) {
  if (is_off_ || !is_learned_ || !layer_) return {};
  if (layer_ == 0 && std::exchange(is_to_plan_, false)) PlanStep(attention);
  if (step_ == nullptr || !step_selects_) return {};
  if (attention.node->src[3] != mask_ || rows_ != attention.streams * attention.tokens) {
    TurnOff("layers that have masks of their own");
    return {};
  }
  return hidden_;
}

void Selection::PlanStep(const Attention& attention) {
  mask_ = attention.node->src[3];
  rows_ = attention.streams * attention.tokens;
  items_.clear();
  step_tokens_ = 0;
  if (!settings_.selects()) return;
  const bool is_aligned = attention.first_cell % 64 == 0 && attention.stream_cells % 64 == 0;
  if (!is_aligned || written_.size() != rows_ || !FindHistories(attention)) return;
  // A step whose index is not ready passes the rows of its tokens, and no more.
  if (!BeginStep(true)) BeginStep(false);
  if (step_ != nullptr && step_selects_) HideSelected(attention);
}

void Selection::NotePrefill(const Attention& attention) {
  if (offload_ != nullptr) return;  // Follow does it
  if (is_off_ || !is_learned_ || layer_ != 0 || !std::exchange(is_to_plan_, false)) return;
  const WaitTimer timer(&longest_wait_ms_);
  if (attention.first_cell % 64 != 0 || attention.stream_cells % 64 != 0) return;
  std::vector<Item> found;
  const auto lock = sidecar_->Lock();
  for (uint32_t stream = 0; stream < attention.streams; ++stream) {
    if (!AddItem(attention, (stream + 1) * attention.tokens - 1, &found)) return;
  }
}

// Sets items_ to the query tokens whose histories a step may have.
bool Selection::FindHistories(const Attention& attention) {
  const WaitTimer timer(&longest_wait_ms_);
  std::vector<Item> found;
  const auto lock = sidecar_->Lock();
  if (offload_ != nullptr) {
    for (const FollowedRows& rows : offload_->rows()) {
      if (rows.stored != nullptr && MaySelect(*rows.history)) {
        found.push_back({rows.stored, rows.first_row, rows.count});
      }
    }
  }
  for (uint32_t row = 0; row < rows_ && offload_ == nullptr; ++row) {
    if (!AddItem(attention, row, &found)) return false;
  }
  const uint32_t most = std::min(kMostItemTokens, kMostItemHeads / attention.group_size);
  for (const Item& item : found) {
    if (item.count > most || !sidecar_->IsReady(*item.stored)) continue;
    if (!CatchUp(item.stored)) continue;
    item.stored->is_in_step = true;  // from now on the sidecar's thread leaves it alone
    items_.push_back(item);
    step_tokens_ += item.count;
  }
  return !items_.empty();
}

// Finds the history that a query token continues. Returns false for a mask with other values.
bool Selection::AddItem(const Attention& attention, uint32_t row, std::vector<Item>* found) {
  const uint32_t stream = row / attention.tokens, token = row % attention.tokens;
  const uint32_t base = attention.first_cell + stream * attention.stream_cells;
  seen_.Clear();
  if (!ReadSeen(attention, stream, token, seen_.words().subspan(base / 64))) return false;
  for (const uint32_t cell : written_) seen_.Remove(cell);
  uint64_t count = 0;
  for (const uint64_t word : seen_.words()) count += static_cast<uint64_t>(std::popcount(word));
  if (count < settings_.min_tokens) return true;
  std::vector<std::shared_ptr<History>> taken;
  for (const Item& item : *found) taken.push_back(item.stored->history);
  const auto history = histories_->Continue(seen_, taken, &Selection::Fingerprint, this,
                                            [this](const std::shared_ptr<History>& shortened,
                                                   uint32_t keep) { Shorten(shortened, keep); });
  if (history == nullptr) return true;
  StoredHistory& stored = sidecar_->Of(history);
  const bool is_apart = std::any_of(found->begin(), found->end(), [&](const Item& item) {
    return item.stored == &stored && item.first_row + item.count != row;
  });
  if (is_apart) return true;  // a step has a sequence once
  if (!found->empty() && found->back().stored == &stored &&
      found->back().first_row + found->back().count == row) {
    ++found->back().count;
  } else {
    found->push_back({&stored, row, 1});
  }
  return true;
}

// Passes on the rows of tokens that were decoded without a step, in steps of their own that attend
// to nothing. With the sidecar's lock.
bool Selection::CatchUp(StoredHistory* stored) {
  const History& history = *stored->history;
  while (stored->stored < history.size()) {
    pqc_client* const client = sidecar_->BeginUse();
    if (client == nullptr) return false;
    const uint32_t count = std::min(kMostItemTokens, history.size() - stored->stored);
    pqc_step_item item = PQC_INIT(pqc_step_item);
    item.sequence = stored->sequence;
    item.query_position = stored->stored;
    item.query_length = count;
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.flags = PQC_STEP_NO_WAIT;
    pqc_step* step = nullptr;
    pqc_status status = pqc_step_begin(client, &item, 1, &options, &step);
    if (status == PQC_OK) {
      LoadRows(std::span(history.cells).subspan(stored->stored, count));
      status = pqc_step_end(step, rows_to_pass_.layers().data(),
                            static_cast<uint32_t>(rows_to_pass_.layers().size()), nullptr);
    }
    if (status != PQC_OK) sidecar_->ReportFailure(stored, status);
    sidecar_->EndUse();
    if (status != PQC_OK) return false;
    stored->stored += count;
    stored->is_longer = false;
  }
  return true;
}

pqc_selection Selection::Terms() const {
  pqc_selection terms = PQC_INIT(pqc_selection);
  if (settings_.is_flat) terms.index.kind = PQC_INDEX_FLAT;
  terms.sink_tokens = settings_.sink_tokens;
  terms.window_tokens = settings_.window_tokens;
  if (settings_.selected_tokens > 0) {
    terms.budget = PQC_BUDGET_RETRIEVED;
    terms.token_count = settings_.selected_tokens;
  } else {
    terms.budget = PQC_BUDGET_RATIO;
    terms.ratio = settings_.ratio;
  }
  terms.rerank_factor = static_cast<double>(settings_.rerank);
  terms.tail_estimate = std::all_of(items_.begin(), items_.end(),
                                    [](const Item& item) { return item.stored->has_clusters; });
  return terms;
}

bool Selection::BeginStep(bool selects) {
  if (items_.empty()) return false;
  const WaitTimer timer(&longest_wait_ms_);
  std::vector<pqc_step_item> items(items_.size());
  const auto lock = sidecar_->Lock();
  pqc_client* const client = sidecar_->BeginUse();
  if (client == nullptr) {
    LeaveStep(PQC_OK);
    items_.clear();
    return false;
  }
  for (size_t i = 0; i < items.size(); ++i) {
    items[i] = PQC_INIT(pqc_step_item);
    items[i].sequence = items_[i].stored->sequence;
    items[i].query_position = items_[i].stored->history->size();
    items[i].query_length = items_[i].count;
  }
  const pqc_selection terms = Terms();
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.selection = selects ? &terms : nullptr;
  options.flags = PQC_STEP_NO_WAIT;
  const pqc_status status =
      pqc_step_begin(client, items.data(), static_cast<uint32_t>(items.size()), &options, &step_);
  step_selects_ = status == PQC_OK && selects;
  step_estimates_ = terms.tail_estimate != 0;
  if (status == PQC_OK) return true;
  step_ = nullptr;
  if (!selects) LeaveStep(status);
  return false;
}

// Gives the items back to the sidecar's thread, after a failure with its status. With the lock.
void Selection::LeaveStep(pqc_status status) {
  // A wrong argument may be that of any item: then only the item of a step of one is stored again.
  const bool is_of_one = items_.size() == 1 || status != PQC_INVALID_ARGUMENT;
  for (const Item& item : items_) {
    item.stored->is_in_step = false;
    if (status != PQC_OK && is_of_one) sidecar_->ReportFailure(item.stored, status);
  }
  sidecar_->EndUse();
}

// Has the engine's own rows without the tokens between sink and window.
void Selection::HideSelected(const Attention& attention) {
  const auto lock = sidecar_->Lock();
  hidden_.assign(rows_, nullptr);
  for (const Item& item : items_) {
    History& history = *item.stored->history;
    const uint64_t context = uint64_t{history.size()} + 1;
    const uint64_t end = context - std::min(context, settings_.window_tokens);
    const uint64_t begin = std::min(settings_.sink_tokens, end);
    history.Hide(static_cast<uint32_t>(begin), static_cast<uint32_t>(end));
    for (uint32_t row = item.first_row; row < item.first_row + item.count; ++row) {
      const uint32_t base = attention.first_cell + row / attention.tokens * attention.stream_cells;
      hidden_[row] = history.hidden.words().data() + base / 64;
    }
  }
}

std::span<const kernels::Partial> Selection::Attend(const Attention& attention) {
  if (step_ == nullptr || !step_selects_ || !layer_) return {};
  if (!AttendSelected(attention, *layer_)) return {};
  ++selected_nodes_;
  if (step_estimates_) ++estimated_nodes_;
  return partials_;
}

bool Selection::AttendSelected(const Attention& attention, uint32_t layer) {
  LoadQueries(attention);
  const uint64_t heads = uint64_t{attention.kv_heads} * attention.group_size;
  const uint64_t shape[] = {step_tokens_, heads, attention.key_dim};
  output_.resize(step_tokens_ * heads * attention.value_dim);
  lse_.resize(step_tokens_ * heads);
  pqc_tensor queries = PQC_INIT(pqc_tensor);
  queries.ptr = queries_.data();
  queries.dtype = PQC_F32;
  queries.ndim = 3;
  queries.shape = shape;
  pqc_step_attention out = PQC_INIT(pqc_step_attention);
  out.output = output_.data();
  out.output_capacity = output_.size();
  out.lse = lse_.data();
  out.lse_capacity = lse_.size();
  pqc_status status = pqc_step_attend(step_, layer, &queries, nullptr, &out);
  if (status == PQC_OK) {
    const WaitTimer timer(&longest_wait_ms_);
    status = pqc_step_check(step_);
  }
  if (status != PQC_OK) {
    Abandon(status);
    return false;
  }
  partials_.assign(rows_, {});
  size_t next = 0;
  for (const Item& item : items_) {
    for (uint32_t row = item.first_row; row < item.first_row + item.count; ++row, next += heads) {
      partials_[row] = {output_.data() + next * attention.value_dim, lse_.data() + next};
    }
  }
  return true;
}

void Selection::LoadQueries(const Attention& attention) {
  const uint32_t heads = attention.kv_heads * attention.group_size;
  queries_.resize(size_t{step_tokens_} * heads * attention.key_dim);
  float* to = queries_.data();
  for (const Item& item : items_) {
    for (uint32_t row = item.first_row; row < item.first_row + item.count; ++row) {
      for (uint32_t head = 0; head < heads; ++head, to += attention.key_dim) {
        LoadQuery(attention, row / attention.tokens, row % attention.tokens, head, to);
      }
    }
  }
}

bool Selection::IsLastLayer() const {
  return is_learned_ && layer_ && *layer_ + 1 == layers_.arrays.size();
}

void Selection::Finish() {
  if (!IsLastLayer()) return;
  if (step_ != nullptr) EndStep();
  Leave();
}

// Copies the rows of some tokens in all layers.
void Selection::LoadRows(std::span<const uint32_t> cells) {
  const Attention& shape = layers_.shape;
  const size_t element = kernels::DTypeBytes(shape.dtype);
  const size_t key_bytes = size_t{shape.kv_heads} * shape.key_dim * element;
  const size_t value_bytes = size_t{shape.kv_heads} * shape.value_dim * element;
  new_rows_.resize(layers_.arrays.size() * cells.size() * (key_bytes + value_bytes));
  std::byte* to = new_rows_.data();
  for (uint32_t layer = 0; layer < layers_.arrays.size(); ++layer) {
    for (const uint32_t cell : cells) {
      std::memcpy(std::exchange(to, to + key_bytes), layers_.KeyRow(layer, cell), key_bytes);
    }
    for (const uint32_t cell : cells) {
      std::memcpy(std::exchange(to, to + value_bytes), layers_.ValueRow(layer, cell), value_bytes);
    }
  }
  rows_to_pass_.Set(layers_, cells.size(), new_rows_.data());
}

void Selection::EndStep() {
  const WaitTimer timer(&longest_wait_ms_);
  step_cells_.clear();
  for (const Item& item : items_) {
    const auto first = written_.begin() + item.first_row;
    step_cells_.insert(step_cells_.end(), first, first + item.count);
  }
  LoadRows(step_cells_);
  const pqc_status status =
      pqc_step_end(std::exchange(step_, nullptr), rows_to_pass_.layers().data(),
                   static_cast<uint32_t>(rows_to_pass_.layers().size()), nullptr);
  const auto lock = sidecar_->Lock();
  for (const Item& item : items_) {
    if (status != PQC_OK) break;
    for (uint32_t row = item.first_row; row < item.first_row + item.count; ++row) {
      Histories::Append(item.stored->history.get(), written_[row],
                        Fingerprint(this, written_[row]));
    }
    item.stored->stored = item.stored->history->size();
    item.stored->is_longer = false;
  }
  LeaveStep(status);
}

// Ends the step without rows: the rest of the graph is computed exactly.
void Selection::Abandon(pqc_status status) {
  const WaitTimer timer(&longest_wait_ms_);
  pqc_step_abandon(std::exchange(step_, nullptr));
  const auto lock = sidecar_->Lock();
  LeaveStep(status);
}

void Selection::ParallelFor(void* self, uint32_t count, void (*body)(void* context, uint32_t index),
                            void* context) {
  auto* const selection = static_cast<Selection*>(self);
  if (!is_engine_thread) {
    for (uint32_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  struct Job {
    uint32_t count;
    uint32_t threads;
    void (*body)(void* context, uint32_t index);
    void* context;
  };
  const Crew crew = selection->threads_->crew();
  Job job{count, crew.threads, body, context};
  crew.run(
      crew.crew,
      [](void* of, uint32_t thread) {
        const Job& mine = *static_cast<const Job*>(of);
        for (uint32_t i = thread; i < mine.count; i += mine.threads) mine.body(mine.context, i);
      },
      &job);
}

uint64_t Selection::Fingerprint(const void* self, uint32_t cell) {
  const Selection& own = *static_cast<const Selection*>(self);
  if (own.dropped_ != nullptr && own.dropped_->IsAway(cell)) return own.dropped_->PrintOf(cell);
  const Layers& layers = own.layers_;
  uint64_t print;
  std::memcpy(&print, layers.KeyRow(static_cast<uint32_t>(layers.arrays.size()) - 1, cell),
              sizeof(print));
  return print;
}

}  // namespace pqcached::llama
