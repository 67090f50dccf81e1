// PqGeometry defines how product quantization converts keys to codes, and the layout of codes and
// centroids.
//
// A key of `key_dim` numbers is cut into `subspace_count` sub-spaces of s = key_dim /
// subspace_count numbers. They are contiguous, except that a sub-space j with j * s < paired_dims
// keeps pairs of dims (i, i + paired_dims / 2) together, as rotary embeddings make them: it
// consists of the s / 2 dims from j * s / 2 on, and of their partners behind these (DimOf).
//
// The *code* of a key in a sub-space is the index of the nearest of 2^bits centroids there. Codes
// of consecutive *slots* (tokens) are stored in *planes*: one byte per slot and sub-space, except
// that with bits == 4 and an even subspace_count plane p contains sub-space 2p in the low and
// sub-space 2p + 1 in the high nibble of its bytes. A *cell* is one combination of codes; cells
// are defined only if subspace_count * bits <= 12 and HasSelect.
#ifndef PQCACHED_KERNELS_SELECT_PQ_H_
#define PQCACHED_KERNELS_SELECT_PQ_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

struct PqGeometry {
  uint32_t key_dim = 0;         // a multiple of subspace_count
  uint32_t subspace_count = 0;  // 1 to key_dim / 2
  uint32_t bits = 0;            // bits per code, 1 to 8
  uint32_t paired_dims = 0;     // 0: all sub-spaces are contiguous; else PairedDims of it
};

inline constexpr uint32_t kPlaneAlignment = 128;  // plane strides are multiples of it
inline constexpr uint32_t kMaxCellBits = 12;

constexpr uint32_t SubspaceDim(const PqGeometry& g) { return g.key_dim / g.subspace_count; }

// Returns paired_dims for keys whose first `rotary_dim` dims are pairs (i, i + rotary_dim / 2): all
// of these dims, or 0 where one sub-space contains them anyway or sub-spaces cannot be cut from
// whole pairs.
//
// REQUIRES: subspace_count divides key_dim.
constexpr uint32_t PairedDims(const PqGeometry& g, uint32_t rotary_dim) {
  const uint32_t dim = SubspaceDim(g);
  const bool fits = dim > 0 && dim % 2 == 0 && rotary_dim % dim == 0 && rotary_dim > dim &&
                    rotary_dim <= g.key_dim;
  return fits ? rotary_dim : 0;
}

constexpr bool IsValid(const PqGeometry& g) {
  const uint32_t m = g.subspace_count;
  return m > 0 && (m == 1 || m <= g.key_dim / 2) && g.bits >= 1 && g.bits <= 8 && g.key_dim > 0 &&
         g.key_dim % m == 0 && PairedDims(g, g.paired_dims) == g.paired_dims;
}

// Returns whether selection by codes (PqSelect, cells, the kernels of a GPU) works for these
// sub-spaces and bits. Codes of others are scored, and selected by their scores.
constexpr bool HasSelect(const PqGeometry& g) {
  const uint32_t m = g.subspace_count;
  return (m == 1 || m == 2 || m == 4 || m == 8 || m == 16) && g.bits >= 4 && g.bits <= 8;
}

// Returns the distance between the halves of a sub-space that keeps pairs together; 0 for a
// contiguous one.
constexpr uint32_t PairOffset(const PqGeometry& g, uint32_t subspace) {
  return subspace * SubspaceDim(g) < g.paired_dims ? g.paired_dims / 2 : 0;
}

// Returns the dim of a key that is number `i` of a sub-space.
constexpr uint32_t DimOf(const PqGeometry& g, uint32_t subspace, uint32_t i) {
  const uint32_t dim = SubspaceDim(g);
  const uint32_t half = dim / 2;
  const uint32_t offset = PairOffset(g, subspace);
  if (offset == 0) return subspace * dim + i;
  return subspace * half + (i < half ? i : offset + i - half);
}

constexpr uint32_t CentroidCount(const PqGeometry& g) { return 1u << g.bits; }

// Returns the number of floats of one codebook, [subspace_count, 2^bits, key_dim / subspace_count].
constexpr size_t CentroidFloats(const PqGeometry& g) { return size_t{g.key_dim} << g.bits; }

// Returns the number of floats of the tables of one query head and codebook, [subspace_count,
// 2^bits].
constexpr size_t TableFloats(const PqGeometry& g) { return size_t{g.subspace_count} << g.bits; }

constexpr bool HasNibblePlanes(const PqGeometry& g) {
  return g.bits == 4 && g.subspace_count % 2 == 0;
}

constexpr uint32_t PlaneCount(const PqGeometry& g) {
  return HasNibblePlanes(g) ? g.subspace_count / 2 : g.subspace_count;
}

// Returns the bytes between planes with capacity for `slot_count` slots.
constexpr size_t PlaneStride(uint32_t slot_count) {
  return (size_t{slot_count} + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
}

// Returns the bytes of all planes of one (segment, layer, kv head) with capacity for `slot_count`
// slots.
constexpr size_t CodePlanesBytes(const PqGeometry& g, uint32_t slot_count) {
  return PlaneCount(g) * PlaneStride(slot_count);
}

constexpr bool HasCells(const PqGeometry& g) {
  return HasSelect(g) && g.subspace_count * g.bits <= kMaxCellBits;
}

// REQUIRES: HasCells(g).
constexpr uint32_t CellCount(const PqGeometry& g) { return 1u << (g.subspace_count * g.bits); }

inline uint32_t GetCode(const PqGeometry& g, const uint8_t* planes, size_t plane_stride,
                        uint32_t subspace, uint32_t slot) {
  if (!HasNibblePlanes(g)) return planes[subspace * plane_stride + slot];
  const uint8_t pair = planes[subspace / 2 * plane_stride + slot];
  return subspace % 2 == 0 ? pair & 15u : pair >> 4u;
}

// Writes one byte of the plane; with nibble planes the other nibble stays unchanged.
inline void SetCode(const PqGeometry& g, uint8_t* planes, size_t plane_stride, uint32_t subspace,
                    uint32_t slot, uint32_t code) {
  if (!HasNibblePlanes(g)) {
    planes[subspace * plane_stride + slot] = static_cast<uint8_t>(code);
    return;
  }
  uint8_t& pair = planes[subspace / 2 * plane_stride + slot];
  pair =
      static_cast<uint8_t>(subspace % 2 == 0 ? (pair & 0xF0u) | code : (pair & 15u) | code << 4u);
}

// Returns the cell of a slot: the codes as digits, sub-space 0 most significant.
//
// REQUIRES: HasCells(g).
inline uint32_t GetCell(const PqGeometry& g, const uint8_t* planes, size_t plane_stride,
                        uint32_t slot) {
  uint32_t cell = 0;
  for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
    cell = cell << g.bits | GetCode(g, planes, plane_stride, subspace, slot);
  }
  return cell;
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_PQ_H_
