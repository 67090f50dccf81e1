// Scalar conversions: all 16-bit values, and rounding against the nearest representable neighbours.
#include "kernels/base/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace pqcached::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Value of a float with the given field widths, computed by its definition.
double Decode(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

bool IsFiniteF16(uint32_t bits) { return (bits & 0x7c00u) != 0x7c00u; }
bool IsFiniteBf16(uint32_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

TEST(DTypeTest, EverySixteenBitValueDecodesAsDefined) {
  for (uint32_t i = 0; i <= 0xffff; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    if (IsFiniteF16(i)) {
      ASSERT_EQ(static_cast<double>(F16ToF32(bits)), Decode(bits, 5, 10)) << i;
    }
    if (IsFiniteBf16(i)) {
      ASSERT_EQ(static_cast<double>(Bf16ToF32(bits)), Decode(bits, 8, 7)) << i;
    }
  }
  EXPECT_EQ(F16ToF32(0x7c00), kInfinity);
  EXPECT_EQ(F16ToF32(0xfc00), -kInfinity);
  EXPECT_TRUE(std::isnan(F16ToF32(0x7c01)));
  EXPECT_EQ(Bf16ToF32(0xff80), -kInfinity);
  EXPECT_TRUE(std::isnan(Bf16ToF32(0x7fc0)));
}

TEST(DTypeTest, EverySixteenBitValueSurvivesARoundTrip) {
  for (uint32_t i = 0; i <= 0xffff; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const bool f16_is_nan = !IsFiniteF16(i) && (i & 0x3ff) != 0;
    if (!f16_is_nan) {
      ASSERT_EQ(F32ToF16(F16ToF32(bits)), bits);
    }
    const bool bf16_is_nan = !IsFiniteBf16(i) && (i & 0x7f) != 0;
    if (!bf16_is_nan) {
      ASSERT_EQ(F32ToBf16(Bf16ToF32(bits)), bits);
    }
  }
}

// Between two neighbours: below the middle goes down, above it up, the middle to the even one.
TEST(DTypeTest, NarrowingRoundsToNearestEven) {
  const auto check = [](auto narrow, auto widen, uint16_t largest) {
    for (uint16_t low = 0; low < largest; ++low) {
      const uint16_t high = static_cast<uint16_t>(low + 1);
      const double middle =
          (static_cast<double>(widen(low)) + static_cast<double>(widen(high))) / 2;
      const float exact_middle = static_cast<float>(middle);
      ASSERT_EQ(static_cast<double>(exact_middle), middle);
      ASSERT_EQ(narrow(exact_middle), (low & 1) == 0 ? low : high) << low;
      ASSERT_EQ(narrow(-exact_middle), ((low & 1) == 0 ? low : high) | 0x8000) << low;
      ASSERT_EQ(narrow(std::nextafter(exact_middle, 0.0f)), low);
      ASSERT_EQ(narrow(std::nextafter(exact_middle, kInfinity)), high);
    }
  };
  check(F32ToF16, F16ToF32, 0x7bff);
  check(F32ToBf16, Bf16ToF32, 0x7f7f);
}

TEST(DTypeTest, ValuesBeyondTheRangeBecomeInfinity) {
  EXPECT_EQ(F32ToF16(65519.99f), 0x7bff);
  EXPECT_EQ(F32ToF16(65520.0f), 0x7c00);
  EXPECT_EQ(F32ToF16(-1e30f), 0xfc00);
  EXPECT_EQ(F32ToF16(kInfinity), 0x7c00);
  EXPECT_EQ(F32ToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(F32ToBf16(-kInfinity), 0xff80);
}

TEST(DTypeTest, NanStaysNan) {
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffc00000u}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(nan)))) << bits;
    EXPECT_TRUE(std::isnan(Bf16ToF32(F32ToBf16(nan)))) << bits;
  }
}

TEST(DTypeTest, ElementsNeedNoAlignment) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    std::byte buffer[64] = {};
    for (size_t i = 0; i < 8; ++i) {
      StoreElement(dtype, buffer + 1, i, static_cast<float>(i) - 2.5f);
    }
    for (size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(LoadElement(dtype, buffer + 1, i), static_cast<float>(i) - 2.5f);
    }
    EXPECT_EQ(buffer[0], std::byte{0});
    EXPECT_EQ(buffer[1 + 8 * DTypeBytes(dtype)], std::byte{0});
  }
}

TEST(DTypeTest, ConvertElementsConvertsEach) {
  const float source[] = {1.0f, -2.5f, 1e-7f, 65504.0f};
  std::byte halves[8];
  ConvertElements(DType::kF32, reinterpret_cast<const std::byte*>(source), DType::kF16, halves, 4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(LoadElement(DType::kF16, halves, i), F16ToF32(F32ToF16(source[i])));
  }
}

TEST(DTypeTest, KnowsItsNames) {
  EXPECT_FALSE(IsDType(0));
  EXPECT_TRUE(IsDType(1));
  EXPECT_TRUE(IsDType(3));
  EXPECT_FALSE(IsDType(4));
  EXPECT_STREQ(DTypeName(DType::kBf16), "bf16");
  EXPECT_EQ(DTypeBytes(DType::kF32), 4u);
}

}  // namespace
}  // namespace pqcached::kernels
