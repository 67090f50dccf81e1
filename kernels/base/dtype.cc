#include "kernels/base/dtype.h"

#include <bit>
#include <cstring>

namespace pqcached::kernels {
namespace {

constexpr uint32_t kF32Infinity = 0x7f800000u;

// Drops `shift` low bits of `value`, rounding to nearest, ties to even. REQUIRES: 0 < shift < 32.
uint32_t ShiftRightRounded(uint32_t value, uint32_t shift) {
  const uint32_t kept = value >> shift;
  const uint32_t rest = value & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  const bool up = rest > half || (rest == half && (kept & 1u) != 0);
  return kept + (up ? 1u : 0u);
}

}  // namespace

bool IsDType(uint8_t value) { return value >= 1 && value <= 3; }

size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "f16";
    case DType::kBf16:
      return "bf16";
    case DType::kF32:
      return "f32";
  }
  return "?";
}

float F16ToF32(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | kF32Infinity | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

uint16_t F32ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t exponent = magnitude >> 23;
  if (magnitude > kF32Infinity) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (exponent >= 143) return static_cast<uint16_t>(sign | 0x7c00u);  // |value| >= 2^16
  if (exponent < 102) return static_cast<uint16_t>(sign);             // |value| < 2^-25
  if (exponent < 113) {  // subnormal: multiples of 2^-24
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    return static_cast<uint16_t>(sign | ShiftRightRounded(mantissa, 126u - exponent));
  }
  // A carry out of the mantissa increments the exponent; a carry out of the largest finite value
  // gives infinity.
  return static_cast<uint16_t>(sign | ShiftRightRounded(magnitude - (112u << 23), 13));
}

float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t F32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > kF32Infinity) {
    return static_cast<uint16_t>((bits >> 16) |
                                 0x40u);  // quiet: a payload cut to 0 would mean infinity
  }
  return static_cast<uint16_t>(ShiftRightRounded(bits, 16));
}

float LoadElement(DType dtype, const std::byte* data, size_t index) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + index * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * sizeof(bits), sizeof(bits));
  return dtype == DType::kF16 ? F16ToF32(bits) : Bf16ToF32(bits);
}

void StoreElement(DType dtype, std::byte* data, size_t index, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(data + index * sizeof(value), &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kF16 ? F32ToF16(value) : F32ToBf16(value);
  std::memcpy(data + index * sizeof(bits), &bits, sizeof(bits));
}

void ConvertElements(DType from, const std::byte* source, DType to, std::byte* target,
                     size_t count) {
  if (from == to) {
    if (count > 0) std::memcpy(target, source, count * DTypeBytes(from));
    return;
  }
  for (size_t i = 0; i < count; ++i) StoreElement(to, target, i, LoadElement(from, source, i));
}

}  // namespace pqcached::kernels
