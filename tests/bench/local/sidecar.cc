#include "tests/bench/local/sidecar.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <thread>

#include "kernels/base/dtype.h"
#include "tests/bench/report.h"

namespace pqcached::bench {
namespace {

constexpr uint32_t kTopics = 256;

// The directions that keys and queries share, [kTopics, dim].
const std::vector<float>& Topics() {
  static const std::vector<float> topics = [] {
    std::mt19937 random(11);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> numbers(size_t{kTopics} * kDim);
    for (float& number : numbers) number = normal(random);
    return numbers;
  }();
  return topics;
}

std::vector<std::string> Command(const std::string& endpoint, const std::string& log,
                                 const std::vector<std::string>& flags) {
  std::vector<std::string> command = {
      PQCACHED_DAEMON,      "--listen", endpoint, "--max-pool-bytes", "12gib", "--log-file", log,
      "--shutdown-timeout", "2s"};
  command.insert(command.end(), flags.begin(), flags.end());
  const std::string reserve = "--idle-reserve-bytes";
  if (std::find(flags.begin(), flags.end(), reserve) == flags.end()) {
    command.insert(command.end(), {reserve, "12gib"});
  }
  return command;
}

pqc_tensor TensorOf(const void* data, uint64_t* shape) {
  pqc_tensor tensor = PQC_INIT(pqc_tensor);
  tensor.ptr = const_cast<void*>(data);
  tensor.dtype = PQC_BF16;
  tensor.ndim = 3;
  tensor.shape = shape;
  return tensor;
}

double CpuSecondsOf(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string field;
  double ticks = 0;
  for (int i = 1; i <= 15 && file >> field; ++i) {
    if (i >= 14) ticks += std::strtod(field.c_str(), nullptr);  // utime, stime
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

void Must(pqc_status status, const char* what) {
  if (status == PQC_OK) return;
  std::fprintf(stderr, "error: %s: %s: %s\n", what, pqc_status_name(status), pqc_last_error());
  std::exit(1);
}

Sidecar::Sidecar(const std::vector<std::string>& flags)
    : endpoint_("unix://" + folder_.File("s")),
      process_(Command(endpoint_, folder_.File("log"), flags)) {}

pqc_client* Sidecar::OpenClient(uint32_t thread_count, pqc_path_choice path) const {
  pqc_client_options options = PQC_INIT(pqc_client_options);
  options.endpoint = endpoint_.c_str();
  options.timeout_ms = 60000;
  options.thread_count = thread_count;
  options.path = path;
#ifdef PQCACHED_RPC_LIBRARY
  options.rpc_library_path = PQCACHED_RPC_LIBRARY;
#endif
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (;;) {
    pqc_client* client = nullptr;
    const pqc_status status = pqc_client_open(&options, &client);
    if (status == PQC_OK) return client;
    // Until it listens.
    if (status != PQC_UNAVAILABLE || std::chrono::steady_clock::now() > deadline) {
      Must(status, "pqc_client_open");
    }
    poll(nullptr, 0, 10);
  }
}

double Sidecar::CpuSeconds() const {
  const std::string pid = std::to_string(process_.pid());
  double seconds = CpuSecondsOf(pid);
  std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
  for (std::string worker; workers >> worker;) seconds += CpuSecondsOf(worker);
  return seconds;
}

pid_t Sidecar::WorkerPid() const {
  const std::string pid = std::to_string(process_.pid());
  std::ifstream workers("/proc/" + pid + "/task/" + pid + "/children");
  pid_t worker = 0;
  Require(static_cast<bool>(workers >> worker), "the sidecar has a worker");
  return worker;
}

StoppedWorker::StoppedWorker(const Sidecar& sidecar) : worker_(sidecar.WorkerPid()) {
  kill(worker_, SIGSTOP);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!testing::AllThreadsAreStopped(worker_)) {
    Require(std::chrono::steady_clock::now() < deadline, "the worker stops");
    std::this_thread::yield();
  }
}

StoppedWorker::~StoppedWorker() { kill(worker_, SIGCONT); }

void Sidecar::WaitIdle() const {
  constexpr std::chrono::milliseconds kPollInterval(200);
  constexpr int kMostLooks = 300;
  constexpr double kIdleSeconds = 0.015;  // of a look
  double before = CpuSeconds();
  for (int look = 0; look < kMostLooks; ++look) {
    std::this_thread::sleep_for(kPollInterval);
    const double now = CpuSeconds();
    if (now - before < kIdleSeconds) return;
    before = now;
  }
  Require(false, "the sidecar comes to rest");
}

pqc_cache* OpenCache(pqc_client* client, const char* name, uint64_t capacity_bytes,
                     uint32_t layers) {
  std::vector<uint32_t> numbers(layers);
  for (uint32_t i = 0; i < layers; ++i) numbers[i] = i;
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = numbers.data();
  group.layer_count = layers;
  group.kv_heads = kKvHeads;
  group.query_heads = kQueryHeads;
  group.key_dim = group.value_dim = kDim;
  group.dtype = PQC_BF16;
  return OpenCache(client, name, capacity_bytes, group);
}

pqc_cache* OpenCache(pqc_client* client, const char* name, uint64_t capacity_bytes,
                     const pqc_layer_group& group) {
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  spec.name = name;
  spec.model_fingerprint = "bench";
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = capacity_bytes;
  pqc_cache* cache = nullptr;
  Must(pqc_cache_open(client, &spec, &cache), "pqc_cache_open");
  return cache;
}

Rows::Rows(uint32_t tokens)
    : tokens_(tokens),
      keys_(size_t{tokens} * kTokenBytes / 2),
      values_(size_t{tokens} * kTokenBytes / 2) {
  std::mt19937 random(12);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> noise(size_t{1} << 20);
  for (float& number : noise) number = normal(random);
  std::vector<float> key(kDim);
  for (size_t i = 0; i < size_t{tokens} * kKvHeads; ++i) {
    const float* topic = Topics().data() + size_t{random() % kTopics} * kDim;
    const float* part = noise.data() + random() % (noise.size() - kDim);
    for (uint32_t d = 0; d < kDim; ++d) key[d] = topic[d] + 0.5f * part[d];
    kernels::ConvertElements(kernels::DType::kF32, reinterpret_cast<const std::byte*>(key.data()),
                             kernels::DType::kBf16, keys_.data() + i * kRowBytes / 2, kDim);
    const float* value = noise.data() + random() % (noise.size() - kDim);
    kernels::ConvertElements(kernels::DType::kF32, reinterpret_cast<const std::byte*>(value),
                             kernels::DType::kBf16, values_.data() + i * kRowBytes / 2, kDim);
  }
}

void Rows::View(uint32_t begin, uint32_t count, Pair* pair) const {
  const size_t offset = size_t{begin} * kTokenBytes / 2;
  pair->shape[0] = count;
  pair->shape[1] = kKvHeads;
  pair->shape[2] = kDim;
  pair->keys = TensorOf(keys_.data() + offset, pair->shape);
  pair->values = TensorOf(values_.data() + offset, pair->shape);
}

void Fill(pqc_sequence* sequence, const Rows& rows, uint64_t tokens, uint32_t layers) {
  for (uint64_t first = 0; first < tokens; first += rows.tokens()) {
    Rows::Pair pair;
    rows.View(0, static_cast<uint32_t>(std::min<uint64_t>(rows.tokens(), tokens - first)), &pair);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      Must(pqc_ingest(sequence, layer, first, &pair.keys, &pair.values), "pqc_ingest");
    }
  }
}

pqc_build_options QuickBuild() {
  pqc_build_options build = PQC_INIT(pqc_build_options);
  build.index.kind = PQC_INDEX_PQ;
  build.index.subspaces = 2;
  build.index.bits = 6;
  build.iterations = 2;
  build.train_tokens = 4096;
  build.sink_tokens = kSinkTokens;
  return build;
}

std::vector<float> Queries(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> queries(size_t{kQueryHeads} * kDim);
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const float* topic = Topics().data() + size_t{random() % kTopics} * kDim;
    for (uint32_t d = 0; d < kDim; ++d) {
      queries[size_t{head} * kDim + d] = topic[d] + 0.5f * normal(random);
    }
  }
  return queries;
}

pqc_selection Select(double ratio) {
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.index.kind = PQC_INDEX_PQ;
  selection.index.subspaces = 2;
  selection.index.bits = 6;
  selection.sink_tokens = kSinkTokens;
  selection.window_tokens = kWindowTokens;
  selection.budget = PQC_BUDGET_RATIO;
  selection.ratio = ratio;
  return selection;
}

pqc_selection SelectCount(uint64_t tokens) {
  pqc_selection selection = Select(1);
  selection.budget = PQC_BUDGET_COUNT;
  selection.token_count = tokens;
  return selection;
}

}  // namespace pqcached::bench
