// rlcore._C: bindings, no algorithms.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "partition/balanced.h"

namespace py = pybind11;

void bind_suffix(py::module_& m);  // suffix.cpp

PYBIND11_MODULE(_C, m) {
  m.def(
      "balanced",
      [](const std::vector<int64_t>& lengths, int64_t parts, bool equal_size) {
        return rlcore::partition::balanced(lengths, parts, equal_size);
      },
      py::arg("lengths"), py::arg("parts"), py::arg("equal_size"));
  bind_suffix(m);
}
