// Compiled once per instruction set with TINYLM_KERNELS = PortableKernels, Avx2Kernels or
// Avx512Kernels. No inline function or template of the standard library may be used here: the
// linker keeps one copy of those for the whole program, and it could be the one with the widest
// instructions.

#include "tests/tinylm/kernels.h"

namespace tinylm {
namespace {

#if defined(__AVX512F__)
constexpr uint32_t kLanes = 16, kTileRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr uint32_t kLanes = 8, kTileRows = 6;  // 12 accumulators of 16 registers
#else
constexpr uint32_t kLanes = 4, kTileRows = 6;
#endif
constexpr uint32_t kKeyBlock = 128;
constexpr float kMinusInfinity = -__builtin_inff();

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVector __attribute__((vector_size(kLanes * 4)));
typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vector Load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void Store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
inline Vector Splat(float value) { return Vector{} + value; }

// Computes one tile of C: kRows rows, two vectors of columns.
template <uint32_t kRows>
inline void MatMulTile(const MatMulArgs& args, const float* a, const float* b, float* c) {
  Vector sum[kRows][2];
  for (uint32_t r = 0; r < kRows; ++r) {
    sum[r][0] = args.add ? Load(c + r * args.c_stride) : Vector{};
    sum[r][1] = args.add ? Load(c + r * args.c_stride + kLanes) : Vector{};
  }
  for (uint32_t i = 0; i < args.inner; ++i) {
    const Vector b0 = Load(b + i * args.b_stride), b1 = Load(b + i * args.b_stride + kLanes);
    for (uint32_t r = 0; r < kRows; ++r) {
      const Vector factor = Splat(a[r * args.a_stride + i]);
      sum[r][0] += factor * b0;
      sum[r][1] += factor * b1;
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    Store(c + r * args.c_stride, sum[r][0]);
    Store(c + r * args.c_stride + kLanes, sum[r][1]);
  }
}

// Computes the rows from `row` on, in tiles of kRows, and the remainder in smaller tiles.
template <uint32_t kRows>
inline void MatMulColumns(const MatMulArgs& args, uint32_t row, const float* b, float* c) {
  for (; row + kRows <= args.rows; row += kRows) {
    MatMulTile<kRows>(args, args.a + row * args.a_stride, b, c + row * args.c_stride);
  }
  if constexpr (kRows > 1) {
    if (row < args.rows) MatMulColumns<kRows / 2>(args, row, b, c);
  }
}

void MatMul(const MatMulArgs& args) {
  for (uint32_t column = 0; column < args.columns; column += 2 * kLanes) {
    const float* b = args.b + column / kPanelColumns * args.b_panel_stride + column % kPanelColumns;
    MatMulColumns<kTileRows>(args, 0, b, args.c + column);
  }
}

// Returns exp with a relative error below 3e-7 on [-87, 88]; 0 below (also for -inf), exp(88)
// above.
inline Vector Exp(Vector x) {
  const Vector low = Splat(-87.0f), high = Splat(88.0f);
  const IntVector vanishes = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5 x 2^23 rounds to an integer and leaves it in the low bits.
  const Vector magic = Splat(12582912.0f);
  const Vector shifted = x * 1.44269504f + magic;
  const Vector n = shifted - magic;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVector exponent;
  __builtin_memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4B400000 + 127) << 23;
  Vector scale;
  __builtin_memcpy(&scale, &exponent, sizeof scale);
  return vanishes ? Vector{} : p * scale;
}

// Replaces x by exp(x - shift) for `count` values, a multiple of kLanes; returns their sum.
float ExpAndSum(float* x, uint32_t count, float shift) {
  Vector sum{};
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector e = Exp(Load(x + i) - shift);
    Store(x + i, e);
    sum += e;
  }
  float total = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
  return total;
}

float Max(const float* x, uint32_t count) {
  Vector max = Load(x);
  for (uint32_t i = kLanes; i < count; i += kLanes) {
    const Vector next = Load(x + i);
    max = next > max ? next : max;
  }
  float result = max[0];
  for (uint32_t lane = 1; lane < kLanes; ++lane) result = max[lane] > result ? max[lane] : result;
  return result;
}

// Running softmax of one row: maximum and sum of exponentials so far.
struct RowState {
  float max = kMinusInfinity, sum = 0;
};

// Converts the row's scores for one key block to weights, and rescales o, the output accumulated so
// far.
template <uint32_t kHeadDim>
void UpdateRow(float* scores, uint32_t count, RowState& state, float* o) {
  const float block_max = Max(scores, count);
  const float max = block_max > state.max ? block_max : state.max;
  if (max == kMinusInfinity) {
    for (uint32_t i = 0; i < count; ++i) scores[i] = 0;
    return;
  }
  const float sum = ExpAndSum(scores, count, max);
  if (max > state.max) {
    const float correction = __builtin_expf(state.max - max);
    for (uint32_t d = 0; d < kHeadDim; ++d) o[d] *= correction;
    state.sum *= correction;
    state.max = max;
  }
  state.sum += sum;
}

template <uint32_t kHeadDim>
void Transpose(const float* rows, uint32_t count, float* columns) {
  for (uint32_t first = 0; first < kKeyBlock; first += 16) {
    for (uint32_t d = 0; d < kHeadDim; ++d) {
      for (uint32_t i = first; i < first + 16; ++i) {
        columns[d * kKeyBlock + i] = i < count ? rows[i * kHeadDim + d] : 0.0f;
      }
    }
  }
}

float Sum(Vector value) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  __builtin_memcpy(parts, &value, sizeof parts);
  Four sum = parts[0];
  for (uint32_t i = 1; i < kLanes / 4; ++i) sum += parts[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Computes the scores of a few rows, key by key: a decode step reads each key only once, so a
// transpose does not pay off.
template <uint32_t kHeadDim>
void DotScores(const AttendArgs& args, const float* keys, uint32_t count, float* scores) {
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t row = 0; row < args.row_count; ++row) {
      Vector sum{};
      for (uint32_t d = 0; d < kHeadDim; d += kLanes) {
        sum += Load(args.q + row * kHeadDim + d) * Load(keys + i * kHeadDim + d);
      }
      scores[row * kKeyBlock + i] = Sum(sum);
    }
  }
}

template <uint32_t kHeadDim>
void BlockScores(const AttendArgs& args, const float* keys, uint32_t count, uint32_t width,
                 float* scores) {
  constexpr uint32_t kFewRows = 8;
  if (args.row_count <= kFewRows) {
    DotScores<kHeadDim>(args, keys, count, scores);
    return;
  }
  alignas(64) float key_columns[kHeadDim * kKeyBlock];
  Transpose<kHeadDim>(keys, count, key_columns);
  MatMul({.a = args.q,
          .a_stride = kHeadDim,
          .b = key_columns,
          .b_stride = kKeyBlock,
          .b_panel_stride = kPanelColumns,
          .c = scores,
          .c_stride = kKeyBlock,
          .rows = args.row_count,
          .inner = kHeadDim,
          .columns = width});
}

// Masks the keys of the block [first_key, first_key + count) that row r must not see; `width` >=
// count columns exist.
void Mask(const AttendArgs& args, uint32_t row, uint32_t first_key, uint32_t count, uint32_t width,
          float* scores) {
  const uint32_t position = args.first_position + row / args.group_size;
  const uint32_t visible_end = position + 1 > first_key ? position + 1 - first_key : 0;
  const uint32_t end = visible_end < count ? visible_end : count;
  for (uint32_t i = end; i < width; ++i) scores[i] = kMinusInfinity;
  if (args.window == 0 || position < args.window) return;
  const uint32_t oldest = position + 1 - args.window;
  for (uint32_t i = 0; i < end && first_key + i < oldest; ++i) scores[i] = kMinusInfinity;
}

// Processes blocks of keys with a running softmax, so that scores stay in the second-level cache.
template <uint32_t kHeadDim>
void AttendHeads(const AttendArgs& args) {
  alignas(64) float scores[kAttendRows * kKeyBlock];
  RowState states[kAttendRows];
  for (uint32_t i = 0; i < args.row_count * kHeadDim; ++i) args.o[i] = 0;

  const uint32_t last_position = args.first_position + (args.row_count - 1) / args.group_size;
  for (uint32_t key = 0; key < args.key_count; key += kKeyBlock) {
    if (args.first_key + key > last_position) break;
    const uint32_t left = args.key_count - key;
    const uint32_t count = left < kKeyBlock ? left : kKeyBlock;
    const uint32_t width = (count + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
    BlockScores<kHeadDim>(args, args.k + size_t{key} * kHeadDim, count, width, scores);
    for (uint32_t row = 0; row < args.row_count; ++row) {
      float* row_scores = scores + row * kKeyBlock;
      Mask(args, row, args.first_key + key, count, width, row_scores);
      UpdateRow<kHeadDim>(row_scores, width, states[row], args.o + row * kHeadDim);
    }
    MatMul({.a = scores,
            .a_stride = kKeyBlock,
            .b = args.v + size_t{key} * kHeadDim,
            .b_stride = kHeadDim,
            .b_panel_stride = kPanelColumns,
            .c = args.o,
            .c_stride = kHeadDim,
            .rows = args.row_count,
            .inner = count,
            .columns = kHeadDim,
            .add = true});
  }

  for (uint32_t row = 0; row < args.row_count; ++row) {
    const RowState& state = states[row];
    args.lse[row] = state.sum > 0 ? state.max + __builtin_logf(state.sum) : kMinusInfinity;
    const float scale = state.sum > 0 ? 1.0f / state.sum : 0.0f;
    for (uint32_t d = 0; d < kHeadDim; ++d) args.o[row * kHeadDim + d] *= scale;
  }
}

void Attend(const AttendArgs& args) {
  if (args.head_dim == 64) AttendHeads<64>(args);
  if (args.head_dim == 128) AttendHeads<128>(args);
}

void SiluMul(float* gate, const float* up, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector z = Load(gate + i);
    Store(gate + i, z / (Exp(-z) + 1.0f) * Load(up + i));
  }
  for (; i < count; ++i) gate[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
}

}  // namespace

const Kernels& TINYLM_KERNELS() {
  static constexpr Kernels kKernels = {
      .name = TINYLM_LEVEL, .mat_mul = MatMul, .attend = Attend, .silu_mul = SiluMul};
  return kKernels;
}

}  // namespace tinylm
