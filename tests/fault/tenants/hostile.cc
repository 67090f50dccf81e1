#include "hostile.h"

#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/client/layer.h"

namespace pqcached::testing {
namespace {

constexpr uint32_t kTimeoutMs = 60000;
constexpr uint64_t kTokens = 16384;  // of one message
constexpr uint64_t kBuildTokens = 2 * kTokens;
constexpr uint64_t kCacheBytes = uint64_t{128} << 20;
// By turns: more than any machine has, and what a pool of 1 GiB can hold a few times.
constexpr uint64_t kHugeBytes = uint64_t{1} << 40;
constexpr uint64_t kLargeBytes = uint64_t{256} << 20;

CacheSpec SpecOfBytes(const std::string& name, uint64_t capacity_bytes) {
  CacheSpec spec = SpecOf(name, {0, 1});
  spec.capacity_bytes = capacity_bytes;
  return spec;
}

// Rows for all threads.
const Layer& Rows() {
  static const Layer rows(kBuildTokens, 1);
  return rows;
}

// The numbers of a field in protobuf's JSON, in which 64-bit ones are quoted.
std::vector<std::string> QuotedNumbersOf(std::string_view json, const std::string& field) {
  const std::string before = '"' + field + "\":\"";
  std::vector<std::string> numbers;
  for (size_t at = json.find(before); at != json.npos; at = json.find(before, at)) {
    at += before.size();
    numbers.emplace_back(json.substr(at, json.find('"', at) - at));
  }
  return numbers;
}

}  // namespace

bool Tally::Note(const Status& status) {
  if (status.ok()) {
    ++taken_;
    return true;
  }
  if (status.code() == PQC_RESOURCE_EXHAUSTED || status.code() == PQC_PERMISSION_DENIED) {
    ++refused_;
  } else if (failed_++ == 0) {
    std::fprintf(stderr, "a hostile tenant's call failed: %s\n", status.ToString().c_str());
  }
  return false;
}

void HostileThread::Run(Hostility hostility) const {
  switch (hostility) {
    case Hostility::kSessions:
      return OpenSessions();
    case Hostility::kIngest:
      return IngestRows();
    case Hostility::kBuilds:
      return BuildIndexes();
    case Hostility::kSelfTest:
      return CallSelfTest();
    case Hostility::kOpenCache:
      return OpenCaches();
  }
}

Result<Client> HostileThread::Open() const {
  return Client::Open({.endpoint = endpoint,
                       .tenant = tenant,
                       .timeout_ms = kTimeoutMs,
                       .path = number % 2 == 0 ? PQC_PATH_ANY : PQC_PATH_ONLY_REMOTE});
}

void HostileThread::OpenSessions() const {
  for (;;) {
    std::vector<Client> clients;
    for (bool is_open = true; is_open;) {
      Result<Client> client = Open();
      is_open = tally.Note(client.status());
      if (is_open) clients.push_back(std::move(*client));
    }
  }
}

void HostileThread::IngestRows() const {
  Client client = Must(Open());
  Cache cache = Must(client.OpenCache(SpecOfBytes("flood", kCacheBytes)));
  for (;;) {
    Sequence sequence = Must(cache.CreateSequence());
    bool has_room = true;
    for (uint64_t position = 0; has_room; position += kTokens) {
      for (uint32_t layer = 0; has_room && layer < 2; ++layer) {
        has_room = tally.Note(
            sequence.Ingest(layer, position, Rows().keys(0, kTokens), Rows().values(0, kTokens)));
      }
    }
  }
}

void HostileThread::BuildIndexes() const {
  Client client = Must(Open());
  Cache cache =
      Must(client.OpenCache(SpecOfBytes("builds-" + std::to_string(number), kCacheBytes)));
  for (uint64_t seed = 1;; ++seed) {
    Sequence sequence = Must(cache.CreateSequence());
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint64_t begin = 0; begin < kBuildTokens; begin += kTokens) {
        MustBeOk(sequence.Ingest(layer, begin, Rows().keys(begin, begin + kTokens),
                                 Rows().values(begin, begin + kTokens)));
      }
    }
    tally.Note(sequence.BuildIndex({.seed = seed}));
  }
}

void HostileThread::CallSelfTest() const {
  Client client = Must(Open());
  for (;;) tally.Note(client.AdminJson("SelfTest").status());
}

void HostileThread::OpenCaches() const {
  Client client = Must(Open());
  for (uint64_t round = 0;; ++round) {
    const std::string name = "cache-" + std::to_string(number) + "-" + std::to_string(round) + "-";
    for (uint32_t i = 0;; ++i) {
      tally.Note(client.OpenCache(SpecOfBytes(name + "huge", kHugeBytes)).status());
      if (!tally.Note(
              client.OpenCache(SpecOfBytes(name + std::to_string(i), kLargeBytes)).status())) {
        break;
      }
    }
    // Those of the other threads are among them, which therefore fail to drop some.
    const std::string caches = Must(client.AdminJson("ListCaches"));
    for (const std::string& id : QuotedNumbersOf(caches, "cache_id")) {
      const Status dropped =
          client.AdminJson("DropCache", "{\"cache_id\":\"" + id + "\"}").status();
      if (dropped.code() != PQC_NOT_FOUND) tally.Note(dropped);
    }
  }
}

}  // namespace pqcached::testing
