#ifndef PQCACHED_TESTS_TINYLM_KERNELS_H_
#define PQCACHED_TESTS_TINYLM_KERNELS_H_

// The arithmetic of the test engine: matrix product, exact attention, SwiGLU, all in fp32.
//
// kernels.cc is compiled once per instruction set; BestKernels() selects the best one that this
// processor has. Functions are pure and may run on any thread.

#include <cstddef>
#include <cstdint>

namespace tinylm {

inline constexpr uint32_t kMaxHeadDim = 128;
inline constexpr uint32_t kPanelColumns = 32;  // adjacent columns of B, see MatMulArgs
inline constexpr uint32_t kAttendRows = 256;   // most query rows of one Attend call

// Returns whether the attention has a kernel for heads of this size.
constexpr bool IsHeadDim(uint32_t dim) { return dim == 64 || dim == kMaxHeadDim; }

// C[rows, columns] = A[rows, inner] x B[inner, columns], added to C if `add`. B is split into
// panels of kPanelColumns columns: element (i, j) is at b[(j / 32) * b_panel_stride + i * b_stride
// + j % 32].
//
// REQUIRES: columns is a multiple of kPanelColumns; C overlaps neither A nor B.
struct MatMulArgs {
  const float* a;
  size_t a_stride;
  const float* b;
  size_t b_stride;
  size_t b_panel_stride;
  float* c;
  size_t c_stride;
  uint32_t rows, inner, columns;
  bool add = false;
};

// Causal softmax attention of some query rows to one kv head.
//
// Row r (its query already scaled) has position first_position + r / group_size and sees the keys
// at positions <= its own; if window is not 0, only the last `window` of these. Sets o[row_count,
// head_dim], and lse[row_count] = ln sum exp(q . k), which is -inf (and o is 0) when no key is visible.
//
// REQUIRES: row_count <= kAttendRows; IsHeadDim(head_dim).
struct AttendArgs {
  uint32_t head_dim;
  const float* q;  // [row_count, head_dim]
  uint32_t row_count, group_size;
  uint32_t first_position;
  const float* k;  // [key_count, head_dim]
  const float* v;  // [key_count, head_dim]
  uint32_t key_count;
  uint32_t first_key;  // position of k's row 0
  uint32_t window = 0;
  float* o;
  float* lse;
};

struct Kernels {
  const char* name;
  void (*mat_mul)(const MatMulArgs& args);
  void (*attend)(const AttendArgs& args);
  void (*silu_mul)(float* gate, const float* up,
                   size_t count);  // gate = gate / (1 + exp(-gate)) * up
};

const Kernels& BestKernels();

// One function per compilation of kernels.cc, called only by BestKernels() and tests. The vector
// versions exist only on x86-64, and need that instruction set.
const Kernels& PortableKernels();
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_KERNELS_H_
