#include "client/engines/llama/attention.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pqcached::llama {
namespace {

using kernels::DType;

// Halves of the mask, and four of them at once.
constexpr uint16_t kSeen = 0x0000;
constexpr uint16_t kHidden = 0xfc00;  // minus infinity
constexpr uint64_t kFourHidden = 0xfc00fc00fc00fc00;
constexpr uint32_t kWordCells = 64;

bool ReadDType(GgmlType type, DType* dtype) {
  switch (type) {
    case kGgmlF32:
      *dtype = DType::kF32;
      return true;
    case kGgmlF16:
      *dtype = DType::kF16;
      return true;
    case kGgmlBf16:
      *dtype = DType::kBf16;
      return true;
    default:
      return false;
  }
}

bool IsDim(int64_t dim) { return dim >= 32 && dim <= 256 && dim % 8 == 0; }

const char* DescribeShapes(const GgmlTensor& node, Attention* attention) {
  const GgmlTensor &q = *node.src[0], &k = *node.src[1], &v = *node.src[2];
  if (!IsDim(k.ne[0]) || !IsDim(v.ne[0]))
    return "a head dim that is not a multiple of 8 in 32..256";
  if (k.ne[1] != v.ne[1] || k.ne[2] != v.ne[2] || k.ne[3] != v.ne[3] || q.ne[3] != k.ne[3]) {
    return "K and V of different shapes";
  }
  if (q.ne[0] != k.ne[0] || k.ne[2] < 1 || q.ne[2] % k.ne[2] != 0 || q.ne[2] > 1024) {
    return "query heads that are no multiple of the kv heads";
  }
  if (k.ne[1] < 1 || k.ne[1] > INT32_MAX) return "no cells";
  const size_t element = kernels::DTypeBytes(attention->dtype);
  if (k.nb[0] != element || v.nb[0] != element || q.nb[0] != sizeof(float)) {
    return "rows that are not contiguous (V is transposed without flash attention)";
  }
  if (k.nb[1] != v.nb[1]) return "K and V of different strides";
  if (k.data != nullptr && k.data == v.data) return "V that is a part of K (MLA)";
  if (node.nb[0] != sizeof(float) || node.nb[1] != node.nb[0] * static_cast<size_t>(v.ne[0])) {
    return "an output that is not contiguous";
  }
  attention->key_dim = static_cast<uint32_t>(k.ne[0]);
  attention->value_dim = static_cast<uint32_t>(v.ne[0]);
  attention->kv_heads = static_cast<uint32_t>(k.ne[2]);
  attention->group_size = static_cast<uint32_t>(q.ne[2] / k.ne[2]);
  attention->tokens = static_cast<uint32_t>(q.ne[1]);
  attention->streams = static_cast<uint32_t>(q.ne[3]);
  attention->cells = static_cast<uint32_t>(k.ne[1]);
  attention->cell_bytes = k.nb[1];
  if (k.nb[1] != 0) {
    attention->stream_cells = static_cast<uint32_t>(k.nb[3] / k.nb[1]);
    const auto offset =
        static_cast<const std::byte*>(k.data) - static_cast<const std::byte*>(RootOf(&k)->data);
    attention->first_cell = static_cast<uint32_t>(static_cast<size_t>(offset) / k.nb[1]);
  }
  if (attention->cell_bytes < element * std::max(attention->key_dim, attention->value_dim)) {
    return "K or V that repeats rows";
  }
  return nullptr;
}

// Returns the first cell of the mask's row, of query token `token` of a stream.
const uint16_t* MaskRow(const Attention& attention, uint32_t stream, uint32_t token) {
  const GgmlTensor& mask = *attention.node->src[3];
  const auto* const data = static_cast<const std::byte*>(mask.data);
  const auto own = stream % static_cast<uint32_t>(mask.ne[3]);
  const size_t row = size_t{attention.first_token} + token;
  return reinterpret_cast<const uint16_t*>(data + row * mask.nb[1] + own * mask.nb[3]);
}

// Sets bit i of *seen to whether cell i is seen, for up to kWordCells cells. Returns false for
// another value than 0 and minus infinity.
bool ReadWord(const uint16_t* row, uint32_t count, uint64_t* seen) {
  if (count == kWordCells) {
    uint64_t any = 0, all = ~uint64_t{0}, four;
    for (uint32_t i = 0; i < kWordCells; i += 4) {
      std::memcpy(&four, row + i, sizeof(four));
      any |= four;
      all &= four;
    }
    if (any == 0) {
      *seen = ~uint64_t{0};
      return true;
    }
    if (any == kFourHidden && all == kFourHidden) {
      *seen = 0;
      return true;
    }
  }
  uint64_t bits = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (row[i] == kSeen) {
      bits |= uint64_t{1} << i;
    } else if (row[i] != kHidden) {
      return false;
    }
  }
  *seen = bits;
  return true;
}

void AddRun(uint32_t begin, uint32_t end, uint64_t seen_by, std::vector<CellRun>* runs) {
  if (seen_by == 0 || begin == end) return;
  if (!runs->empty() && runs->back().end == begin && runs->back().seen_by == seen_by) {
    runs->back().end = end;
  } else {
    runs->push_back({begin, end, seen_by});
  }
}

}  // namespace

const char* Describe(const GgmlTensor& node, Attention* attention) {
  for (uint32_t i = 0; i < 3; ++i) {
    if (node.src[i] == nullptr) return "no K, V or queries";
  }
  const GgmlTensor &q = *node.src[0], &k = *node.src[1], &v = *node.src[2];
  const GgmlTensor* mask = node.src[3];
  float parameters[3];
  std::memcpy(parameters, node.op_params, sizeof(parameters));
  const auto& [scale, max_bias, softcap] = parameters;
  if (max_bias != 0.0f) return "ALiBi";
  if (q.type != kGgmlF32 || node.type != kGgmlF32) return "queries that are not F32";
  if (k.type != v.type) return "K and V of different types";
  if (!ReadDType(k.type, &attention->dtype)) return "a quantised KV cache";
  if (mask == nullptr) return "no mask";
  if (mask->type != kGgmlF16 || mask->ne[0] < k.ne[1] || mask->ne[1] < q.ne[1] ||
      mask->ne[2] != 1 || mask->nb[0] != sizeof(uint16_t)) {
    return "a mask of another shape";
  }
  attention->scale = scale;
  attention->softcap = softcap;
  attention->node = &node;
  return DescribeShapes(node, attention);
}

void LoadQuery(const Attention& attention, uint32_t stream, uint32_t token, uint32_t head,
               float* to) {
  const GgmlTensor& q = *attention.node->src[0];
  const size_t row = size_t{attention.first_token} + token;
  const auto* const from = reinterpret_cast<const float*>(
      static_cast<const std::byte*>(q.data) + row * q.nb[1] + head * q.nb[2] + stream * q.nb[3]);
  for (uint32_t i = 0; i < attention.key_dim; ++i) {
    std::byte rounded[4];
    kernels::StoreElement(attention.dtype, rounded, 0, from[i]);
    to[i] = kernels::LoadElement(attention.dtype, rounded, 0);
  }
}

std::span<const int32_t> PositionsOf(const Attention& attention, int32_t rope_op) {
  constexpr int kMostSteps = 8;  // scalings, casts and views behind the rotation
  const GgmlTensor* tensor = attention.node->src[0];
  for (int i = 0; i < kMostSteps && tensor != nullptr; ++i) {
    if (tensor->op == rope_op) {
      const GgmlTensor* const positions = tensor->src[1];
      const int64_t rows = int64_t{attention.streams} * attention.tokens;
      if (positions == nullptr || positions->type != kGgmlI32 || positions->ne[0] != rows ||
          positions->data == nullptr) {
        return {};
      }
      return {static_cast<const int32_t*>(positions->data), static_cast<size_t>(rows)};
    }
    tensor = tensor->view_src != nullptr ? tensor->view_src : tensor->src[0];
  }
  return {};
}

const GgmlTensor* RootOf(const GgmlTensor* tensor) {
  while (tensor->view_src != nullptr) tensor = tensor->view_src;
  return tensor;
}

bool ReadSeen(const Attention& attention, uint32_t stream, uint32_t token,
              std::span<uint64_t> words) {
  const uint16_t* const row = MaskRow(attention, stream, token);
  for (uint32_t begin = 0; begin < attention.cells; begin += kWordCells) {
    uint64_t seen = 0;
    if (!ReadWord(row + begin, std::min(kWordCells, attention.cells - begin), &seen)) return false;
    words[begin / kWordCells] |= seen;
  }
  return true;
}

bool ReadMask(const Attention& attention, uint32_t stream, std::span<const uint64_t* const> hidden,
              std::vector<CellRun>* runs) {
  runs->clear();
  uint64_t words[kMostTokens];
  for (uint32_t begin = 0; begin < attention.cells; begin += kWordCells) {
    const uint32_t count = std::min(kWordCells, attention.cells - begin);
    uint64_t changes = 0;  // bit i: another set of tokens sees cell i than cell i - 1
    for (uint32_t t = 0; t < attention.tokens; ++t) {
      if (!ReadWord(MaskRow(attention, stream, t) + begin, count, &words[t])) return false;
      if (!hidden.empty() && hidden[t] != nullptr) words[t] &= ~hidden[t][begin / kWordCells];
      changes |= words[t] ^ (words[t] << 1);
    }
    changes |= 1;
    for (uint32_t first = 0; first < count;) {
      const uint64_t later = first + 1 < kWordCells ? changes >> (first + 1) << (first + 1) : 0;
      const uint32_t next =
          later == 0 ? count : std::min(count, static_cast<uint32_t>(std::countr_zero(later)));
      uint64_t seen_by = 0;
      for (uint32_t t = 0; t < attention.tokens; ++t) {
        seen_by |= (words[t] >> first & 1) << t;
      }
      AddRun(begin + first, begin + next, seen_by, runs);
      first = next;
    }
  }
  return true;
}

}  // namespace pqcached::llama
