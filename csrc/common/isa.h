// Which instruction set the CPU kernels use. common/each_isa.h compiles a kernel once per set.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

// GCC 11 does not know the names of the x86-64 levels.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define RL_X86_TARGETS
#include <immintrin.h>
#endif

#define RL_INLINE inline __attribute__((always_inline))

namespace rlcore {

enum class Isa { kBaseline, kAvx2, kAvx512 };
inline constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512"};

inline bool has(Isa isa) {
#ifdef RL_X86_TARGETS
  if (isa == Isa::kAvx512) return __builtin_cpu_supports("x86-64-v4");
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("x86-64-v3");
#endif
  return isa == Isa::kBaseline;
}

// What runs; written by tests alone.
inline Isa& isa() {
  static Isa chosen = has(Isa::kAvx512) ? Isa::kAvx512
                      : has(Isa::kAvx2) ? Isa::kAvx2
                                        : Isa::kBaseline;
  return chosen;
}

// For tests: the code of "avx512", "avx2" or "baseline" from now on. False where this machine does
// not have it.
inline bool use_instruction_set(const char* name) {
  for (const Isa other : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (std::strcmp(name, kIsaNames[static_cast<int>(other)]) != 0 || !has(other)) continue;
    isa() = other;
    return true;
  }
  return false;
}

}  // namespace rlcore
