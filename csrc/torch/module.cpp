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

// Why no kernel of this build runs on CUDA device `index`, or "".
std::string cuda_obstacle(int64_t index) {
#ifdef RLCORE_CUDA
  const int code = rlcore_cuda_probe(static_cast<int>(index));
  return code == 0 ? "" : rlcore_cuda_message(code);
#else
  return index < 0 ? "no such device" : "built without CUDA kernels";
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY(rlcore_native, m) {
  m.def("has_cuda() -> bool");
  m.def("cuda_obstacle(int index) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CompositeExplicitAutograd, m) {
  m.impl("has_cuda", TORCH_BOX(&has_cuda));
  m.impl("cuda_obstacle", TORCH_BOX(&cuda_obstacle));
}
