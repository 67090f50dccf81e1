#include "tests/tinylm/steps.h"

#include <algorithm>
#include <utility>

#include "tests/tinylm/client_calls.h"
#include "tests/tinylm/kernels.h"

namespace tinylm {
namespace {

pqc_step_item ItemOf(pqc_sequence* sequence, uint32_t position) {
  auto item = Sized<pqc_step_item>();
  item.sequence = sequence;
  item.query_position = position;
  item.query_length = 1;
  return item;
}

pqc_step* Begin(pqc_client* client, const std::vector<pqc_step_item>& items,
                const pqc_selection* selection) {
  auto options = Sized<pqc_step_options>();
  options.selection = selection;
  pqc_step* step = nullptr;
  Check(pqc_step_begin(client, items.data(), static_cast<uint32_t>(items.size()), &options, &step),
        "pqc_step_begin");
  return step;
}

// Shapes: q, o [tokens, heads, dim], lse [tokens, heads], counts [tokens].
void AttendStep(pqc_step* step, const StepQuery& first, uint64_t tokens, const float* q, float* o,
                float* lse, uint32_t* counts) {
  const uint64_t heads = first.query_heads;
  const uint64_t shape[3] = {tokens, heads, first.head_dim};
  const pqc_tensor queries = Borrow(q, shape);
  auto attention = Sized<pqc_step_attention>();
  attention.output = o;
  attention.output_capacity = tokens * heads * first.head_dim;
  attention.lse = lse;
  attention.lse_capacity = tokens * heads;
  attention.counts = counts;
  Check(pqc_step_attend(step, first.layer, &queries, &first.selection, &attention),
        "pqc_step_attend");
}

// Ends a step with one token per item; `rows` holds all layers, k and v [tokens, kv_heads, dim].
void EndStep(pqc_step* step, uint64_t tokens, uint64_t kv_heads,
             const std::vector<StepRows>& rows) {
  const uint64_t dim = rows.empty() ? 0 : rows.front().k.size() / (tokens * kv_heads);
  const uint64_t shape[3] = {tokens, kv_heads, dim};
  std::vector<pqc_layer_rows> layers;
  for (const StepRows& each : rows) {
    auto layer = Sized<pqc_layer_rows>();
    layer.layer = each.layer;
    layer.keys = Borrow(each.k.data(), shape);
    layer.values = Borrow(each.v.data(), shape);
    layers.push_back(layer);
  }
  Check(pqc_step_end(step, layers.data(), static_cast<uint32_t>(layers.size()), nullptr),
        "pqc_step_end");
}

}  // namespace

uint32_t SingleSteps::Attend(const StepQuery& query) {
  if (!step_) {
    step_ = Begin(client_, {ItemOf(query.sequence, query.position)}, &query.selection);
  }
  uint32_t count = 0;
  AttendStep(step_, query, 1, query.q, query.o, query.lse, &count);
  return count;
}

void SingleSteps::End(pqc_sequence* sequence, uint32_t position, uint32_t kv_heads,
                      const std::vector<StepRows>& rows) {
  // A short context selects nothing, so no attention has begun the step; its rows are appended all
  // the same.
  if (!step_) step_ = Begin(client_, {ItemOf(sequence, position)}, nullptr);
  EndStep(std::exchange(step_, nullptr), 1, kv_heads, rows);
}

uint32_t BatchSteps::Attend(const StepQuery& query) {
  std::unique_lock lock(mutex_);
  queries_.push_back(&query);
  WaitForMembers(lock);
  const auto place = std::find(order_.begin(), order_.end(), query.sequence);
  return counts_[static_cast<size_t>(place - order_.begin())];
}

void BatchSteps::End(pqc_sequence* sequence, uint32_t position, uint32_t kv_heads,
                     const std::vector<StepRows>& rows) {
  std::unique_lock lock(mutex_);
  endings_.push_back({sequence, position, kv_heads, &rows});
  WaitForMembers(lock);
}

void BatchSteps::Leave() {
  const std::lock_guard lock(mutex_);
  --member_count_;
  if (member_count_ > 0 && waiting_count_ == member_count_) DoAll();
}

void BatchSteps::WaitForMembers(std::unique_lock<std::mutex>& lock) {
  const uint64_t meeting = meeting_;
  if (++waiting_count_ == member_count_) {
    DoAll();
  } else {
    met_.wait(lock, [&] { return meeting_ != meeting; });
  }
  // The next meeting cannot end before this member has joined it, so error_ is still this
  // meeting's.
  if (!error_.empty()) throw std::runtime_error(error_);
}

void BatchSteps::DoAll() {
  error_.clear();
  try {
    if (!queries_.empty() && !endings_.empty()) {
      throw std::runtime_error("the members of a batch call in different order");
    }
    if (!queries_.empty()) AttendAll();
    if (!endings_.empty()) EndAll();
  } catch (const std::exception& error) {
    error_ = error.what();
  }
  queries_.clear();
  endings_.clear();
  waiting_count_ = 0;
  ++meeting_;
  met_.notify_all();
}

void BatchSteps::AttendAll() {
  const StepQuery& first = *queries_.front();
  if (!step_) {
    std::vector<pqc_step_item> items;
    order_.clear();
    for (const StepQuery* query : queries_) {
      items.push_back(ItemOf(query->sequence, query->position));
      order_.push_back(query->sequence);
    }
    step_ = Begin(client_, items, &first.selection);
    largest_batch_ = std::max(largest_batch_, static_cast<uint32_t>(items.size()));
  }
  std::sort(queries_.begin(), queries_.end(), [&](const StepQuery* a, const StepQuery* b) {
    return std::find(order_.begin(), order_.end(), a->sequence) <
           std::find(order_.begin(), order_.end(), b->sequence);
  });
  const size_t heads = first.query_heads, floats = heads * first.head_dim;
  std::vector<float> q(queries_.size() * floats), o(q.size()), lse(queries_.size() * heads);
  for (size_t i = 0; i < queries_.size(); ++i) std::copy_n(queries_[i]->q, floats, &q[i * floats]);
  counts_.assign(queries_.size(), 0);
  AttendStep(step_, first, queries_.size(), q.data(), o.data(), lse.data(), counts_.data());
  for (size_t i = 0; i < queries_.size(); ++i) {
    std::copy_n(&o[i * floats], floats, queries_[i]->o);
    std::copy_n(&lse[i * heads], heads, queries_[i]->lse);
  }
}

void BatchSteps::EndAll() {
  if (!step_) {
    std::vector<pqc_step_item> items;
    order_.clear();
    for (const Ending& ending : endings_) {
      items.push_back(ItemOf(ending.sequence, ending.position));
      order_.push_back(ending.sequence);
    }
    step_ = Begin(client_, items, nullptr);
  }
  std::sort(endings_.begin(), endings_.end(), [&](const Ending& a, const Ending& b) {
    return std::find(order_.begin(), order_.end(), a.sequence) <
           std::find(order_.begin(), order_.end(), b.sequence);
  });
  std::vector<StepRows> packed;
  for (const StepRows& rows : *endings_.front().rows) packed.push_back({rows.layer, {}, {}});
  for (const Ending& ending : endings_) {
    for (size_t i = 0; i < packed.size(); ++i) {
      const StepRows& rows = (*ending.rows)[i];
      packed[i].k.insert(packed[i].k.end(), rows.k.begin(), rows.k.end());
      packed[i].v.insert(packed[i].v.end(), rows.v.begin(), rows.v.end());
    }
  }
  EndStep(std::exchange(step_, nullptr), endings_.size(), endings_.front().kv_heads, packed);
}

}  // namespace tinylm
