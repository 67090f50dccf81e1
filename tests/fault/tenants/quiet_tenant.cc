#include "quiet_tenant.h"

#include <algorithm>
#include <cmath>
#include <thread>

namespace pqcached::testing {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kPromptTokens = 8192, kOutputTokens = 1024;
constexpr uint32_t kLayers = 2;
constexpr uint64_t kSink = 16, kWindow = 64;
constexpr std::chrono::milliseconds kPeriod(5);  // of a token
constexpr uint64_t kFewestTokens = 20;

}  // namespace

double P99(std::vector<double> samples) {
  const auto rank =
      static_cast<ptrdiff_t>(std::ceil(0.99 * static_cast<double>(samples.size())) - 1);
  std::nth_element(samples.begin(), samples.begin() + rank, samples.end());
  return samples[static_cast<size_t>(rank)];
}

QuietTenant::QuietTenant(const std::string& endpoint, pqc_path_choice path)
    : layer_(kPromptTokens + kOutputTokens, 1),
      client_(Must(Client::Open(
          {.endpoint = endpoint, .tenant = "quiet", .timeout_ms = kTimeoutMs, .path = path}))),
      cache_(Must(client_.OpenCache(SpecOf("cache", {0, 1})))),
      sequence_(FillIndexed(cache_, layer_, kPromptTokens, kLayers, kSink)) {}

template <class Call>
void QuietTenant::Timed(std::vector<double>& milliseconds, const Call& call) {
  const auto counted = stopwatch_->Now();
  const steady_clock::time_point begin = steady_clock::now();
  const Status status = call();
  const steady_clock::duration elapsed = steady_clock::now() - begin;
  milliseconds.push_back(std::chrono::duration<double, std::milli>(elapsed).count());
  ++calls_;
  if (!status.ok()) failures_.push_back(status.ToString());
  const auto allowed = std::chrono::milliseconds(kTimeoutMs) + std::chrono::seconds(1);
  if (stopwatch_->Now() - counted > allowed) ++calls_past_deadline_;
}

void QuietTenant::Decode(std::chrono::milliseconds duration, Latencies& latencies) {
  MustBeOk(sequence_.Truncate(kPromptTokens));
  const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.1};
  steady_clock::time_point next = steady_clock::now();
  const steady_clock::time_point end = next + duration;
  const uint64_t most = kPromptTokens + kOutputTokens;
  for (uint64_t token = kPromptTokens; token < most; ++token) {
    if (steady_clock::now() >= end && token - kPromptTokens >= kFewestTokens) break;
    const std::vector<LayerRows> rows = RowsOf(layer_, token, token + 1, kLayers);
    Timed(latencies.append, [&] { return sequence_.Append(token, rows).status(); });
    const Query query = {.layer = static_cast<uint32_t>(token) % kLayers,
                         .query_position = token,
                         .queries = layer_.queries()};
    Timed(latencies.top_k, [&] { return sequence_.TopK(query, selection).status(); });
    // The next token is due one period after this one, or now when this one took longer.
    next = std::max(next + kPeriod, steady_clock::now());
    std::this_thread::sleep_until(next);
  }
}

}  // namespace pqcached::testing
