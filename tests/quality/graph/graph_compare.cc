// Compares the graph index with exact search, IVF and HNSW on queries and keys of a model.
//
// graph_compare QUERIES KEYS QUERY_HEADS KV_HEADS TOKENS DIM CONTEXT [HEAD_STRIDE]
//
// QUERIES and KEYS are files of float32, [heads, TOKENS, DIM]. The keys of [kSinks, CONTEXT -
// kWindow) are indexed; queries before CONTEXT may be samples, and those from CONTEXT on never are.
// Prints one JSON object per line: {method, param, head, queries, recall100, recall10, scanned} and
// {build, threads, head, seconds}. HNSW is hnswlib's, of the include path.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hnswlib/hnswlib.h"
#include "kernels/graph/build.h"
#include "kernels/graph/search.h"
#include "kernels/select/exact/exact_score.h"
#include "kernels/train/kmeans.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kSinks = 32;
constexpr uint32_t kWindow = 608;
constexpr uint32_t kTestStride = 8;
constexpr uint32_t kTop = 100;
constexpr uint32_t kFirst = 10;
constexpr uint32_t kHnswBeam = 200;  // hnswlib's ef_construction

struct Aligned {
  explicit Aligned(size_t bytes)
      : memory(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)), std::free),
        size(bytes) {}
  std::span<std::byte> span() const { return {memory.get(), size}; }
  std::unique_ptr<std::byte, decltype(&std::free)> memory;
  size_t size;
};

// One query head: its keys, samples and tests.
struct Head {
  uint32_t number = 0;
  uint32_t dim = 0;
  std::span<const float> keys;     // [count, dim]
  std::span<const float> queries;  // [tokens, dim]
  uint32_t context = 0;

  uint32_t count() const { return static_cast<uint32_t>(keys.size() / dim); }
  std::span<const float> Query(uint32_t token) const {
    return queries.subspan(size_t{token} * dim, dim);
  }
};

struct Found {
  std::vector<uint32_t> nodes;  // the best first
  uint32_t scanned = 0;
};

float Dot(const float* a, const float* b, uint32_t dim) {
  float sum = 0;
  for (uint32_t i = 0; i < dim; ++i) sum += a[i] * b[i];
  return sum;
}

std::vector<uint32_t> Best(const Head& head, std::span<const float> query,
                           std::vector<uint32_t> nodes, uint32_t k) {
  std::vector<float> scores(head.count());
  for (uint32_t node : nodes) {
    scores[node] = Dot(query.data(), &head.keys[size_t{node} * head.dim], head.dim);
  }
  k = std::min<uint32_t>(k, static_cast<uint32_t>(nodes.size()));
  std::partial_sort(nodes.begin(), nodes.begin() + k, nodes.end(),
                    [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  nodes.resize(k);
  return nodes;
}

// The queries of a measurement with their exact results.
struct Test {
  std::string name;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<uint32_t>> best;
};

Test MakeTest(const Head& head, std::string name, uint32_t first, uint32_t end) {
  Test test{.name = std::move(name), .tokens = {}, .best = {}};
  std::vector<uint32_t> all(head.count());
  std::iota(all.begin(), all.end(), 0);
  for (uint32_t token = first; token < end; token += kTestStride) {
    test.tokens.push_back(token);
    test.best.push_back(Best(head, head.Query(token), all, kTop));
  }
  return test;
}

using Search = std::function<Found(uint32_t token)>;

void Measure(const Head& head, const Test& test, const std::string& method, double param,
             const Search& search) {
  double recall100 = 0, recall10 = 0, scanned = 0;
  for (size_t i = 0; i < test.tokens.size(); ++i) {
    const Found found = search(test.tokens[i]);
    const std::set<uint32_t> nodes(found.nodes.begin(), found.nodes.end());
    uint32_t hits = 0;
    for (uint32_t j = 0; j < kTop; ++j) {
      hits += static_cast<uint32_t>(nodes.count(test.best[i][j]));
      if (j + 1 == kFirst) recall10 += hits / double{kFirst};
    }
    recall100 += hits / double{kTop};
    scanned += found.scanned;
  }
  const auto count = static_cast<double>(test.tokens.size());
  std::printf(
      "{\"method\": \"%s\", \"param\": %g, \"head\": %u, \"queries\": \"%s\", \"recall100\": %.5f, "
      "\"recall10\": %.5f, \"scanned\": %.6f}\n",
      method.c_str(), param, head.number, test.name.c_str(), recall100 / count, recall10 / count,
      scanned / count / head.count());
}

double Seconds(const std::function<void()>& work) {
  const auto started = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

void RunThreads(uint32_t threads, const std::function<void(uint32_t)>& work) {
  std::vector<std::thread> others;
  for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
}

void PrintBuild(const Head& head, const std::string& name, uint32_t threads, double seconds) {
  std::printf("{\"build\": \"%s\", \"threads\": %u, \"head\": %u, \"seconds\": %.5f}\n",
              name.c_str(), threads, head.number, seconds);
}

// The last `tail` queries before the context's end, and `strided` evenly spaced earlier ones.
std::vector<float> Samples(const Head& head, uint32_t tail, uint32_t strided) {
  std::vector<float> samples;
  const auto add = [&](uint32_t token) {
    const std::span<const float> query = head.Query(token);
    samples.insert(samples.end(), query.begin(), query.end());
  };
  const uint32_t earlier = head.context - tail;
  for (uint32_t i = 0; i < strided; ++i) {
    add(static_cast<uint32_t>(uint64_t{earlier} * i / strided));
  }
  for (uint32_t token = earlier; token < head.context; ++token) add(token);
  return samples;
}

class Graph {
 public:
  Graph(const Head& head, const std::vector<float>& samples, const GraphBuildOptions& options)
      : head_(head),
        args_{.size = {.key_count = head.count(),
                       .sample_count = static_cast<uint32_t>(samples.size() / head.dim),
                       .key_dim = head.dim,
                       .options = options},
              .dtype = DType::kF32,
              .row_stride_bytes = head.dim * sizeof(float),
              .rows = reinterpret_cast<const std::byte*>(head.keys.data()),
              .samples = samples},
        memory_(GraphBytes(GraphShapeOf(args_.size))),
        shared_(GraphBuildSharedBytes(args_.size)) {
    args_.graph = memory_.span();
  }

  void Build(uint32_t threads) {
    const GraphBuild build({}, args_, shared_.span());
    for (uint32_t step = 0; step < GraphBuild::kStepCount; ++step) {
      std::atomic<uint32_t> next = 0;
      const uint32_t tasks = build.TaskCount(step);
      RunThreads(std::min(threads, std::max(tasks, 1u)), [&](uint32_t) {
        const Aligned scratch(GraphBuildThreadBytes(args_.size));
        for (uint32_t task = next++; task < tasks; task = next++) {
          build.RunTask(step, task, scratch.span());
        }
      });
    }
    const char* wrong = CheckGraph(memory_.span(), GraphShapeOf(args_.size), &view_);
    if (wrong != nullptr) std::abort();
  }

  // Scores at most `limit` keys. Seeds take the place of all but a few entries.
  Found Find(uint32_t token, uint32_t limit, std::span<const uint32_t> seeds, uint32_t k) const {
    const uint32_t beam = std::max(kTop, limit);
    const Aligned scratch(GraphSearchScratchBytes(head_.count(), head_.dim, beam, k));
    std::vector<uint32_t> nodes(k);
    std::vector<float> scores(k);
    const GraphPart part{.graph = view_, .rows = args_.rows};
    const GraphSearchResult result =
        SearchGraph({}, {.parts = {&part, 1},
                         .dtype = DType::kF32,
                         .key_dim = head_.dim,
                         .row_stride_bytes = args_.row_stride_bytes,
                         .query = head_.Query(token),
                         .beam_size = beam,
                         .scan_limit = limit,
                         .seeds = seeds,
                         .entry_limit = seeds.empty() ? kMaxGraphEntries : 4,
                         .nodes = nodes,
                         .scores = scores,
                         .scratch = scratch.span()});
    nodes.resize(result.found_count);
    return {.nodes = std::move(nodes), .scanned = result.scanned_count};
  }

 private:
  const Head& head_;
  GraphBuildArgs args_;
  Aligned memory_;
  Aligned shared_;
  GraphView view_;
};

constexpr uint32_t kSeeds = 32;
constexpr double kShares[] = {0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4};

void MeasureGraph(const Head& head, const Test& test, const std::string& name, const Graph& graph) {
  for (const double share : kShares) {
    const auto limit = static_cast<uint32_t>(share * head.count());
    Measure(head, test, name, share,
            [&](uint32_t token) { return graph.Find(token, limit, {}, kTop); });
  }
}

// Each search starts with the best results of the search for the token before, which is itself
// started like this, from four tokens before on.
void MeasureSeeded(const Head& head, const Test& test, const std::string& name,
                   const Graph& graph) {
  for (const double share : kShares) {
    const auto limit = static_cast<uint32_t>(share * head.count());
    Measure(head, test, name, share, [&](uint32_t token) {
      std::vector<uint32_t> seeds;
      for (uint32_t back = 4; back > 0; --back) {
        seeds = graph.Find(token - back, limit, seeds, kTop).nodes;
        seeds.resize(std::min<size_t>(seeds.size(), kSeeds));
      }
      return graph.Find(token, limit, seeds, kTop);
    });
  }
}

class Ivf {
 public:
  Ivf(const Head& head, uint32_t lists)
      : head_(head), centroids_(size_t{lists} * head.dim), lists_(lists) {
    const KMeansProblem problem{.sample_type = DType::kF32,
                                .samples = reinterpret_cast<const std::byte*>(head.keys.data()),
                                .sample_count = head.count(),
                                .dim = head.dim,
                                .centroid_count = lists,
                                .centroids = centroids_};
    const Aligned scratch(KMeansStepScratchBytes(head.dim, lists));
    KMeansInit(problem, 1);
    for (uint32_t i = 0; i < 10; ++i) KMeansStep({}, problem, scratch.span());
    for (uint32_t key = 0; key < head.count(); ++key) lists_[Nearest(key)].push_back(key);
  }

  Found Find(uint32_t token, uint32_t probes) const {
    const std::span<const float> query = head_.Query(token);
    std::vector<std::pair<float, uint32_t>> order;
    for (uint32_t list = 0; list < lists_.size(); ++list) {
      order.emplace_back(-Dot(query.data(), &centroids_[size_t{list} * head_.dim], head_.dim),
                         list);
    }
    std::sort(order.begin(), order.end());
    std::vector<uint32_t> nodes;
    for (uint32_t i = 0; i < probes; ++i) {
      const std::vector<uint32_t>& list = lists_[order[i].second];
      nodes.insert(nodes.end(), list.begin(), list.end());
    }
    const auto scanned = static_cast<uint32_t>(nodes.size() + lists_.size());
    return {.nodes = Best(head_, query, std::move(nodes), kTop), .scanned = scanned};
  }

 private:
  uint32_t Nearest(uint32_t key) const {
    uint32_t nearest = 0;
    float most = -1e30f;
    for (uint32_t list = 0; list < lists_.size(); ++list) {
      const float* centroid = &centroids_[size_t{list} * head_.dim];
      const float score = Dot(&head_.keys[size_t{key} * head_.dim], centroid, head_.dim) -
                          Dot(centroid, centroid, head_.dim) / 2;
      if (score > most) {
        most = score;
        nearest = list;
      }
    }
    return nearest;
  }

  const Head& head_;
  std::vector<float> centroids_;
  std::vector<std::vector<uint32_t>> lists_;
};

thread_local uint32_t distance_count = 0;

// Inner products that count themselves.
class CountingSpace : public hnswlib::SpaceInterface<float> {
 public:
  explicit CountingSpace(size_t dim) : dim_(dim) {}
  size_t get_data_size() override { return dim_ * sizeof(float); }
  hnswlib::DISTFUNC<float> get_dist_func() override {
    return [](const void* a, const void* b, const void* dim) {
      ++distance_count;
      return 1 - Dot(static_cast<const float*>(a), static_cast<const float*>(b),
                     static_cast<uint32_t>(*static_cast<const size_t*>(dim)));
    };
  }
  void* get_dist_func_param() override { return &dim_; }

 private:
  size_t dim_;
};

using Hnsw = hnswlib::HierarchicalNSW<float>;

void BuildHnsw(const Head& head, Hnsw* index, uint32_t threads) {
  std::atomic<uint32_t> next = 1;
  index->addPoint(head.keys.data(), 0);
  RunThreads(threads, [&](uint32_t) {
    for (uint32_t key = next++; key < head.count(); key = next++) {
      index->addPoint(&head.keys[size_t{key} * head.dim], key);
    }
  });
}

// `degree`: of upper layers; layer 0 has twice as many neighbours.
void MeasureHnsw(const Head& head, const Test& test, const std::string& name, uint32_t degree) {
  CountingSpace space(head.dim);
  Hnsw index(&space, head.count(), degree, kHnswBeam);
  BuildHnsw(head, &index, 1);
  for (const uint32_t ef : {100u, 200u, 400u, 800u, 1600u, 3200u, head.count()}) {
    index.setEf(ef);
    Measure(head, test, name, ef, [&](uint32_t token) {
      distance_count = 0;
      auto queue = index.searchKnn(head.Query(token).data(), kTop);
      Found found{.nodes = {}, .scanned = distance_count};
      for (; !queue.empty(); queue.pop()) {
        found.nodes.push_back(static_cast<uint32_t>(queue.top().second));
      }
      return found;
    });
  }
}

struct Variant {
  std::string name;
  uint32_t tail;
  uint32_t strided;
  GraphBuildOptions options;
};

// Names of graphs: the number of samples, the last 512 or fewer and evenly spaced ones before them.
std::vector<Variant> Variants(const Head& head) {
  const uint32_t earlier = head.context - 512;
  const auto published = GraphProjection::kBestKey;
  return {
      {"graph, 64 samples", 64, 0, {}},
      {"graph, 512 samples", 512, 0, {}},
      {"graph", 512, 1536, {}},
      {"graph, M=16", 512, 1536, {.degree = 16}},
      {"graph, all samples", 512, earlier, {}},
      {"as published", 512, 1536, {.projection = published, .connect_beam = 500, .entry_count = 1}},
      {"as published, all samples",
       512,
       earlier,
       {.projection = published, .connect_beam = 500, .entry_count = 1}},
  };
}

void CompareGraphs(const Head& head, const Test& fresh, const Test& sampled) {
  for (const Variant& variant : Variants(head)) {
    const std::vector<float> samples = Samples(head, variant.tail, variant.strided);
    Graph graph(head, samples, variant.options);
    for (const uint32_t threads : {1u, 2u}) {
      PrintBuild(head, variant.name, threads, Seconds([&] { graph.Build(threads); }));
    }
    for (const Test* test : {&fresh, &sampled}) MeasureGraph(head, *test, variant.name, graph);
    if (variant.name == "graph") MeasureSeeded(head, fresh, "graph, seeded", graph);
  }
}

void CompareHnsw(const Head& head, const Test& fresh, const std::string& name, uint32_t degree) {
  MeasureHnsw(head, fresh, name, degree);
  for (const uint32_t threads : {1u, 2u}) {
    hnswlib::InnerProductSpace space(head.dim);
    Hnsw index(&space, head.count(), degree, kHnswBeam);
    PrintBuild(head, name, threads, Seconds([&] { BuildHnsw(head, &index, threads); }));
  }
}

void Compare(const Head& head) {
  const auto tokens = static_cast<uint32_t>(head.queries.size() / head.dim);
  const Test fresh = MakeTest(head, "fresh", head.context, tokens);
  const Test sampled = MakeTest(head, "sampled", head.context - 512, head.context);
  CompareGraphs(head, fresh, sampled);
  CompareHnsw(head, fresh, "hnsw", 35);
  CompareHnsw(head, fresh, "hnsw, M=16", 16);
  for (const uint32_t lists : {64u, 128u}) {
    const Ivf ivf(head, lists);
    for (uint32_t probes = 1; probes <= lists; probes = probes * 3 / 2 + 1) {
      Measure(head, fresh, "ivf, " + std::to_string(lists) + " lists", probes,
              [&](uint32_t token) { return ivf.Find(token, probes); });
    }
  }
}

std::vector<float> Load(const char* path, size_t count) {
  std::vector<float> values(count);
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(values.data()),
                 static_cast<std::streamsize>(count * sizeof(float)))) {
    std::fprintf(stderr, "error: %s has less than %zu floats\n", path, count);
    std::exit(1);
  }
  return values;
}

int Run(int count, char** words) {
  if (count != 8 && count != 9) {
    std::fprintf(stderr, "usage: see the first lines of graph_compare.cc\n");
    return 2;
  }
  const auto number = [&](int i) { return static_cast<uint32_t>(std::atoi(words[i])); };
  const uint32_t query_heads = number(3), kv_heads = number(4), tokens = number(5), dim = number(6);
  const uint32_t stride = count == 9 ? number(8) : 1;
  const std::vector<float> queries = Load(words[1], size_t{query_heads} * tokens * dim);
  const std::vector<float> keys = Load(words[2], size_t{kv_heads} * tokens * dim);
  for (uint32_t head = 0; head < query_heads; head += stride) {
    const size_t kv_head = head / (query_heads / kv_heads);
    const size_t first = (kv_head * tokens + kSinks) * dim;
    Compare(
        {.number = head,
         .dim = dim,
         .keys = std::span(keys).subspan(first, size_t{number(7) - kSinks - kWindow} * dim),
         .queries = std::span(queries).subspan(size_t{head} * tokens * dim, size_t{tokens} * dim),
         .context = number(7)});
  }
  return 0;
}

}  // namespace
}  // namespace pqcached::kernels

int main(int count, char** words) { return pqcached::kernels::Run(count, words); }
