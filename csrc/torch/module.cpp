// Facts about this build; the ops are in the files beside this one.
#include "torch/checks.h"

namespace {

bool has_cuda() {
#ifdef RLCORE_CUDA
  return true;
#else
  return false;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY(rlcore_native, m) { m.def("has_cuda() -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CompositeExplicitAutograd, m) {
  m.impl("has_cuda", TORCH_BOX(&has_cuda));
}
