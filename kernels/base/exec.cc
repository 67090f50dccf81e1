#include "kernels/base/exec.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pqcached::kernels {
namespace {

#if defined(__x86_64__)
// clang 14 does not know "f16c" in __builtin_cpu_supports.
bool HasF16c() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Level FindBestLevel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !HasF16c()) {
    return Level::kPortable;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return Level::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vbmi2")) {
    return Level::kAvx512;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return Level::kAvx512Vbmi;
  return Level::kAvx512Bf16;
#elif defined(__aarch64__)
  return Level::kNeon;  // all arm64 machines have it
#else
  return Level::kPortable;
#endif
}

constexpr Level kAllLevels[] = {Level::kReference, Level::kPortable,   Level::kAvx2,
                                Level::kAvx512,    Level::kAvx512Vbmi, Level::kAvx512Bf16,
                                Level::kNeon};

}  // namespace

Level BestLevel() {
  static const Level best = FindBestLevel();
  return best;
}

bool HasLevel(Level level) {
  if (level <= Level::kPortable) return true;
  if (BestLevel() == Level::kNeon) return level == Level::kNeon;
  return level <= BestLevel();
}

std::vector<Level> AvailableLevels() {
  std::vector<Level> levels;
  for (const Level level : kAllLevels) {
    if (HasLevel(level)) levels.push_back(level);
  }
  return levels;
}

std::string_view LevelName(Level level) {
  switch (level) {
    case Level::kReference:
      return "reference";
    case Level::kPortable:
      return "portable";
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
    case Level::kAvx512Vbmi:
      return "avx512vbmi";
    case Level::kAvx512Bf16:
      return "avx512bf16";
    case Level::kNeon:
      return "neon";
  }
  return "unknown";
}

std::optional<Level> ParseLevel(std::string_view name) {
  for (const Level level : kAllLevels) {
    if (LevelName(level) == name) return level;
  }
  return std::nullopt;
}

}  // namespace pqcached::kernels
