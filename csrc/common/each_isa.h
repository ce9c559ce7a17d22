// Compiles the kernels of the file RL_KERNELS once per instruction set: in the namespaces avx512,
// avx2 and baseline, of which the first two are there on x86 with GCC alone. Included within the
// unnamed namespace of one source, so there is no include guard. RL_CHOSEN(name) is the name in the
// set that runs (common/isa.h).

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

#ifdef RL_X86_TARGETS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
namespace avx512 {
#define RL_LANES 16
#include "common/simd.h"
#include RL_KERNELS
#undef RL_LANES
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace avx2 {
#define RL_LANES 8
#include "common/simd.h"
#include RL_KERNELS
#undef RL_LANES
}  // namespace avx2
#pragma GCC pop_options
#endif
namespace baseline {
#define RL_LANES 4
#include "common/simd.h"
#include RL_KERNELS
#undef RL_LANES
}  // namespace baseline
#pragma GCC diagnostic pop

#ifdef RL_X86_TARGETS
#define RL_CHOSEN(name)                                 \
  (rlcore::isa() == rlcore::Isa::kAvx512 ? avx512::name \
   : rlcore::isa() == rlcore::Isa::kAvx2 ? avx2::name   \
                                         : baseline::name)
#else
#define RL_CHOSEN(name) (baseline::name)
#endif
