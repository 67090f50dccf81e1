// The build of a graph in plain loops (graph_case.h).
#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>
#include <set>

#include "tests/kernels/graph/graph_case.h"

namespace pqcached::kernels {
namespace {

using Nodes = std::vector<uint32_t>;

bool Contains(const Nodes& nodes, uint32_t node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

// Sorts by descending value; ties: the lower node.
template <class Value>
void SortBest(Nodes* nodes, const Value& value) {
  std::sort(nodes->begin(), nodes->end(), [&](uint32_t a, uint32_t b) {
    return value(a) > value(b) || (value(a) == value(b) && a < b);
  });
}

class PlainBuild {
 public:
  PlainBuild(const GraphCase& keys, const GraphBuildOptions& options)
      : keys_(keys), options_(options), count_(keys.size().keys) {
    graph_.neighbours.resize(count_);
  }

  PlainGraph Run() {
    if (count_ == 0) return graph_;
    FindLists();
    ChooseEntries();
    for (uint32_t key = 0; key < count_; ++key) Project(key);
    AddReversed();
    if (options_.connect_beam > 0) Connect();
    ReachAll();
    return graph_;
  }

 private:
  void FindLists() {
    for (uint32_t sample = 0; sample < keys_.size().samples; ++sample) {
      const std::span<const float> query =
          std::span(keys_.samples()).subspan(size_t{sample} * keys_.size().dim, keys_.size().dim);
      Nodes nodes(count_);
      std::iota(nodes.begin(), nodes.end(), 0);
      SortBest(&nodes, [&](uint32_t key) { return keys_.Score(query, key); });
      nodes.resize(std::min(options_.list_size, count_));
      lists_.push_back(nodes);
    }
  }

  // Returns the key that is nearest to the mean.
  uint32_t Middle() const {
    std::vector<double> mean(keys_.size().dim);
    for (uint32_t i = 0; i < mean.size(); ++i) {
      for (uint32_t key = 0; key < count_; ++key) mean[i] += double{keys_.KeyValue(key, i)};
      mean[i] /= count_;
    }
    std::vector<double> distances(count_);
    for (uint32_t key = 0; key < count_; ++key) {
      for (uint32_t i = 0; i < mean.size(); ++i) {
        const double difference = double{keys_.KeyValue(key, i)} - mean[i];
        distances[key] += difference * difference;
      }
    }
    return static_cast<uint32_t>(std::min_element(distances.begin(), distances.end()) -
                                 distances.begin());
  }

  void ChooseEntries() {
    const uint32_t middle = Middle();
    const size_t samples = std::min<size_t>(options_.entry_samples, lists_.size());
    const std::vector<Nodes> lists(lists_.end() - static_cast<ptrdiff_t>(samples), lists_.end());
    while (graph_.entries.size() + 1 < options_.entry_count) {
      // Lists of many entries weigh less.
      std::map<uint32_t, uint32_t> weights;
      for (const Nodes& list : lists) {
        uint32_t weight = 1u << 16u;
        for (uint32_t entry : graph_.entries) weight /= Contains(list, entry) ? 4 : 1;
        for (uint32_t key : list) weights[key] += weight;
      }
      uint32_t best = middle;
      uint32_t most = 0;
      for (const auto& [key, weight] : weights) {
        if (weight <= most || key == middle || Contains(graph_.entries, key)) continue;
        best = key;
        most = weight;
      }
      if (most == 0) break;
      graph_.entries.push_back(best);
    }
    graph_.entries.push_back(middle);
  }

  bool ProjectsShared() const { return options_.projection == GraphProjection::kSharedLists; }

  // Returns the lists that count for a key.
  std::vector<Nodes> ListsOf(uint32_t key) const {
    std::vector<Nodes> found;
    for (const Nodes& list : lists_) {
      if (ProjectsShared() ? Contains(list, key) : list[0] == key) found.push_back(list);
    }
    return found;
  }

  void Project(uint32_t key) {
    std::vector<Nodes> lists = ListsOf(key);
    if (lists.size() > options_.lists_per_key) {
      lists.erase(lists.begin(), lists.end() - options_.lists_per_key);
    }
    std::map<uint32_t, uint32_t> shared;
    for (const Nodes& list : lists) {
      for (uint32_t other : list) ++shared[other];
    }
    shared.erase(key);
    Nodes found;
    for (const auto& [other, count] : shared) found.push_back(other);
    if (!ProjectsShared()) {
      graph_.neighbours[key] = Prune(key, found, true);
      return;
    }
    std::map<uint32_t, float> weights;
    for (uint32_t other : found) {
      const auto lists_of_other = static_cast<float>(ListsOf(other).size());
      weights[other] = static_cast<float>(shared[other]) * (1.0f / std::sqrt(lists_of_other));
    }
    SortBest(&found, [&](uint32_t other) { return weights[other]; });
    found.resize(std::min<size_t>(found.size(), options_.degree));
    graph_.neighbours[key] = found;
  }

  Nodes Prune(uint32_t key, Nodes candidates, bool fill) const {
    SortBest(&candidates, [&](uint32_t node) { return -keys_.Distance(key, node); });
    Nodes chosen;
    for (uint32_t node : candidates) {
      if (chosen.size() == options_.degree) break;
      const bool occluded = std::any_of(chosen.begin(), chosen.end(), [&](uint32_t nearer) {
        return keys_.Distance(nearer, node) < keys_.Distance(key, node);
      });
      if (!occluded) chosen.push_back(node);
    }
    for (uint32_t node : candidates) {
      if (!fill || chosen.size() == options_.degree) break;
      if (!Contains(chosen, node)) chosen.push_back(node);
    }
    return chosen;
  }

  void AddReversed() {
    const std::vector<Nodes> projected = graph_.neighbours;
    for (uint32_t key = 0; key < count_; ++key) {
      Nodes incoming;
      for (uint32_t source = 0; source < count_; ++source) {
        if (Contains(projected[source], key) && !Contains(projected[key], source)) {
          incoming.push_back(source);
        }
      }
      Nodes& row = graph_.neighbours[key];
      if (ProjectsShared()) {
        for (uint32_t source : incoming) {
          if (row.size() < options_.degree) row.push_back(source);
        }
      } else if (!incoming.empty()) {
        incoming.insert(incoming.end(), row.begin(), row.end());
        row = Prune(key, incoming, true);
      }
    }
  }

  // Best-first with all neighbours at once; the kernel looks at them a few at a time, which makes
  // no difference to the result when no limit ends the walk before the beam is exhausted and the
  // beam holds all keys.
  Nodes Walk(uint32_t query_key) const {
    std::vector<float> query;
    for (uint32_t i = 0; i < keys_.size().dim; ++i) query.push_back(keys_.KeyValue(query_key, i));
    std::set<uint32_t> seen(graph_.entries.begin(), graph_.entries.end());
    std::deque<uint32_t> open(seen.begin(), seen.end());
    for (; !open.empty(); open.pop_front()) {
      for (uint32_t node : graph_.neighbours[open.front()]) {
        if (seen.insert(node).second) open.push_back(node);
      }
    }
    Nodes found(seen.begin(), seen.end());
    SortBest(&found, [&](uint32_t node) { return keys_.Score(query, node); });
    return found;
  }

  void Connect() {
    std::vector<Nodes> added(count_);
    for (uint32_t key = 0; key < count_; ++key) {
      Nodes found = Walk(key);
      found.erase(std::remove(found.begin(), found.end(), key), found.end());
      added[key] = Prune(key, found, false);
    }
    for (uint32_t key = 0; key < count_; ++key) {
      Append(key, added[key]);
      for (uint32_t source = 0; source < count_; ++source) {
        if (Contains(added[source], key)) Append(key, {source});
      }
    }
  }

  void Append(uint32_t key, const Nodes& nodes) {
    Nodes& row = graph_.neighbours[key];
    for (uint32_t node : nodes) {
      if (row.size() < 2 * options_.degree - 1 && !Contains(row, node)) row.push_back(node);
    }
  }

  void ReachAll() {
    Nodes queue = graph_.entries;
    std::set<uint32_t> reached(queue.begin(), queue.end());
    size_t done = 0;
    for (uint32_t node = 0; node < count_; ++node) {
      for (; done < queue.size(); ++done) {
        for (uint32_t next : graph_.neighbours[queue[done]]) {
          if (reached.insert(next).second) queue.push_back(next);
        }
      }
      if (!reached.insert(node).second) continue;
      const auto parent = std::find_if(queue.begin(), queue.end(), [&](uint32_t key) {
        return graph_.neighbours[key].size() < 2 * options_.degree;
      });
      graph_.neighbours[*parent].push_back(node);
      queue.push_back(node);
    }
  }

  const GraphCase& keys_;
  const GraphBuildOptions& options_;
  const uint32_t count_;
  std::vector<Nodes> lists_;
  PlainGraph graph_;
};

}  // namespace

PlainGraph BuildPlain(const GraphCase& keys, const GraphBuildOptions& options) {
  return PlainBuild(keys, options).Run();
}

}  // namespace pqcached::kernels
