// Exec chooses which form of a kernel runs.
//
// A *level* is a set of instructions; levels form a ladder, each includes those below it. Every
// kernel takes an Exec first and runs its best form at or below the level asked for, so that tests
// and operators can hold a level back.
//
// Thread-safe: all functions only read what was found out at the first call.
#ifndef PQCACHED_KERNELS_EXEC_H_
#define PQCACHED_KERNELS_EXEC_H_

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
};

// Returns the highest level that this machine runs.
Level BestLevel();

// Returns all levels that this machine runs, ascending; never empty.
std::vector<Level> AvailableLevels();

// Returns "reference", "portable", "avx2", "avx512", "avx512vbmi" or "avx512bf16".
std::string_view LevelName(Level level);

// The inverse of LevelName; nothing for any other text. Whether the machine runs the level is not
// checked.
std::optional<Level> ParseLevel(std::string_view name);

// REQUIRES of every kernel that takes it: level <= BestLevel().
struct Exec {
  Level level = BestLevel();
};

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_EXEC_H_
