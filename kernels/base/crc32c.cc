#include "kernels/base/crc32c.h"

#include <array>

#include "kernels/base/crc32c_internal.h"

namespace pqcached::kernels {
namespace {

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1u) != 0 ? internal::kCrc32cPolynomial : 0u);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

// The specification.
uint32_t Crc32cReference(std::span<const std::byte> data, uint32_t seed) {
  uint32_t crc = ~seed;
  for (const std::byte byte : data) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xffu];
  }
  return ~crc;
}

#ifdef PQCACHED_X86
bool HasPclmul() {
  static const bool has = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
  return has;
}

bool HasVpclmul() {
  static const bool has = HasPclmul() && __builtin_cpu_supports("vpclmulqdq");
  return has;
}
#endif

}  // namespace

uint32_t Crc32c(const Exec& exec, std::span<const std::byte> data, uint32_t seed) {
#ifdef PQCACHED_X86
  if (exec.level >= Level::kAvx512 && HasVpclmul()) {
    return ~internal::Crc32cVpclmul(~seed, data.data(), data.size());
  }
  if (exec.level >= Level::kAvx2 && HasPclmul()) {
    return ~internal::Crc32cPclmul(~seed, data.data(), data.size());
  }
#else
  static_cast<void>(exec);
#endif
  return Crc32cReference(data, seed);
}

}  // namespace pqcached::kernels
