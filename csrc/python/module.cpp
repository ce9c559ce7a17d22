// rlcore._C: bindings, no algorithms.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_suffix(py::module_& m);  // suffix.cpp

PYBIND11_MODULE(_C, m) { bind_suffix(m); }
