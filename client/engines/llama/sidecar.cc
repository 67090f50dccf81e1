#include "client/engines/llama/sidecar.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "client/engines/llama/log.h"

namespace pqcached::llama {
namespace {

constexpr uint32_t kCopiedTokens = 64;            // while the engine's thread may wait
constexpr size_t kChunkBytes = size_t{16} << 20;  // of rows that are passed on together
constexpr uint32_t kMostChunkTokens = 512;
constexpr uint32_t kTimeoutMs = 2000;  // of a call of the sidecar's thread
constexpr int kNiceness = 10;
constexpr uint64_t kProtectionMs = 30ull * 24 * 3600 * 1000;  // the longest that there is
constexpr auto kRetry = std::chrono::milliseconds(500);
constexpr auto kLongestRetry = std::chrono::milliseconds(60000);

// Every context has a cache of its own: the plug-in does not know the model's weights, so it must
// not share rows with another process.
std::string CacheName() {
  static std::atomic<uint32_t> next{1};
  return "llama.cpp/" + std::to_string(getpid()) + "/" + std::to_string(next.fetch_add(1));
}

}  // namespace

pqc_dtype PqcDType(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kF32:
      return PQC_F32;
    case kernels::DType::kBf16:
      return PQC_BF16;
    case kernels::DType::kF16:
      break;
  }
  return PQC_F16;
}

void RowsToPass::Set(const Layers& layers, uint64_t tokens, const std::byte* memory) {
  const Attention& shape = layers.shape;
  const size_t element = kernels::DTypeBytes(shape.dtype);
  const uint64_t keys[] = {tokens, shape.kv_heads, shape.key_dim};
  const uint64_t values[] = {tokens, shape.kv_heads, shape.value_dim};
  std::copy_n(keys, 3, key_shape_);
  std::copy_n(values, 3, value_shape_);
  const auto tensor = [&](const uint64_t* dims) {
    pqc_tensor each = PQC_INIT(pqc_tensor);
    each.ptr = const_cast<std::byte*>(memory);
    each.dtype = PqcDType(shape.dtype);
    each.ndim = 3;
    each.shape = dims;
    memory += tokens * dims[1] * dims[2] * element;
    return each;
  };
  rows_.resize(layers.arrays.size());
  for (uint32_t layer = 0; layer < rows_.size(); ++layer) {
    rows_[layer] = PQC_INIT(pqc_layer_rows);
    rows_[layer].layer = layer;
    rows_[layer].keys = tensor(key_shape_);
    rows_[layer].values = tensor(value_shape_);
  }
}

Sidecar::Sidecar(const Settings& settings, Layers layers, pqc_parallel_for parallel_for,
                 void* context, uint32_t threads)
    : settings_(settings),
      layers_(std::move(layers)),
      parallel_for_(parallel_for),
      parallel_for_context_(context),
      threads_(threads) {
  const size_t token_bytes = 2 * layers_.shape.cell_bytes * layers_.arrays.size();
  chunk_tokens_ =
      static_cast<uint32_t>(std::clamp<size_t>(kChunkBytes / token_bytes, 1, kMostChunkTokens));
  thread_ = std::thread([this] { Run(); });
}

Sidecar::~Sidecar() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  wake_.notify_all();
  thread_.join();
  std::unique_lock lock(mutex_);
  try {
    Disconnect(&lock);  // the thread has done so, unless it ended with an exception
  } catch (const std::exception& error) {
    Log(std::string("the session with the sidecar was not closed: ") + error.what());
  }
}

void Sidecar::SetBring(std::function<bool(std::span<const uint32_t> cells)> bring) {
  const auto lock = Lock();
  bring_ = std::move(bring);
}

std::unique_lock<std::mutex> Sidecar::Lock() {
  waiting_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  waiting_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

StoredHistory& Sidecar::Of(const std::shared_ptr<History>& history) {
  for (const auto& each : stored_) {
    if (each->history != history) continue;
    if (history->size() - each->stored > kMostLeft) wake_.notify_all();
    return *each;
  }
  stored_.push_back(std::make_unique<StoredHistory>());
  stored_.back()->history = history;
  wake_.notify_all();
  return *stored_.back();
}

bool Sidecar::IsReady(const StoredHistory& stored) const {
  return client_ != nullptr && !is_lost_ && stored.sequence != nullptr && !stored.is_filling &&
         !stored.is_broken && stored.history->size() - stored.stored <= kMostLeft;
}

void Sidecar::Shorten(const History& history, uint32_t keep) {
  for (const auto& each : stored_) {
    if (each->history.get() != &history || each->stored <= keep) continue;
    each->stored = keep;
    each->acknowledged = std::min(each->acknowledged, keep);
    each->is_longer = true;
  }
}

pqc_client* Sidecar::BeginUse() {
  is_used_ = client_ != nullptr && !is_lost_;
  return is_used_ ? client_ : nullptr;
}

void Sidecar::EndUse() { is_used_ = false; }

pqc_sequence* Sidecar::BeginReading(const StoredHistory& stored) {
  const std::lock_guard lock(reading_mutex_);
  ++readers_;
  return client_ == nullptr || is_lost_ || stored.history->is_lost ? nullptr : stored.sequence;
}

void Sidecar::EndReading() {
  const std::lock_guard lock(reading_mutex_);
  --readers_;
}

bool Sidecar::IsLost(const StoredHistory& stored) {
  const std::lock_guard lock(reading_mutex_);
  return stored.history->is_lost;
}

bool Sidecar::WaitUntilStored(const std::shared_ptr<History>& history, uint32_t tokens,
                              std::chrono::steady_clock::time_point deadline,
                              std::unique_lock<std::mutex>* lock) {
  StoredHistory& stored = Of(history);
  while (stored.acknowledged < tokens) {
    stored.is_awaited = true;
    wake_.notify_all();
    if (filled_.wait_until(*lock, deadline) == std::cv_status::timeout) break;
  }
  stored.is_awaited = false;
  return stored.acknowledged >= tokens;
}

void Sidecar::ReportFailure(StoredHistory* stored, pqc_status status) {
  pqc_progress progress = PQC_INIT(pqc_progress);
  const bool is_known = pqc_sequence_progress(stored->sequence, &progress) == PQC_OK;
  if (is_known && progress.is_lost != 0) is_lost_ = true;
  const bool repeats =
      status == PQC_UNAVAILABLE || status == PQC_DEADLINE_EXCEEDED || status == PQC_ABORTED;
  const bool has_bad_rows = is_known && progress.row_status != PQC_OK;
  if (is_lost_ || !repeats || has_bad_rows) {
    stored->is_broken = true;
    wake_.notify_all();
  }
}

void Sidecar::Run() {
  // The engine's threads spin between nodes, and wait for each other: they need all their cores.
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
  try {
    Work();
  } catch (const std::exception& error) {
    // The client stays open, and no rows are stored any more.
    Log(std::string("attends exactly from now on: ") + error.what());
  }
}

void Sidecar::Work() {
  std::unique_lock lock(mutex_);
  while (!stops_) {
    if (is_lost_ && !is_used_) Disconnect(&lock);
    if (client_ == nullptr) {
      lock.unlock();
      const bool is_connected = Connect();
      lock.lock();
      if (!is_connected) wake_.wait_for(lock, kRetry, [this] { return stops_; });
      continue;
    }
    DropBroken(&lock);
    BuildClusters(&lock);
    StoredHistory* const next = NextToFill();
    if (next == nullptr) {
      wake_.wait_for(lock, kRetry);
      continue;
    }
    next->is_filling = true;
    if (next->is_broken) Repair(next, &lock);
    const pqc_status status = Fill(next, &lock);
    next->is_filling = false;
    next->is_awaited = false;
    answers_ = status == PQC_OK;
    filled_.notify_all();
    if (status == PQC_OK) {
      next->delay = {};
      continue;
    }
    Say(std::string("rows are not stored yet: ") + pqc_last_error());
    ReportFailure(next, status);
    next->delay = std::clamp(2 * next->delay, kRetry, kLongestRetry);
    next->retry_at = std::chrono::steady_clock::now() + next->delay;
  }
  Disconnect(&lock);
}

// Prints a line, unless the last one was the same.
void Sidecar::Say(const std::string& line) {
  if (line == said_) return;
  said_ = line;
  Log(line);
}

bool Sidecar::Connect() {
  pqc_client_options options = PQC_INIT(pqc_client_options);
  options.endpoint = settings_.endpoint.c_str();
  options.client_name = "llama.cpp";
  options.path = PQC_PATH_ONLY_LOCAL;  // elsewhere, a step's calls wait for the sidecar
  options.timeout_ms = kTimeoutMs;
  if (settings_.offloads_or_drops()) {
    options.timeout_ms =
        static_cast<uint32_t>(std::min<uint64_t>(kTimeoutMs, settings_.deadline_ms));
  }
  options.parallel_for = parallel_for_;
  options.parallel_for_context = parallel_for_context_;
  options.thread_count = threads_;
  pqc_client* client = nullptr;
  pqc_cache* cache = nullptr;
  std::vector<uint32_t> numbers(layers_.arrays.size());
  for (uint32_t i = 0; i < numbers.size(); ++i) numbers[i] = i;
  const Attention& shape = layers_.shape;
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = numbers.data();
  group.layer_count = static_cast<uint32_t>(numbers.size());
  group.kv_heads = shape.kv_heads;
  group.query_heads = shape.kv_heads * shape.group_size;
  group.key_dim = shape.key_dim;
  group.value_dim = shape.value_dim;
  group.dtype = PqcDType(shape.dtype);
  group.softmax_scale = shape.scale;
  group.softcap = shape.softcap;
  const std::string name = CacheName();
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  spec.name = name.c_str();
  spec.model_fingerprint = name.c_str();
  spec.groups = &group;
  spec.group_count = 1;
  pqc_status status = pqc_client_open(&options, &client);
  if (status == PQC_OK) status = pqc_cache_open(client, &spec, &cache);
  if (status != PQC_OK) {
    Say(std::string("exact until the sidecar answers: ") + pqc_last_error());
    pqc_client_close(client);
    return false;
  }
  Say("connected to the sidecar at " + settings_.endpoint);
  answers_ = true;
  const std::lock_guard lock(mutex_);
  const std::lock_guard reading(reading_mutex_);
  client_ = client;
  cache_ = cache;
  is_lost_ = false;
  return true;
}

// Ends the session, which drops its sequences. No step is in progress.
void Sidecar::Disconnect(std::unique_lock<std::mutex>* lock) {
  pqc_client* client = nullptr;
  pqc_cache* cache = nullptr;
  std::vector<pqc_sequence*> sequences;
  const bool is_lost = is_lost_;
  {
    const std::lock_guard reading(reading_mutex_);
    if (readers_ > 0 && !stops_) return;  // the next time
    client = std::exchange(client_, nullptr);
    cache = std::exchange(cache_, nullptr);
    if (client == nullptr) return;
    for (const auto& each : stored_) {
      if (each->sequence != nullptr) sequences.push_back(each->sequence);
      each->history->is_lost = each->history->has_offloaded();
      each->sequence = nullptr;
      each->stored = each->acknowledged = 0;
      each->is_broken = each->is_longer = false;
      EndClusters(each.get());
    }
  }
  lock->unlock();
  // The cache can be dropped only when its sequences are. When the sidecar does not answer, the
  // rest is left to it: it drops them when the session ends, and handles of a closed client do not
  // wait.
  bool answers = !is_lost && answers_;
  size_t dropped = 0;
  while (answers && dropped < sequences.size()) {
    answers = pqc_sequence_drop(sequences[dropped++]) == PQC_OK;
  }
  if (answers) pqc_cache_drop(cache);
  pqc_cache_close(cache);
  pqc_client_close(client);
  for (; dropped < sequences.size(); ++dropped) pqc_sequence_detach(sequences[dropped]);
  CloseBuilds();
  lock->lock();
}

// Drops the sequences of histories that are gone, and those that cannot be used any more. Returns
// when the sidecar does not answer: each call would wait until its deadline.
void Sidecar::DropBroken(std::unique_lock<std::mutex>* lock) {
  for (size_t i = 0; i < stored_.size() && !stops_;) {
    StoredHistory& each = *stored_[i];
    const bool is_bad = each.is_broken && !each.history->has_offloaded();
    if (each.is_in_step || (!each.history->is_gone && !is_bad)) {
      ++i;
      continue;
    }
    pqc_sequence* const dropped = std::exchange(each.sequence, nullptr);
    each.stored = each.acknowledged = 0;
    each.is_broken = each.is_longer = false;
    EndClusters(&each);
    if (each.history->is_gone) {
      stored_.erase(stored_.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
    if (dropped == nullptr) continue;
    lock->unlock();
    answers_ = pqc_sequence_drop(dropped) == PQC_OK;
    lock->lock();
    if (!answers_) return;
    i = 0;
  }
}

// Forgets the clusters of a sequence that is about to be dropped, which cancels their build.
void Sidecar::EndClusters(StoredHistory* stored) {
  if (stored->build != nullptr) former_builds_.push_back(std::exchange(stored->build, nullptr));
  stored->has_clusters = false;
}

bool Sidecar::CanBuildClusters(const StoredHistory& stored) const {
  if (stored.sequence == nullptr || stored.has_clusters || stored.is_in_step || stored.is_broken ||
      stored.history->is_lost || std::chrono::steady_clock::now() < stored.build_at) {
    return false;
  }
  pqc_progress progress = PQC_INIT(pqc_progress);
  if (pqc_sequence_progress(stored.sequence, &progress) != PQC_OK) return false;
  const bool is_indexed = settings_.is_flat || (progress.has_index != 0 &&
                                                progress.layers_ready == progress.layer_count);
  return is_indexed && progress.stored_tokens + kMostLeft >= stored.history->size();
}

// Begins builds of clusters where the index is complete, and takes note of those that have ended.
void Sidecar::BuildClusters(std::unique_lock<std::mutex>* lock) {
  CloseBuilds();
  if (!settings_.estimates_tail()) return;
  for (size_t i = 0; i < stored_.size(); ++i) {
    StoredHistory& each = *stored_[i];
    if (each.build == nullptr && !CanBuildClusters(each)) continue;
    lock->unlock();
    uint32_t is_done = 0;
    pqc_status status = PQC_OK;
    if (each.build == nullptr) {
      status = BeginClusters(&each);
    } else {
      status = pqc_operation_poll(each.build, &is_done);
    }
    lock->lock();
    const bool exists = status == PQC_ALREADY_EXISTS || (is_done != 0 && status == PQC_OK);
    if (is_done == 0 && status == PQC_OK) continue;
    EndClusters(&each);
    each.has_clusters = exists;
    each.build_at = {};
    if (exists) continue;
    // A step may have had the sequence, and no step has it for long.
    each.build_at =
        std::chrono::steady_clock::now() + (status == PQC_ABORTED ? kRetry : kLongestRetry);
  }
}

pqc_status Sidecar::BeginClusters(StoredHistory* stored) {
  pqc_build_options options = PQC_INIT(pqc_build_options);
  options.sink_tokens = settings_.sink_tokens;
  const pqc_status status = pqc_index_make("clusters", nullptr, 0, &options.index);
  if (status != PQC_OK) return status;
  return pqc_build_index_begin(stored->sequence, &options, nullptr, &stored->build);
}

// Closes builds whose sequences are gone. Those that have not ended are tried again later.
void Sidecar::CloseBuilds() {
  std::erase_if(former_builds_, [](pqc_operation* build) {
    uint32_t is_done = 0;
    pqc_operation_poll(build, &is_done);
    return is_done != 0 && pqc_operation_close(build, 0) == PQC_OK;
  });
}

StoredHistory* Sidecar::NextToFill() {
  const auto now = std::chrono::steady_clock::now();
  for (const auto& each : stored_) {
    if (each->is_in_step || each->history->is_lost) continue;
    if (now < each->retry_at) continue;
    const uint32_t left = each->history->size() - each->stored;
    const bool is_awaited = each->is_awaited && each->acknowledged < each->history->size();
    if (left > kMostLeft || is_awaited || each->is_broken || each->sequence == nullptr) {
      return each.get();
    }
  }
  return nullptr;
}

pqc_status Sidecar::Fill(StoredHistory* stored, std::unique_lock<std::mutex>* lock) {
  if (stored->sequence == nullptr) {
    if (const pqc_status status = Create(stored, lock); status != PQC_OK) return status;
  }
  while (!stops_ && !stored->history->is_gone && stored->stored < stored->history->size() &&
         std::chrono::steady_clock::now() >= stored->retry_at) {
    if (const pqc_status status = SendChunk(stored, lock); status != PQC_OK) return status;
  }
  const uint32_t passed = stored->stored;
  const uint64_t version = stored->history->version;
  lock->unlock();
  pqc_status status = pqc_sequence_flush(stored->sequence);
  // Offloaded tokens must not be evicted.
  if (status == PQC_OK && settings_.offloads_or_drops()) {
    status = pqc_sequence_pin(stored->sequence, kProtectionMs);
  }
  lock->lock();
  if (status != PQC_OK) {
    // It is not known which of the rows are stored: they are passed again.
    stored->stored = std::min(stored->stored, stored->acknowledged);
    stored->is_longer = true;
  } else if (stored->history->version == version) {
    stored->acknowledged = passed;
  }
  return status;
}

// Makes a sequence with offloaded tokens usable again, one of whose rows was refused or lost.
void Sidecar::Repair(StoredHistory* stored, std::unique_lock<std::mutex>* lock) {
  lock->unlock();
  pqc_sequence_flush(stored->sequence);  // clears the error
  lock->lock();
  stored->stored = std::min(stored->stored, stored->acknowledged);
  stored->is_longer = true;
  stored->is_broken = false;
}

pqc_status Sidecar::Create(StoredHistory* stored, std::unique_lock<std::mutex>* lock) {
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  if (settings_.selects() && !settings_.is_flat) {
    options.has_live_index = 1;
    options.sink_tokens = settings_.sink_tokens;
  }
  options.retain = 2;
  pqc_sequence* sequence = nullptr;
  lock->unlock();
  const pqc_status status = pqc_sequence_create_with(cache_, &options, &sequence, nullptr);
  lock->lock();
  stored->sequence = sequence;
  stored->stored = stored->acknowledged = 0;
  stored->is_longer = false;
  return status;
}

pqc_status Sidecar::SendChunk(StoredHistory* stored, std::unique_lock<std::mutex>* lock) {
  const uint32_t first = stored->stored;
  const uint32_t count = CopyChunk(stored, lock);
  if (count == 0) return PQC_OK;
  stored->stored = first + count;
  const bool is_longer = std::exchange(stored->is_longer, false);
  RowsToPass rows;
  rows.Set(layers_, count, chunk_.data());
  lock->unlock();
  pqc_status status = is_longer ? pqc_sequence_truncate(stored->sequence, first) : PQC_OK;
  if (status == PQC_OK) {
    status = pqc_enqueue_rows(stored->sequence, first, rows.layers().data(),
                              static_cast<uint32_t>(rows.layers().size()), nullptr);
  }
  lock->lock();
  if (status != PQC_OK) {
    stored->stored = std::min(stored->stored, first);
    stored->is_longer = true;
  }
  return status;
}

// Copies the rows of the next tokens into chunk_: for each layer keys, then values. Returns how
// many; 0 when the history became shorter meanwhile: it may have grown again, with other cells; and
// 0 when the engine has other rows at present, which is tried again later. The lock is released
// between pieces, and held at the end.
uint32_t Sidecar::CopyChunk(StoredHistory* stored, std::unique_lock<std::mutex>* lock) {
  const uint32_t first = stored->stored;
  const uint64_t version = stored->history->version;
  const uint32_t count = std::min(chunk_tokens_, stored->history->size() - first);
  const Attention& shape = layers_.shape;
  const size_t element = kernels::DTypeBytes(shape.dtype);
  const size_t key_bytes = size_t{shape.kv_heads} * shape.key_dim * element;
  const size_t value_bytes = size_t{shape.kv_heads} * shape.value_dim * element;
  chunk_.resize(layers_.arrays.size() * count * (key_bytes + value_bytes));
  std::byte* next = chunk_.data();
  for (uint32_t layer = 0; layer < layers_.arrays.size(); ++layer) {
    for (uint32_t begin = 0; begin < count; begin += kCopiedTokens) {
      const uint32_t end = std::min(count, begin + kCopiedTokens);
      const auto cells = std::span(stored->history->cells).subspan(first + begin, end - begin);
      if (bring_ != nullptr && !bring_(cells)) {
        stored->retry_at = std::chrono::steady_clock::now() + kRetry;
        return 0;
      }
      for (uint32_t i = begin; i < end; ++i) {
        const uint32_t cell = stored->history->cells[first + i];
        std::memcpy(next + i * key_bytes, layers_.KeyRow(layer, cell), key_bytes);
        std::memcpy(next + count * key_bytes + i * value_bytes, layers_.ValueRow(layer, cell),
                    value_bytes);
      }
      if (!HasRowsOf(*stored->history, first + begin, first + end)) {
        stored->retry_at = std::chrono::steady_clock::now() + kRetry;
        return 0;
      }
      lock->unlock();
      // A mutex is not fair: without this, the engine's thread would wait for the whole chunk.
      while (waiting_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
      lock->lock();
      if (stops_ || stored->history->version != version) return 0;
    }
    next += count * (key_bytes + value_bytes);
  }
  return count;
}

// Returns whether the engine has the rows of tokens [begin, end) of a history, as far as the last
// layer's keys say. The application may clear or load its cache at any time, which no graph shows.
bool Sidecar::HasRowsOf(const History& history, uint32_t begin, uint32_t end) const {
  const auto last = static_cast<uint32_t>(layers_.arrays.size()) - 1;
  for (uint32_t i = begin; i < end; ++i) {
    const std::byte* const key = layers_.KeyRow(last, history.cells[i]);
    if (std::memcmp(key, &history.prints[i], sizeof(uint64_t)) != 0) return false;
  }
  return true;
}

}  // namespace pqcached::llama
