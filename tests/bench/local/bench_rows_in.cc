// Rows on their way in: through staging beside a plain non-temporal copy, by gRPC beside a raw unix
// socket; and what two sequences with a common prefix hold.
#include <immintrin.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/huge_buffer.h"
#include "tests/bench/local/sidecar.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTokens = 32 << 10;  // 128 MiB of rows

void NonTemporalCopy(const std::byte* from, std::byte* to, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(__m128i)) {
    const __m128i piece = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), piece);
  }
  _mm_sfence();
}

// Sends the bytes through a pair of unix stream sockets, `chunk` a call, to a thread that receives
// them into memory.
void StreamThroughSocket(const std::byte* from, size_t bytes, size_t chunk, std::byte* to) {
  int pair[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
  std::thread receiver([&] {
    for (size_t got = 0; got < bytes;) {
      const ssize_t count = read(pair[1], to + got, std::min(chunk, bytes - got));
      Require(count > 0, "read from a socket");
      got += static_cast<size_t>(count);
    }
  });
  for (size_t sent = 0; sent < bytes;) {
    const ssize_t count = write(pair[0], from + sent, std::min(chunk, bytes - sent));
    Require(count > 0, "write to a socket");
    sent += static_cast<size_t>(count);
  }
  receiver.join();
  close(pair[0]);
  close(pair[1]);
}

// Sequences to be filled one by one: making and dropping them is not what is measured.
class EmptySequences {
 public:
  EmptySequences(pqc_cache* cache, int count) : sequences_(static_cast<size_t>(count)) {
    for (pqc_sequence*& sequence : sequences_) {
      Must(pqc_sequence_create(cache, &sequence), "pqc_sequence_create");
    }
  }
  ~EmptySequences() {
    for (pqc_sequence* sequence : sequences_)
      Must(pqc_sequence_drop(sequence), "pqc_sequence_drop");
  }
  EmptySequences(const EmptySequences&) = delete;
  EmptySequences& operator=(const EmptySequences&) = delete;

  void FillNext(const Rows& rows) { Fill(sequences_.at(next_++), rows, rows.tokens()); }

 private:
  std::vector<pqc_sequence*> sequences_;
  size_t next_ = 0;
};

void IngestFigures(const Sidecar& sidecar, Report& report) {
  pqc_client* local = sidecar.OpenClient(2);
  pqc_client* remote = sidecar.OpenClient(2, PQC_PATH_ONLY_REMOTE);
  const Rows rows(kTokens);
  const int fills = report.rounds() + 1;  // one to warm up
  const uint64_t capacity_bytes = static_cast<uint64_t>(2 * fills) * rows.bytes();
  pqc_cache* local_cache = OpenCache(local, "in", capacity_bytes);
  pqc_cache* remote_cache = OpenCache(remote, "in", capacity_bytes);
  const HugeBuffer target(rows.bytes());
  sidecar.WaitIdle();
  const size_t half = rows.bytes() / 2;

  auto local_sequences = std::make_unique<EmptySequences>(local_cache, fills);
  auto remote_sequences = std::make_unique<EmptySequences>(remote_cache, fills);
  Rounds rounds(1);
  const double units = static_cast<double>(rows.bytes());
  const size_t copy = rounds.Add("non-temporal copy, 1 thread", units, [&](int, int) {
    NonTemporalCopy(rows.keys(), target.data(), half);
    NonTemporalCopy(rows.values(), target.data() + half, half);
  });
  const size_t staged =
      rounds.Add("ingest by staging", units, [&](int, int) { local_sequences->FillNext(rows); });
  const size_t inline_rows =
      rounds.Add("ingest by gRPC", units, [&](int, int) { remote_sequences->FillNext(rows); });
  std::vector<size_t> sockets;
  for (const size_t chunk : {size_t{64} << 10, size_t{256} << 10, size_t{1} << 20}) {
    sockets.push_back(rounds.Add("unix socket, chunks of " + std::to_string(chunk >> 10) + " KiB",
                                 units, [&, chunk](int, int) {
                                   StreamThroughSocket(rows.keys(), half, chunk, target.data());
                                   StreamThroughSocket(rows.values(), half, chunk, target.data());
                                 }));
  }
  rounds.Run(report.rounds());
  size_t best = sockets.front();
  for (const size_t entry : sockets) {
    if (rounds.Seconds(entry).median < rounds.Seconds(best).median) best = entry;
  }
  report.Add({"ingest_source_to_selectable_vs_ntcopy", "x", "non-temporal copy, 1 thread",
              Better::kHigher, 0.5},
             rounds.Speedup(staged, copy));
  report.Add(
      {"ingest_grpc_vs_socket", "x", "raw unix-socket stream, best chunk", Better::kHigher, 0.35},
      rounds.Speedup(inline_rows, best));

  local_sequences.reset();
  remote_sequences.reset();
  local_sequences = std::make_unique<EmptySequences>(local_cache, 8);
  const double before = sidecar.CpuSeconds();
  for (int i = 0; i < 8; ++i) local_sequences->FillNext(rows);
  const double gib = 8.0 * units / static_cast<double>(uint64_t{1} << 30);
  report.Add(
      {"ingest_cpu_s_per_gib", "s", "sidecar alone, by staging", Better::kLower, std::nullopt},
      {(sidecar.CpuSeconds() - before) / gib, 0, 8});
  local_sequences.reset();
  for (pqc_cache* cache : {local_cache, remote_cache}) pqc_cache_close(cache);
  for (pqc_client* client : {local, remote}) pqc_client_close(client);
}

// Of the one cache of this tenant.
double UsedBytes(pqc_client* client) {
  char* answer = nullptr;
  Must(pqc_admin_json(client, "ListCaches", "{}", &answer), "ListCaches");
  const std::string text = answer;
  pqc_free(answer);
  double used = 0;
  for (size_t at = text.find("\"used_bytes\""); at != std::string::npos;
       at = text.find("\"used_bytes\"", at + 1)) {
    const size_t digits = text.find_first_of("0123456789", at);
    used += std::strtod(text.c_str() + digits, nullptr);
  }
  return used;
}

void SharedPrefix(Report& report) {
  const Sidecar sidecar;
  pqc_client* client = sidecar.OpenClient(2);
  pqc_cache* cache = OpenCache(client, "shared", uint64_t{1} << 30);
  const Rows rows(16 << 10);
  std::vector<uint32_t> ids(64 << 10);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i * 7);
  pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
  options.token_ids = ids.data();
  options.token_id_count = ids.size();
  pqc_sequence* first = nullptr;
  Must(pqc_sequence_create_with(cache, &options, &first, nullptr), "pqc_sequence_create_with");
  Fill(first, rows, ids.size());
  const pqc_build_options build = QuickBuild();
  Must(pqc_build_index(first, &build), "pqc_build_index");
  const double alone = UsedBytes(client);
  pqc_sequence* second = nullptr;
  uint64_t shared = 0;
  Must(pqc_sequence_create_with(cache, &options, &second, &shared), "pqc_sequence_create_with");
  Require(shared == ids.size(), "the second sequence shares the whole prefix");
  report.Add({"shared_prefix_bytes_ratio", "x", "one sequence", Better::kLower, 1.02},
             {UsedBytes(client) / alone, 0, 1});
  pqc_sequence_drop(second);
  pqc_sequence_drop(first);
  pqc_cache_close(cache);
  pqc_client_close(client);
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;
  Report report(argc, argv, 9, "local");
  {
    const Sidecar sidecar;
    IngestFigures(sidecar, report);
  }
  SharedPrefix(report);
  return report.Finish();
}
