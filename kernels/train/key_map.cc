#include "kernels/train/key_map.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/scratch_cutter.h"

namespace pqcached::kernels {
namespace {

constexpr double kQueryRidge = 0.1;  // of the mean of the diagonal
constexpr double kKeyRidge = 1e-6;
constexpr int kMaxSweeps = 30;  // of Jacobi rotations; 6 to 10 are usual
constexpr double kOrthogonal = 1e-9;

// A square matrix in scratch.
struct Matrix {
  uint32_t dim;
  std::span<double> entries;

  double& at(uint32_t row, uint32_t column) { return entries[size_t{row} * dim + column]; }
  double* row(uint32_t index) { return &entries[size_t{index} * dim]; }
};

double Dot(const double* a, const double* b, uint32_t count) {
  double sums[8] = {};
  uint32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (uint32_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void SetIdentity(Matrix& matrix) {
  std::fill(matrix.entries.begin(), matrix.entries.end(), 0.0);
  for (uint32_t i = 0; i < matrix.dim; ++i) matrix.at(i, i) = 1.0;
}

// Replaces a symmetric matrix, given by its lower triangle, by its lower Cholesky factor after its
// diagonal has been scaled to a mean of 1 and increased by `ridge`. A matrix without such a scale
// is taken to be the identity.
void FactorScaled(Matrix& matrix, double ridge) {
  const uint32_t dim = matrix.dim;
  double trace = 0.0;
  for (uint32_t i = 0; i < dim; ++i) trace += matrix.at(i, i);
  const double scale = trace / dim;
  if (!std::isnormal(scale) || scale < 0.0) return SetIdentity(matrix);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j <= i; ++j) {
      double left = matrix.at(i, j) / scale + (i == j ? ridge : 0.0);
      left -= Dot(matrix.row(i), matrix.row(j), j);
      if (i == j) {
        // Rounding may leave less than the ridge of a matrix without full rank.
        matrix.at(i, i) = std::sqrt(std::max(left, ridge / 2));
      } else {
        matrix.at(i, j) = left / matrix.at(j, j);
      }
    }
    std::fill(matrix.row(i) + i + 1, matrix.row(i) + dim, 0.0);
  }
}

// Rotates rows p and q of both matrices so that those of `factor` become orthogonal. Returns
// whether they were not.
bool Orthogonalize(Matrix& factor, Matrix& rotation, uint32_t p, uint32_t q) {
  const uint32_t dim = factor.dim;
  const double pp = Dot(factor.row(p), factor.row(p), dim);
  const double qq = Dot(factor.row(q), factor.row(q), dim);
  const double pq = Dot(factor.row(p), factor.row(q), dim);
  if (!(std::abs(pq) > kOrthogonal * std::sqrt(pp * qq))) return false;
  const double zeta = (qq - pp) / (2 * pq);
  const double tangent = std::copysign(1.0, zeta) / (std::abs(zeta) + std::hypot(1.0, zeta));
  const double cosine = 1.0 / std::hypot(1.0, tangent);
  const double sine = cosine * tangent;
  for (Matrix* matrix : {&factor, &rotation}) {
    double* const a = matrix->row(p);
    double* const b = matrix->row(q);
    for (uint32_t i = 0; i < dim; ++i) {
      const double x = a[i];
      a[i] = cosine * x - sine * b[i];
      b[i] = sine * x + cosine * b[i];
    }
  }
  return true;
}

// Rotates the rows of `factor`, a square root F of F F^T, until they are orthogonal: the rows of
// `rotation` are then the eigenvectors of F F^T (one-sided Jacobi, Hestenes 1958).
void Diagonalize(Matrix& factor, Matrix& rotation) {
  SetIdentity(rotation);
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    bool changed = false;
    for (uint32_t p = 0; p + 1 < factor.dim; ++p) {
      for (uint32_t q = p + 1; q < factor.dim; ++q) {
        changed = Orthogonalize(factor, rotation, p, q) || changed;
      }
    }
    if (!changed) return;
  }
}

// Writes the row of `rotation` that each output takes: the sub-space with the least product of
// variances gets the next largest one.
void Allocate(Matrix& factor, uint32_t subspace_count, std::span<uint32_t> order,
              std::span<double> variances) {
  const uint32_t dim = factor.dim;
  for (uint32_t i = 0; i < dim; ++i) {
    variances[i] =
        std::max(Dot(factor.row(i), factor.row(i), dim), std::numeric_limits<double>::min());
  }
  const double least_variance = *std::min_element(variances.begin(), variances.begin() + dim);
  const auto logs = variances.subspan(dim);  // per sub-space, of multiples of the least variance
  const auto counts = order.subspan(dim);    // per sub-space, of its rows so far
  std::fill(logs.begin(), logs.end(), 0.0);
  std::fill(counts.begin(), counts.end(), 0u);
  const uint32_t width = dim / subspace_count;
  for (uint32_t done = 0; done < dim; ++done) {
    const auto largest = static_cast<uint32_t>(
        std::max_element(variances.begin(), variances.begin() + dim) - variances.begin());
    uint32_t least = subspace_count;
    for (uint32_t s = 0; s < subspace_count; ++s) {
      if (counts[s] < width && (least == subspace_count || logs[s] < logs[least])) least = s;
    }
    order[least * width + counts[least]++] = largest;
    logs[least] += std::log(variances[largest] / least_variance);
    variances[largest] = 0.0;
  }
}

// Sets product = left^T * right. REQUIRES: `left` is lower triangular.
void MultiplyTransposed(Matrix& left, Matrix& right, Matrix& product) {
  std::fill(product.entries.begin(), product.entries.end(), 0.0);
  for (uint32_t k = 0; k < left.dim; ++k) {
    for (uint32_t i = 0; i <= k; ++i) {
      const double weight = left.at(k, i);
      for (uint32_t j = 0; j < left.dim; ++j) product.at(i, j) += weight * right.at(k, j);
    }
  }
}

// Writes output o of both maps: row `p` of the rotation times L^T, and times L^-1.
void WriteOutput(const KeyMapArgs& args, Matrix& factor, double* p, uint32_t output) {
  const uint32_t dim = factor.dim;
  for (uint32_t i = 0; i < dim; ++i) {
    args.key_map[size_t{i} * dim + output] = static_cast<float>(Dot(p, factor.row(i), i + 1));
  }
  for (uint32_t j = dim; j-- > 0;) {  // x L = p, backwards; p becomes x
    p[j] /= factor.at(j, j);
    for (uint32_t i = 0; i < j; ++i) p[i] -= p[j] * factor.at(j, i);
  }
  for (uint32_t i = 0; i < dim; ++i) {
    args.query_map[size_t{i} * dim + output] = static_cast<float>(p[i]);
  }
}

}  // namespace

size_t KeyMapScratchBytes(uint32_t dim) {
  const size_t square = ScratchAligned(size_t{dim} * dim * sizeof(double));
  return 4 * square + ScratchAligned(size_t{2} * dim * sizeof(double)) +
         ScratchAligned(size_t{2} * dim * sizeof(uint32_t));
}

void AddMoments(std::span<const float> x, std::span<double> moments, std::span<double> sums) {
  for (size_t i = 0; i < x.size(); ++i) {
    double* const row = moments.data() + i * x.size();
    for (size_t j = 0; j <= i; ++j) row[j] += double{x[i]} * x[j];
  }
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += x[i];
}

void MakeKeyMaps(const KeyMapArgs& args) {
  const uint32_t dim = args.dim;
  const size_t square = size_t{dim} * dim;
  PQC_CHECK(args.subspace_count > 0 && dim % args.subspace_count == 0);
  PQC_CHECK(args.query_moments.size() == square && args.key_moments.size() == square);
  PQC_CHECK(args.key_map.size() == square && args.query_map.size() == square);
  ScratchCutter cutter(args.scratch);
  Matrix queries{dim, cutter.Take<double>(square)};
  Matrix keys{dim, cutter.Take<double>(square)};
  Matrix factor{dim, cutter.Take<double>(square)};
  Matrix rotation{dim, cutter.Take<double>(square)};
  const auto variances = cutter.Take<double>(size_t{2} * dim);
  const auto order = cutter.Take<uint32_t>(size_t{2} * dim);

  std::copy(args.query_moments.begin(), args.query_moments.end(), queries.entries.begin());
  FactorScaled(queries, kQueryRidge);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j <= i; ++j) {
      const double mean =
          args.key_count == 0 ? 0.0 : args.key_sums[i] / static_cast<double>(args.key_count);
      keys.at(i, j) = args.key_moments[size_t{i} * dim + j] - mean * args.key_sums[j];
    }
  }
  FactorScaled(keys, kKeyRidge);
  MultiplyTransposed(queries, keys, factor);
  Diagonalize(factor, rotation);
  Allocate(factor, args.subspace_count, order, variances);
  for (uint32_t output = 0; output < dim; ++output) {
    WriteOutput(args, queries, rotation.row(order[output]), output);
  }
}

}  // namespace pqcached::kernels
