// Segment images to and from files in memory, through the store's calls, beside plain copies of the
// same bytes to and from such files; and how many inputs the reader of images withstands.
//
// Both sides use all cores, files on /dev/shm that are new, and memory whose pages are there.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kvstore/store.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {
namespace {

namespace fs = std::filesystem;
using kvstore::Store;

constexpr char kTenant[] = "bench";
constexpr uint32_t kTokens = 16384, kLayers = 4, kHeads = 8, kDim = 128;
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr char kFuzzRuns[] = "1000000";

// A folder on /dev/shm, removed with the object.
class MemoryFolder {
 public:
  MemoryFolder() {
    std::string path = "/dev/shm/pqcached-bench-XXXXXX";
    Require(mkdtemp(path.data()) != nullptr, "a folder on /dev/shm");
    path_ = path;
  }
  ~MemoryFolder() { fs::remove_all(path_); }
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct World {
  std::unique_ptr<Store> store;
  uint64_t cache_id = 0;
  uint64_t sequence_id = 0;
};

// A sequence with an index, closed segments and an open one.
World MakeWorld(uint32_t subspaces, uint32_t bits) {
  World world;
  kvstore::StoreOptions options;
  options.max_pool_bytes = size_t{1} << 30;
  auto store = Store::Create(options);
  Require(store.ok(), "a store");
  world.store = *std::move(store);
  const kvstore::IndexDescriptor index = {
      .kind = kvstore::IndexKind::kPq, .subspace_count = subspaces, .bits = bits};
  kvstore::LayerGroup group{.layers = {},
                            .kv_heads = kHeads,
                            .query_heads = 4 * kHeads,
                            .key_dim = kDim,
                            .value_dim = kDim};
  for (uint32_t layer = 0; layer < kLayers; ++layer) group.layers.push_back(layer);
  const auto cache = world.store->OpenCache(kTenant, {.name = "bench",
                                                      .model_fingerprint = "bench",
                                                      .groups = {group},
                                                      .capacity_bytes = size_t{1} << 30,
                                                      .default_index = index});
  Require(cache.ok(), "a cache");
  world.cache_id = cache->cache_id;
  const auto made = world.store->CreateSequence(kTenant, world.cache_id, {.session = "bench"});
  Require(made.ok(), "a sequence");
  world.sequence_id = made->sequence_id;
  std::vector<uint16_t> elements(size_t{kTokens} * kHeads * kDim);
  uint32_t random = 1;
  for (uint16_t& element : elements) {
    random = random * 1664525u + 1013904223u;
    element = static_cast<uint16_t>(0x3000u | (random >> 16 & 0x8bffu));  // numbers below 1
  }
  const kvstore::TensorView rows{.data = reinterpret_cast<const std::byte*>(elements.data()),
                                 .data_bytes = elements.size() * sizeof(uint16_t),
                                 .dtype = kernels::DType::kF16,
                                 .shape = {kTokens, kHeads, kDim},
                                 .strides = {}};
  auto ingest = world.store->BeginIngest(kTenant, world.sequence_id);
  Require(ingest.ok(), "an ingest");
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    Require((*ingest)->Write(0, {.layer = layer, .keys = rows, .values = rows}).ok(), "rows");
  }
  Require((*ingest)->Commit().ok(), "the rows' commit");
  const absl::Status built = world.store->BuildIndex(
      kTenant, world.sequence_id, {.index = index, .iterations = 1, .train_tokens = 1024}, {});
  Require(built.ok(), "an index");
  return world;
}

double TimeOf(const std::function<void()>& work) {
  return TimeOnThreads(1, [&](int) { work(); });
}

// Moves the bytes piece by piece, a share of them on each thread.
double TimeCopy(const char* path, int flags, std::vector<std::byte>& memory,
                ssize_t (*move)(int, std::byte*, size_t, off_t)) {
  const int file = open(path, flags | O_CLOEXEC, 0600);
  Require(file >= 0, "a file on /dev/shm");
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const double seconds = TimeOnThreads(threads, [&](int thread) {
    const size_t stride = static_cast<size_t>(threads) * kPieceBytes;
    for (size_t at = static_cast<size_t>(thread) * kPieceBytes; at < memory.size(); at += stride) {
      const size_t count = std::min(kPieceBytes, memory.size() - at);
      Require(move(file, memory.data() + at, count, static_cast<off_t>(at)) ==
                  static_cast<ssize_t>(count),
              "a copy");
    }
  });
  close(file);
  return seconds;
}

double TimeWrite(const char* path, std::vector<std::byte>& memory) {
  return TimeCopy(path, O_WRONLY | O_CREAT | O_EXCL, memory,
                  [](int file, std::byte* bytes, size_t count, off_t at) {
                    return pwrite(file, bytes, count, at);
                  });
}

double TimeRead(const char* path, std::vector<std::byte>& memory) {
  return TimeCopy(path, O_RDONLY, memory, [](int file, std::byte* bytes, size_t count, off_t at) {
    return pread(file, bytes, count, at);
  });
}

struct Ratios {
  std::vector<double> exports, imports;
};

Ratios MeasureImages(const World& world, int rounds) {
  const MemoryFolder folder;
  const kvstore::ImagePlace place{.directory = folder.path(), .name = "image"};
  const std::string copy = folder.path() + "/copy";
  std::vector<std::byte> memory;
  Ratios ratios;
  for (int round = -1; round < rounds; ++round) {  // the first one warms up
    uint64_t bytes = 0;
    const auto export_images = [&] {
      const auto exported = world.store->ExportSequence(kTenant, world.sequence_id, place);
      Require(exported.ok(), "an export");
      bytes = exported->bytes;
    };
    uint64_t imported_id = 0;
    const auto import_images = [&] {
      const auto imported = world.store->ImportSequence(kTenant, world.cache_id, place);
      Require(imported.ok() && imported->token_count == kTokens, "an import");
      imported_id = imported->sequence_id;
    };
    double written = 0, read = 0;
    const bool copies_first = round % 2 == 0;
    const auto copy_all = [&] {
      written = TimeWrite(copy.c_str(), memory);
      read = TimeRead(copy.c_str(), memory);
      fs::remove(copy);
    };
    if (copies_first) copy_all();
    const double exported = TimeOf(export_images), imported = TimeOf(import_images);
    fs::remove_all(folder.path() + "/image");
    Require(world.store->EvictSequence(kTenant, imported_id).ok(), "the end of an import");
    memory.resize(bytes);
    if (!copies_first) copy_all();
    if (round < 0) continue;
    ratios.exports.push_back(written / exported);
    ratios.imports.push_back(read / imported);
  }
  std::printf("%.1f MiB each\n", static_cast<double>(memory.size()) / (1 << 20));
  return ratios;
}

void ReportImages(Report& report) {
  const Ratios usual = MeasureImages(MakeWorld(4, 8), report.rounds());
  const Ratios cells = MeasureImages(MakeWorld(2, 6), report.rounds());
  report.Add({.name = "image_export_vs_copy",
              .unit = "x",
              .against = "a plain copy of the same bytes to a file in memory, on as many threads; "
                         "index pq m=4 b=8",
              .better = Better::kHigher,
              .goal = 0.7},
             StatOf(usual.exports));
  report.Add({.name = "image_import_vs_copy",
              .unit = "x",
              .against = "a plain copy of the same bytes from a file in memory, on as many "
                         "threads; index pq m=4 b=8",
              .better = Better::kHigher,
              .goal = 0.7},
             StatOf(usual.imports));
  report.Add({.name = "image_import_vs_copy_m2b6",
              .unit = "x",
              .against = "likewise; index pq m=2 b=6, whose codes are not taken from the file but "
                         "made again: searches use them as addresses",
              .better = Better::kHigher,
              .goal = std::nullopt},
             StatOf(cells.imports));
}

// Returns whether the program ended well.
bool RunFuzzer() {
  const pid_t child = fork();
  if (child == 0) {
    execl(PQCACHED_IMAGE_FUZZER, PQCACHED_IMAGE_FUZZER, "--random", kFuzzRuns,
          PQCACHED_IMAGE_CORPUS, nullptr);
    _exit(127);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace
}  // namespace pqcached::bench

int main(int argc, char** argv) {
  using namespace pqcached::bench;  // NOLINT: a program
  Report report(argc, argv, /*default_rounds=*/21, "travel");
  ReportImages(report);
  const double runs = RunFuzzer() ? std::strtod(kFuzzRuns, nullptr) : 0;
  report.Add(
      {.name = "image_fuzz_executions",
       .unit = "inputs",
       .against = "none crashes the reader of images, over-allocates, or is taken with a bad "
                  "checksum; else 0",
       .better = Better::kHigher,
       .goal = 1e6},
      {.median = runs, .spread = 0, .samples = 1});
  return report.Finish();
}
