// CRC32C: known values, and every level against the definition bit by bit.
#include "kernels/base/crc32c.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {
namespace {

std::span<const std::byte> Bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::vector<std::byte> RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator() & 0xff);
  return bytes;
}

uint32_t BitByBit(std::span<const std::byte> data) {
  uint32_t crc = ~0u;
  for (const std::byte byte : data) {
    crc ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

class Crc32cTest : public testing::TestWithParam<Level> {};
INSTANTIATE_TEST_SUITE_P(AllLevels, Crc32cTest, testing::ValuesIn(AvailableLevels()),
                         LevelTestName);

TEST_P(Crc32cTest, GivesTheValuesOfTheStandard) {
  const Exec exec{GetParam()};
  EXPECT_EQ(Crc32c(exec, Bytes("")), 0u);
  EXPECT_EQ(Crc32c(exec, Bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c(exec, std::vector<std::byte>(32)), 0x8a9136aau);  // RFC 3720 B.4
  EXPECT_EQ(Crc32c(exec, std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43u);  // likewise
}

TEST_P(Crc32cTest, MatchesTheDefinitionAtEveryLengthAndAlignment) {
  const std::vector<std::byte> data = RandomBytes(2200, 1);
  for (size_t begin : {0u, 1u, 7u, 33u}) {
    for (size_t count = 0; count < 1100; ++count) {
      const auto part = std::span(data).subspan(begin, count);
      ASSERT_EQ(Crc32c(Exec{GetParam()}, part), BitByBit(part)) << begin << " + " << count;
    }
  }
  for (size_t count = 1100; count < 2100; count += 37) {
    const auto part = std::span(data).first(count);
    ASSERT_EQ(Crc32c(Exec{GetParam()}, part), BitByBit(part)) << count;
  }
}

TEST_P(Crc32cTest, ContinuesFromASeed) {
  const Exec exec{GetParam()};
  const std::vector<std::byte> data = RandomBytes(3000, 2);
  const uint32_t whole = Crc32c(exec, data);
  for (size_t cut : {0u, 1u, 64u, 511u, 512u, 1000u, 2999u, 3000u}) {
    const uint32_t first = Crc32c(exec, std::span(data).first(cut));
    EXPECT_EQ(Crc32c(exec, std::span(data).subspan(cut), first), whole) << cut;
  }
}

}  // namespace
}  // namespace pqcached::kernels
