// Exec selects the instruction set (dispatch target) that a kernel uses.
//
// A *level* is an instruction set. The levels of one kind of machine form a ladder: each includes
// those below it. Every kernel takes an Exec as its first argument and runs its best variant at or
// below the requested level, so that tests and operators can limit the level.
//
// Thread-safe: all functions only read values that the first call determined.
#ifndef PQCACHED_KERNELS_BASE_EXEC_H_
#define PQCACHED_KERNELS_BASE_EXEC_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace pqcached::kernels {

enum class Level : uint8_t {
  kReference,   // plain loops, the specification
  kPortable,    // C++ for any machine, written for the compiler's vectoriser
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // + AVX-512 F, BW, VL, DQ
  kAvx512Vbmi,  // + VBMI, VBMI2
  kAvx512Bf16,  // + BF16
  kNeon,        // NEON of arm64, directly above kPortable there; no machine has AVX2 and NEON
};

// Returns the highest level that this machine supports.
Level BestLevel();

// Returns all levels that this machine supports, ascending; never empty.
std::vector<Level> AvailableLevels();

// Returns whether this machine supports the level.
bool HasLevel(Level level);

// Returns "reference", "portable", "avx2", "avx512", "avx512vbmi", "avx512bf16" or "neon".
std::string_view LevelName(Level level);

// Returns the level with this name, or nullopt for any other text. Does not check that the machine
// supports the level.
std::optional<Level> ParseLevel(std::string_view name);

// REQUIRES, in every kernel that takes an Exec: HasLevel(level).
struct Exec {
  Level level = BestLevel();
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_EXEC_H_
