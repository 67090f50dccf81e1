// Which policy of eviction keeps more of what comes again: hit rates of both, over pool sizes, on two
// traces. Prints a table for each; `eviction_study [SEED]`.
//
// The traces are made up, and always the same under their seed. `mixed`: 3000 requests of
//   conversations   begin with one of 8 system prompts of 512 to 4096 tokens (the n-th is taken
//                   proportionally to 1/n); each turn sends all tokens so far, 50 to 500 new ones, and
//                   gets 100 to 700 back; 6 turns on average. 40 are under way at a time, and the next
//                   turn comes from any of them, the most recently used ones more often
//   documents       one in four requests: 4096 to 16384 tokens behind a system prompt, once and never
//                   again
// `agents`: 24 conversations of the trace that tests/bench/engine/turn_trace.py plays
// (tests/bench/agent_trace.h): turn t of 33 has a prompt of 2666 t tokens. All begin with the same
// 1024 tokens. 8 are under way at a time, and the next turn comes from any of them, the most recently
// used ones more often.
// Each runs through a store, with rows of one layer and one kv head (128 bytes a token).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/base/check.h"
#include "kvstore/store.h"
#include "tests/bench/agent_trace.h"

namespace pqcached::kvstore {
namespace {

constexpr char kTenant[] = "study";
constexpr uint32_t kRequests = 3000;
constexpr uint32_t kDim = 32;
constexpr uint32_t kMostTokens = 24'000;  // of a prompt of `mixed`
using agent_trace::kInputTokensPerOutputToken;
using agent_trace::kTurns;
constexpr uint32_t kAgents = 24;
constexpr uint32_t kTurnTokens = agent_trace::kPromptTokens / agent_trace::kTimedTurn;
constexpr size_t kTokenBytes = size_t{2} * kDim * sizeof(uint16_t);

using Tokens = std::vector<uint32_t>;

struct Request {
  Tokens prompt;
  uint32_t answer_tokens = 0;
};

class Trace {
 public:
  static Trace Mixed(uint64_t seed) {
    Trace trace(seed);
    for (Tokens& system : trace.systems_) system = trace.Fresh(trace.Between(512, 4096));
    for (uint32_t i = 0; i < kRequests; ++i) trace.requests_.push_back(trace.NextMixed());
    return trace;
  }
  static Trace Agents(uint64_t seed) {
    Trace trace(seed);
    trace.systems_[0] = trace.Fresh(1024);
    for (uint32_t i = 0; i < kAgents * kTurns; ++i) trace.requests_.push_back(trace.NextTurn());
    return trace;
  }
  const std::vector<Request>& requests() const { return requests_; }

 private:
  struct Conversation {
    Tokens tokens;
    uint32_t turns_left = 0;
  };

  explicit Trace(uint64_t seed) : random_(seed) {}

  uint32_t Between(uint32_t least, uint32_t most) {
    return least + static_cast<uint32_t>(random_() % (most - least + 1));
  }
  Tokens Fresh(uint32_t count) {
    Tokens tokens(count);
    for (uint32_t& token : tokens) token = static_cast<uint32_t>(random_() % 100'000);
    return tokens;
  }
  const Tokens& System() {
    std::vector<double> weights;
    for (size_t n = 1; n <= std::size(systems_); ++n)
      weights.push_back(1.0 / static_cast<double>(n));
    return systems_[std::discrete_distribution<size_t>(weights.begin(), weights.end())(random_)];
  }
  static void Add(const Tokens& more, Tokens& tokens) {
    tokens.insert(tokens.end(), more.begin(), more.end());
  }

  // Removes and returns one of those under way. The newest stand at the end.
  Conversation Take(double newest_share) {
    const auto back = std::min<size_t>(std::geometric_distribution<size_t>(newest_share)(random_),
                                       conversations_.size() - 1);
    const auto place = conversations_.end() - 1 - static_cast<ptrdiff_t>(back);
    Conversation taken = std::move(*place);
    conversations_.erase(place);
    return taken;
  }
  // Adds the answer's tokens. They are drawn by the one who serves the request; here they are known
  // already.
  void AddAnswer(uint32_t token_count, Tokens& tokens) {
    answers_.seed(requests_.size());
    for (uint32_t i = 0; i < token_count; ++i) {
      tokens.push_back(static_cast<uint32_t>(answers_() % 100'000));
    }
  }

  Request NextTurn() {
    while (conversations_.size() < 8 && agents_ < kAgents) {
      conversations_.push_back({systems_[0], kTurns});
      ++agents_;
    }
    Conversation now = Take(0.3);
    const uint32_t prompt_tokens = (kTurns - now.turns_left + 1) * kTurnTokens;
    Add(Fresh(prompt_tokens - static_cast<uint32_t>(now.tokens.size())), now.tokens);
    Request request{.prompt = now.tokens,
                    .answer_tokens = prompt_tokens / kInputTokensPerOutputToken};
    AddAnswer(request.answer_tokens, now.tokens);
    if (--now.turns_left > 0) conversations_.push_back(std::move(now));
    return request;
  }

  Request NextMixed() {
    if (random_() % 4 == 0) {
      Request request{.prompt = System(), .answer_tokens = Between(100, 700)};
      Add(Fresh(Between(4096, 16384)), request.prompt);
      return request;
    }
    while (conversations_.size() < 40) {
      conversations_.push_back(
          {System(), 1 + std::geometric_distribution<uint32_t>(1.0 / 6)(random_)});
    }
    Conversation now = Take(0.05);
    Add(Fresh(Between(50, 500)), now.tokens);
    Request request{.prompt = now.tokens, .answer_tokens = Between(100, 700)};
    AddAnswer(request.answer_tokens, now.tokens);
    const bool goes_on = --now.turns_left > 0 && now.tokens.size() + 500 <= kMostTokens;
    if (goes_on) conversations_.push_back(std::move(now));
    return request;
  }

  std::mt19937_64 random_;
  std::mt19937_64 answers_;
  Tokens systems_[8];
  std::vector<Conversation> conversations_;
  uint32_t agents_ = 0;  // that have begun
  std::vector<Request> requests_;
};

// Rows of tokens [first, first + count), which are all the same.
void Add(Store& store, uint64_t id, uint64_t first, uint32_t count, bool append) {
  static const std::vector<uint16_t> zeros(size_t{kTurns} * kTurnTokens * kDim, 0);
  const TensorView rows{.data = reinterpret_cast<const std::byte*>(zeros.data()),
                        .data_bytes = zeros.size() * sizeof(uint16_t),
                        .dtype = kernels::DType::kF16,
                        .shape = {count, 1, kDim},
                        .strides = {}};
  const LayerRows layer{.layer = 0, .keys = rows, .values = rows};
  if (append) {
    PQC_CHECK(store.Append(kTenant, id, first, {&layer, 1}).ok());
    return;
  }
  auto ingest = store.BeginIngest(kTenant, id);
  PQC_CHECK(ingest.ok() && (*ingest)->Write(first, layer).ok() && (*ingest)->Commit().ok());
}

struct Outcome {
  double hit_rate = 0;
  uint64_t evicted_bytes = 0;
};

Outcome Run(const Trace& trace, EvictionPolicy policy, size_t pool_bytes) {
  StoreOptions options;
  options.max_pool_bytes = pool_bytes;
  options.segment_tokens = 512;
  options.tail_tokens = 512;
  options.retain = true;
  options.max_retained_share = 1;
  options.eviction_policy = policy;
  options.threads = 1;
  auto store = *Store::Create(options);
  CacheSpec spec;
  spec.name = spec.model_fingerprint = kTenant;
  spec.capacity_bytes = pool_bytes;
  spec.groups.push_back({.kind = LayerKind::kSelected,
                         .layers = {0},
                         .kv_heads = 1,
                         .query_heads = 1,
                         .key_dim = kDim,
                         .value_dim = kDim,
                         .dtype = kernels::DType::kF16});
  const uint64_t cache_id = store->OpenCache(kTenant, spec)->cache_id;
  std::mt19937_64 answers;
  for (size_t i = 0; i < trace.requests().size(); ++i) {
    const Request& request = trace.requests()[i];
    const auto made = store->CreateSequence(
        kTenant, cache_id,
        {.session = "study", .token_ids = request.prompt, .extra_key = {}, .live_index = {}});
    PQC_CHECK(made.ok());
    const auto prompt_tokens = static_cast<uint32_t>(request.prompt.size());
    const auto missing = prompt_tokens - static_cast<uint32_t>(made->token_count);
    if (missing > 0) Add(*store, made->sequence_id, made->token_count, missing, false);
    answers.seed(i);
    Tokens answer(request.answer_tokens);
    for (uint32_t& token : answer) token = static_cast<uint32_t>(answers() % 100'000);
    PQC_CHECK(store->NameTokens(kTenant, made->sequence_id, prompt_tokens, answer).ok());
    Add(*store, made->sequence_id, prompt_tokens, request.answer_tokens, true);
    PQC_CHECK(store->DropSequence(kTenant, made->sequence_id).ok());
  }
  const StoreStats stats = store->Stats(kAllTenants);
  return {static_cast<double>(stats.matched_tokens) / static_cast<double>(stats.prompt_tokens),
          stats.evicted_bytes};
}

void Study(const char* name, uint64_t seed, const Trace& trace) {
  uint64_t tokens = 0, longest = 0;
  for (const Request& request : trace.requests()) {
    tokens += request.prompt.size();
    longest = std::max(longest, request.prompt.size() + request.answer_tokens);
  }
  std::printf("%s, seed %llu: %zu requests, %.1f M prompt tokens\n", name,
              static_cast<unsigned long long>(seed), trace.requests().size(),
              static_cast<double>(tokens) / 1e6);
  std::printf("%12s %10s %10s %16s %16s\n", "pool tokens", "lru", "reuse", "lru evicted",
              "reuse evicted");
  for (const size_t pool_tokens :
       {64u << 10, 128u << 10, 256u << 10, 512u << 10, 1024u << 10, 4096u << 10}) {
    if (pool_tokens < longest) continue;
    const Outcome lru = Run(trace, EvictionPolicy::kLru, pool_tokens * kTokenBytes);
    const Outcome reuse = Run(trace, EvictionPolicy::kReuse, pool_tokens * kTokenBytes);
    std::printf("%12zu %10.3f %10.3f %12.1f MiB %12.1f MiB\n", pool_tokens, lru.hit_rate,
                reuse.hit_rate, static_cast<double>(lru.evicted_bytes) / (1 << 20),
                static_cast<double>(reuse.evicted_bytes) / (1 << 20));
  }
}

int Main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  Study("mixed", seed, Trace::Mixed(seed));
  Study("agents", seed, Trace::Agents(seed));
  return 0;
}

}  // namespace
}  // namespace pqcached::kvstore

int main(int argc, char** argv) { return pqcached::kvstore::Main(argc, argv); }
