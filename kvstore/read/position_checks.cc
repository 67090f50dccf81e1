#include "kvstore/read/position_checks.h"

#include <string>
#include <utility>

namespace pqcached::kvstore {
namespace {

Refusal NotStored(std::string field, uint32_t position, uint32_t stored) {
  return {StatusCode::kOutOfRange, std::move(field),
          std::to_string(position) + "; " + std::to_string(stored) + " tokens are stored"};
}

Refusal Descends(std::string field, uint32_t position, uint32_t before, const char* within) {
  return {StatusCode::kInvalidArgument, std::move(field),
          std::to_string(position) + " after " + std::to_string(before) +
              ", must ascend within a " + within};
}

}  // namespace

Refusal CheckPositions(const LayerView& view, std::span<const uint32_t> positions, bool ascending) {
  if (positions.size() % view.shape.kv_heads != 0) {
    return {StatusCode::kInvalidArgument, "positions",
            std::to_string(positions.size()) + " of them; not a multiple of kv_heads, " +
                std::to_string(view.shape.kv_heads)};
  }
  const uint32_t stored = view.token_count();
  const size_t per_head = positions.size() / view.shape.kv_heads;
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto field = [&] { return "positions[" + std::to_string(i) + "]"; };
    if (positions[i] >= stored) return NotStored(field(), positions[i], stored);
    if (ascending && i % per_head != 0 && positions[i] <= positions[i - 1]) {
      return Descends(field(), positions[i], positions[i - 1], "set");
    }
  }
  return {};
}

Refusal CheckList(std::span<const uint32_t> list, size_t head, uint32_t stored) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] < stored && (i == 0 || list[i] > list[i - 1])) continue;
    std::string field = "lists[" + std::to_string(head) + "][" + std::to_string(i) + "]";
    if (list[i] >= stored) return NotStored(std::move(field), list[i], stored);
    return Descends(std::move(field), list[i], list[i - 1], "list");
  }
  return {};
}

}  // namespace pqcached::kvstore
