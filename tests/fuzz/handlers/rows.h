// Rows that follow from numbers, so that a model keeps one number per token: its content.
//
// The rows of one tenant are positive, those of the other one negative: a row that reaches the
// wrong tenant differs from all of its own.
#ifndef PQCACHED_TESTS_FUZZ_HANDLERS_ROWS_H_
#define PQCACHED_TESTS_FUZZ_HANDLERS_ROWS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pqcached/v1/kv_cache.pb.h"

namespace pqcached::fuzz {

inline constexpr uint32_t kStoredLayers[] = {1, 4};
inline constexpr size_t kLayerCount = std::size(kStoredLayers);
inline constexpr uint32_t kKeyElements = 32;
inline constexpr uint32_t kValueElements = 40;
inline constexpr uint32_t kRowElements = kKeyElements + kValueElements;
inline constexpr uint32_t kQueryHeadCount = 2;  // over one kv head
inline constexpr uint32_t kContents = 512;      // from here on, contents that AddRows has made
inline constexpr size_t kPromptTokens = 320;
inline constexpr uint32_t kFamilies = 4;

using Row = std::array<uint16_t, kRowElements>;  // fp16
using Content = std::vector<uint32_t>;

class RowTable {
 public:
  explicit RowTable(bool is_negative);

  const Row& row(size_t layer, uint32_t content) const { return rows_[layer][content]; }
  // Returns the content of a token that has these rows.
  uint32_t AddRows(const std::array<Row, kLayerCount>& rows);
  void ForgetAdded();

 private:
  std::array<std::vector<Row>, kLayerCount> rows_;
};

// A prompt; family members have their first 128 tokens in common.
struct Prompt {
  std::vector<uint32_t> ids;
  Content content;
};
const Prompt& PromptOf(uint32_t family);
// Returns the content of a token with this id, behind a token with content `before`.
uint32_t ContentAfter(uint32_t before, uint32_t id);

// The elements [begin, end) of the rows of a layer, one token after the other.
std::string ElementsOf(const RowTable& table, size_t layer, std::span<const uint32_t> content,
                       uint32_t begin, uint32_t end);
// Sets both tensors to these bytes, or to wider numbers of the same value.
void SetRows(const RowTable& table, size_t layer, std::span<const uint32_t> content, bool as_floats,
             v1::LayerRows* rows);

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_HANDLERS_ROWS_H_
