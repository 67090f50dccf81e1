// Lists of positions that an engine gives to a step of several items, and their attention in plain
// loops.
#ifndef PQCACHED_TESTS_CLIENT_STEP_POSITIONS_CASE_H_
#define PQCACHED_TESTS_CLIENT_STEP_POSITIONS_CASE_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/client/layer.h"
#include "tests/client/range_case.h"

namespace pqcached::testing {

// Items of a step, each over a layer of its own, with random lists of positions.
struct PositionsCase {
  struct Item {
    const Layer* layer;
    RangeCase query;
  };
  enum class Order { kAscending, kShuffled, kRepeated };

  // Lists of [items, list_count] random lengths from `least` to `most`.
  PositionsCase(std::vector<Item> of_items, uint32_t lists_per_item, uint32_t least, uint32_t most,
                Order order, uint32_t seed)
      : items(std::move(of_items)), list_count(lists_per_item) {
    std::mt19937 random(seed);
    for (const Item& item : items) {
      for (uint32_t i = 0; i < list_count; ++i) {
        const auto end = static_cast<uint32_t>(item.query.query_position);
        std::vector<uint32_t> list = Range(0, end);
        std::shuffle(list.begin(), list.end(), random);
        list.resize(std::min<size_t>(list.size(), least + random() % (most - least + 1)));
        if (order == Order::kAscending) std::sort(list.begin(), list.end());
        chosen.push_back(list);
        if (order == Order::kRepeated && !list.empty()) {
          list.push_back(list.front());
          list.insert(list.begin(), list.back());
        }
        given.push_back(std::move(list));
      }
    }
    for (const std::vector<uint32_t>& list : given) {
      capacity = std::max(capacity, static_cast<uint32_t>(list.size()));
    }
    capacity += 3;  // of padding at least
    for (const std::vector<uint32_t>& list : given) {
      lengths.push_back(static_cast<uint32_t>(list.size()));
      positions.insert(positions.end(), list.begin(), list.end());
      positions.resize(lengths.size() * capacity, -1);
    }
  }

  PositionLists lists(bool with_lengths) const {
    PositionLists all{.positions = positions, .list_count = list_count};
    if (with_lengths) all.lengths = lengths;
    return all;
  }

  // The logits of the given positions, [query tokens, query_heads, capacity], with NaN behind each
  // list. Where `left_out` is true of (query head, position), -infinity.
  template <class LeftOut>
  std::vector<float> Logits(const LeftOut& left_out) const {
    std::vector<float> all;
    for (size_t i = 0; i < items.size(); ++i) {
      for (uint64_t token = 0; token < items[i].query.tokens; ++token) {
        for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
          const size_t end = all.size() + capacity;
          for (const uint32_t position : given[ListOf(i, head)]) {
            all.push_back(left_out(head, position)
                              ? -std::numeric_limits<float>::infinity()
                              : items[i].query.Logit(*items[i].layer, token, head, position));
          }
          all.resize(end, NAN);
        }
      }
    }
    return all;
  }

  // The list of a query head of an item.
  size_t ListOf(size_t item, uint32_t head) const {
    return item * list_count + head * list_count / Layer::kQueryHeads;
  }

  std::vector<float> queries() const {
    std::vector<float> all;
    for (const Item& item : items) {
      all.insert(all.end(), item.query.queries.begin(), item.query.queries.end());
    }
    return all;
  }
  uint64_t tokens() const {
    uint64_t sum = 0;
    for (const Item& item : items) sum += item.query.tokens;
    return sum;
  }

  // The attention of all items, packed.
  Attention Expected() const {
    return Expected([](uint32_t, uint32_t) { return false; });
  }
  template <class LeftOut>
  Attention Expected(const LeftOut& left_out) const {
    Attention all;
    for (size_t i = 0; i < items.size(); ++i) {
      for (uint64_t token = 0; token < items[i].query.tokens; ++token) {
        for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
          std::vector<uint32_t> seen = chosen[ListOf(i, head)];
          std::erase_if(seen, [&](uint32_t position) { return left_out(head, position); });
          items[i].query.AddTokens(*items[i].layer, token, head, seen, &all);
        }
      }
    }
    return all;
  }

  std::vector<Item> items;
  uint32_t list_count;
  uint32_t capacity = 0;
  std::vector<std::vector<uint32_t>> chosen;  // [items, list_count], without repetitions
  std::vector<std::vector<uint32_t>> given;   // as the engine gives them
  std::vector<int32_t> positions;             // [items, list_count, capacity]
  std::vector<uint32_t> lengths;              // [items, list_count]
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_CLIENT_STEP_POSITIONS_CASE_H_
