// exp and softcap of logits, written once for every Vec.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ATTEND_SOFTMAX_SIMD_H_
#define PQCACHED_KERNELS_ATTEND_SOFTMAX_SIMD_H_

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLargestFloat = 3.40282347e+38f;

// Returns exp(x) for x <= 0, 0 below -87; relative error below 2e-7. NaN gives 0.
PQC_INLINE Vec::F Exp(Vec::F x) {
  const Vec::F clamped = Vec::Max(x, Vec::Set(-87.0f));
  const Vec::F n = Vec::Round(clamped * Vec::Set(1.44269504f));
  Vec::F r = Vec::NegMulAdd(n, Vec::Set(0.693359375f), clamped);
  r = Vec::NegMulAdd(n, Vec::Set(-2.12194440e-4f), r);
  Vec::F p = Vec::Set(1.9875691500e-4f);
  p = Vec::MulAdd(p, r, Vec::Set(1.3981999507e-3f));
  p = Vec::MulAdd(p, r, Vec::Set(8.3334519073e-3f));
  p = Vec::MulAdd(p, r, Vec::Set(4.1665795894e-2f));
  p = Vec::MulAdd(p, r, Vec::Set(1.6666665459e-1f));
  p = Vec::MulAdd(p, r, Vec::Set(5.0000001201e-1f));
  p = Vec::MulAdd(p * r, r, r + Vec::Set(1.0f));
  return Vec::ZeroIfLess(x, -87.0f, Vec::Ldexp(p, n));
}

// Returns softcap * tanh(x / softcap); absolute error about 1e-7 * softcap.
PQC_INLINE Vec::F Softcap(Vec::F x, float softcap) {
  const Vec::F e = Exp(Vec::Abs(x) * Vec::Set(-2.0f / softcap));
  const Vec::F one = Vec::Set(1.0f);
  const Vec::F tanh = (one - e) / (one + e);
  return Vec::CopySign(tanh * Vec::Set(softcap), x);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_SOFTMAX_SIMD_H_
