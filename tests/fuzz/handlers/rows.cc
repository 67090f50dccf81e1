#include "tests/fuzz/handlers/rows.h"

#include <cstring>

#include "kernels/base/dtype.h"

namespace pqcached::fuzz {
namespace {

using kernels::DType;

uint32_t Mix(uint32_t a, uint32_t b) {
  uint32_t x = a * 0x9e3779b9u + b + 0x7f4a7c15u;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// A normal fp16 number of moderate size.
uint16_t Element(uint32_t seed, bool is_negative) {
  const uint32_t exponent = 11 + (seed >> 10) % 5;
  return static_cast<uint16_t>((is_negative ? 0x8000u : 0u) | exponent << 10 | (seed & 0x3ff));
}

void SetTensor(const std::string& elements, size_t tokens, uint32_t dim, bool as_floats,
               v1::Tensor* tensor) {
  tensor->set_dtype(as_floats ? v1::DTYPE_FLOAT32 : v1::DTYPE_FLOAT16);
  tensor->clear_shape();
  for (const uint64_t extent : {uint64_t{tokens}, uint64_t{1}, uint64_t{dim}}) {
    tensor->add_shape(extent);
  }
  if (!as_floats) {
    tensor->set_inline_data(elements);
    return;
  }
  const size_t count = elements.size() / 2;
  std::string* floats = tensor->mutable_inline_data();
  floats->resize(count * sizeof(float));
  kernels::ConvertElements(DType::kF16, reinterpret_cast<const std::byte*>(elements.data()),
                           DType::kF32, reinterpret_cast<std::byte*>(floats->data()), count);
}

Prompt MakePrompt(uint32_t family) {
  Prompt prompt;
  uint32_t content = 0;
  for (size_t i = 0; i < kPromptTokens; ++i) {
    const uint32_t own = i < 128 ? family / 2 : 10 + family;
    prompt.ids.push_back(own * 1000 + static_cast<uint32_t>(i));
    content = ContentAfter(content, prompt.ids.back());
    prompt.content.push_back(content);
  }
  return prompt;
}

}  // namespace

RowTable::RowTable(bool is_negative) {
  for (size_t layer = 0; layer < kLayerCount; ++layer) {
    for (uint32_t content = 0; content < kContents; ++content) {
      Row row;
      const uint32_t seed = Mix(content, static_cast<uint32_t>(layer));
      for (uint32_t i = 0; i < kRowElements; ++i) row[i] = Element(Mix(seed, i), is_negative);
      rows_[layer].push_back(row);
    }
  }
}

uint32_t RowTable::AddRows(const std::array<Row, kLayerCount>& rows) {
  for (size_t layer = 0; layer < kLayerCount; ++layer) rows_[layer].push_back(rows[layer]);
  return static_cast<uint32_t>(rows_[0].size() - 1);
}

void RowTable::ForgetAdded() {
  for (std::vector<Row>& rows : rows_) rows.resize(kContents);
}

const Prompt& PromptOf(uint32_t family) {
  static const std::array<Prompt, kFamilies> prompts = {MakePrompt(0), MakePrompt(1), MakePrompt(2),
                                                        MakePrompt(3)};
  return prompts[family];
}

uint32_t ContentAfter(uint32_t before, uint32_t id) { return Mix(before, id) % kContents; }

std::string ElementsOf(const RowTable& table, size_t layer, std::span<const uint32_t> content,
                       uint32_t begin, uint32_t end) {
  const size_t bytes = (end - begin) * sizeof(uint16_t);
  std::string elements(content.size() * bytes, '\0');
  char* to = elements.data();
  for (const uint32_t token : content) {
    std::memcpy(to, table.row(layer, token).data() + begin, bytes);
    to += bytes;
  }
  return elements;
}

void SetRows(const RowTable& table, size_t layer, std::span<const uint32_t> content, bool as_floats,
             v1::LayerRows* rows) {
  rows->set_layer(kStoredLayers[layer]);
  SetTensor(ElementsOf(table, layer, content, 0, kKeyElements), content.size(), kKeyElements,
            as_floats, rows->mutable_keys());
  SetTensor(ElementsOf(table, layer, content, kKeyElements, kRowElements), content.size(),
            kValueElements, as_floats, rows->mutable_values());
}

}  // namespace pqcached::fuzz
