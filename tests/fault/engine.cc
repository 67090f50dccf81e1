#include "engine.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>

namespace pqcached::testing {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kRowBytes = (Layer::kKeyDim + Layer::kValueDim) * sizeof(float);
constexpr uint64_t kSink = 4, kWindow = 16;

std::vector<Layer> MakeContents(uint64_t tokens, uint32_t count) {
  std::vector<Layer> contents;
  for (uint32_t i = 0; i < count; ++i) contents.emplace_back(tokens, 100 + i);
  return contents;
}

bool IsOfAFault(const Status& status) {
  return status.code() == PQC_UNAVAILABLE || status.code() == PQC_DEADLINE_EXCEEDED ||
         status.code() == PQC_ABORTED;
}

}  // namespace

Engine::Counts& Engine::Counts::operator+=(const Counts& other) {
  operations += other.operations;
  repeats += other.repeats;
  refusals += other.refusals;
  acknowledged_bytes_lost += other.acknowledged_bytes_lost;
  wrong_rows_seen += other.wrong_rows_seen;
  calls_past_deadline += other.calls_past_deadline;
  return *this;
}

std::string Engine::Counts::ToString() const {
  return std::to_string(operations) + " operations, " + std::to_string(repeats) + " repeats, " +
         std::to_string(refusals) + " refusals, " + std::to_string(acknowledged_bytes_lost) +
         " bytes lost, " + std::to_string(wrong_rows_seen) + " wrong rows, " +
         std::to_string(calls_past_deadline) + " calls past their deadlines";
}

Engine::Engine(const Options& options)
    : options_(options),
      random_(options.seed),
      contents_(MakeContents(kMaxTokens + 64, kContents)) {
  const bool opened = Take("open", [&] {
    Result<Client> client = Client::Open({.endpoint = options_.endpoint,
                                          .client_name = "engine",
                                          .timeout_ms = options_.timeout_ms,
                                          .path = options_.path});
    if (client.ok()) client_ = std::make_unique<Client>(std::move(*client));
    return client.status();
  });
  if (!opened) return;
  Take("cache", [&] {
    Result<Cache> cache = client_->OpenCache(SpecOf(options_.cache_name, {0, 1}));
    if (cache.ok()) cache_ = std::make_unique<Cache>(std::move(*cache));
    return cache.status();
  });
}

Status Engine::Timed(const char*, const std::function<Status()>& call) {
  const auto begin = stopwatch_->Now();
  Status status = call();
  const auto allowed = std::chrono::milliseconds(options_.timeout_ms) + std::chrono::seconds(1);
  if (stopwatch_->Now() - begin > allowed) ++counts_.calls_past_deadline;
  return status;
}

bool Engine::Take(const char* name, const std::function<Status()>& call) {
  const auto give_up = steady_clock::now() + options_.patience;
  for (;;) {
    const Status status = Timed(name, call);
    if (status.ok()) return true;
    if (status.code() == PQC_RESOURCE_EXHAUSTED) {
      ++counts_.refusals;
      return false;
    }
    if (status.code() == PQC_DATA_LOSS) {
      ++counts_.acknowledged_bytes_lost;
      return false;
    }
    if (!IsOfAFault(status) || steady_clock::now() > give_up) {
      throw std::runtime_error(std::string(name) + ": " + status.ToString());
    }
    ++counts_.repeats;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Engine::Act() {
  ++counts_.operations;
  if (sequences_.empty()) return Create();
  const size_t number = Random(static_cast<uint32_t>(sequences_.size()));
  Known& known = sequences_[number];
  const uint32_t choice = Random(100);
  if (choice < 5) return sequences_.size() < kMaxSequences ? Create() : Drop(number);
  if (choice < 25) return Ingest(known);
  if (choice < 45) return Append(known);
  if (choice < 70) return Decode(known);
  if (choice < 78) return Build(known);
  if (choice < 83) return Fork(known);
  if (choice < 87) return Truncate(known);
  if (choice < 90) return Suspend(known);
  if (choice < 98) return Look(known);
  return Drop(number);
}

std::vector<LayerRows> Engine::Rows(uint8_t content, uint64_t begin, uint64_t end) const {
  std::vector<LayerRows> rows;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const Layer& from = Content(layer, content);
    rows.push_back({layer, from.keys(begin, end), from.values(begin, end)});
  }
  return rows;
}

void Engine::Create() {
  Take("create", [&] {
    Result<Sequence> sequence = cache_->CreateSequence();
    if (sequence.ok()) sequences_.push_back({std::move(*sequence), {}});
    return sequence.status();
  });
}

void Engine::Ingest(Known& known) {
  const uint64_t begin = known.content.size();
  const uint64_t end = std::min<uint64_t>(kMaxTokens, begin + 1 + Random(400));
  if (begin == end) return;
  const auto content = static_cast<uint8_t>(Random(kContents));
  for (const LayerRows& rows : Rows(content, begin, end)) {
    const bool taken = Take(
        "ingest", [&] { return known.sequence.Ingest(rows.layer, begin, rows.keys, rows.values); });
    if (taken) continue;
    // The pool is full: layers end at one place again.
    Take("truncate", [&] { return known.sequence.Truncate(begin); });
    return Drop(0);
  }
  known.content.resize(end, content);
}

void Engine::Append(Known& known) {
  const uint64_t begin = known.content.size();
  const uint64_t end = std::min<uint64_t>(kMaxTokens, begin + 1 + Random(20));
  if (begin == end) return;
  const auto content = static_cast<uint8_t>(Random(kContents));
  const std::vector<LayerRows> rows = Rows(content, begin, end);
  if (Take("append", [&] { return known.sequence.Append(begin, rows).status(); })) {
    known.content.resize(end, content);
  } else {
    Drop(0);
  }
}

// A few steps without waiting for their rows, then a flush, which is the acknowledgement.
void Engine::Decode(Known& known) {
  const uint64_t begin = known.content.size();
  const uint64_t end = std::min<uint64_t>(kMaxTokens, begin + 1 + Random(4));
  if (begin < 1 + kSink + kWindow || begin == end) return Append(known);
  const auto content = static_cast<uint8_t>(Random(kContents));
  const Selection selection = {
      .index = Index::Flat(), .sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.5};
  std::vector<float> output(Layer::kQueryHeads * Layer::kValueDim), lse(Layer::kQueryHeads);
  for (uint64_t position = begin; position < end; ++position) {
    const bool taken = Take("step", [&] {
      const StepItem items[] = {{&known.sequence, position}};
      Result<Step> step = client_->BeginStep(items, &selection);
      if (!step.ok()) return step.status();
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const Status attended = step->Attend(layer, Content(layer, content).queries(), output, lse);
        if (!attended.ok()) return attended;
      }
      return step->End(Rows(content, position, position + 1));
    });
    if (!taken) return Drop(0);
    known.content.push_back(content);
  }
  if (!Take("flush", [&] { return known.sequence.Flush(); })) Drop(0);
}

void Engine::Build(Known& known) {
  if (known.content.size() < 32) return;
  if (!Take("build", [&] {
        const Status built = known.sequence.BuildIndex(
            {.iterations = 2, .seed = 1, .sink_tokens = kSink, .timeout_ms = options_.timeout_ms});
        // An earlier try, whose answer was lost, or this sequence's parent had it.
        return built.code() == PQC_ALREADY_EXISTS ? Status() : built;
      })) {
    return Drop(0);
  }
  known.indexed = true;
}

void Engine::Fork(Known& known) {
  if (sequences_.size() >= kMaxSequences || known.content.empty()) return;
  const uint64_t tokens = 1 + Random(static_cast<uint32_t>(known.content.size()));
  std::vector<uint8_t> content(known.content.begin(),
                               known.content.begin() + static_cast<ptrdiff_t>(tokens));
  const bool indexed = known.indexed;
  Take("fork", [&] {
    Result<Sequence> child = known.sequence.Fork(tokens);
    if (child.ok()) sequences_.push_back({std::move(*child), std::move(content), indexed});
    return child.status();
  });
}

void Engine::Truncate(Known& known) {
  if (known.content.empty()) return;
  const uint64_t tokens = Random(static_cast<uint32_t>(known.content.size()) + 1);
  if (Take("truncate", [&] { return known.sequence.Truncate(tokens); })) {
    known.content.resize(tokens);
  }
}

void Engine::Suspend(Known& known) {
  Take("suspend", [&] { return known.sequence.Suspend(); });
  Take("resume", [&] { return known.sequence.Resume().status(); });
}

// A selection, and the rows that it chose.
void Engine::Look(Known& known) {
  const uint64_t tokens = known.content.size();
  if (tokens < 2 + kSink + kWindow) return;
  const auto layer = Random(kLayers);
  const Query query = {
      .layer = layer, .query_position = tokens - 1, .queries = contents_[0].queries()};
  const Selection selection = {
      .index = Index::Flat(), .sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.3};
  Selected selected;
  std::vector<float> keys;
  const bool taken = Take("look", [&] {
    Result<Selected> found = known.sequence.TopK(query, selection);
    if (!found.ok()) return found.status();
    selected = std::move(*found);
    keys.resize(size_t{selected.kv_heads} * selected.count * Layer::kKeyDim);
    if (selected.count == 0) return Status();
    return known.sequence.FetchTokens(layer, selected.positions, selected.count, PQC_KEY,
                                      std::as_writable_bytes(std::span(keys)));
  });
  if (!taken) return;
  for (uint32_t i = 0; i < selected.kv_heads * selected.count; ++i) {
    const uint32_t token = selected.positions[i];
    const bool right =
        token < tokens &&
        std::memcmp(&keys[size_t{i} * Layer::kKeyDim],
                    Content(layer, known.content[token]).key(token, i / selected.count),
                    Layer::kKeyDim * sizeof(float)) == 0;
    if (!right) ++counts_.wrong_rows_seen;
  }
}

void Engine::Drop(size_t number) {
  Sequence dropped = std::move(sequences_[number].sequence);
  sequences_.erase(sequences_.begin() + static_cast<ptrdiff_t>(number));
  // Whatever becomes of it, its session ends once.
  static_cast<void>(Timed("drop", [&] { return dropped.Drop(); }));
}

uint64_t Engine::WrongRows(Known& known, uint64_t begin, uint64_t end) {
  uint64_t wrong = 0;
  const uint64_t count = end - begin;
  std::vector<float> keys(Layer::kKvHeads * count * Layer::kKeyDim);
  std::vector<float> values(Layer::kKvHeads * count * Layer::kValueDim);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const bool read = Take("fetch", [&] {
      const Status fetched = known.sequence.FetchBlocks(layer, {begin, end}, PQC_KEY,
                                                        std::as_writable_bytes(std::span(keys)));
      if (!fetched.ok()) return fetched;
      return known.sequence.FetchBlocks(layer, {begin, end}, PQC_VALUE,
                                        std::as_writable_bytes(std::span(values)));
    });
    for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
      for (uint64_t i = 0; i < count; ++i) {
        const Layer& content = Content(layer, known.content[begin + i]);
        const uint64_t at = head * count + i;
        const bool right =
            read &&
            std::memcmp(&keys[at * Layer::kKeyDim], content.key(begin + i, head),
                        Layer::kKeyDim * sizeof(float)) == 0 &&
            std::memcmp(&values[at * Layer::kValueDim], content.value(begin + i, head),
                        Layer::kValueDim * sizeof(float)) == 0;
        if (!right) ++wrong;
      }
    }
  }
  return wrong;
}

void Engine::Verify() {
  for (Known& known : sequences_) {
    const uint64_t tokens = known.content.size();
    uint64_t stored = 0;
    Take("describe", [&] {
      const Result<pqc_sequence_info> info = known.sequence.Describe();
      if (info.ok()) stored = info->token_count;
      return info.status();
    });
    const uint64_t there = std::min(stored, tokens);
    const uint64_t missing = tokens - there;
    if (stored > tokens) ++counts_.wrong_rows_seen;  // what nobody ever put there
    const uint64_t wrong = there > 0 ? WrongRows(known, 0, there) : 0;
    counts_.acknowledged_bytes_lost += (missing * kLayers * Layer::kKvHeads + wrong) * kRowBytes;
  }
}

}  // namespace pqcached::testing
