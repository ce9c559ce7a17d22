// rlcore._C.SuffixForest: numpy arrays in and out, the GIL released. Promises:
// rlcore/ops/suffix.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/check.h"
#include "suffix/forest.h"

namespace py = pybind11;
using rlcore::suffix::Arena;
using rlcore::suffix::Built;
using rlcore::suffix::Forest;
using rlcore::suffix::Options;
using rlcore::suffix::Stats;

namespace {

// Handed in as it is: a copy of what has another type or layout would hide a mistake.
template <class T>
std::span<const T> view(const py::handle& given, const char* name, const char* type) {
  RL_CHECK(py::isinstance<py::array>(given), name, ": must be a numpy array of ", type, ", not ",
           Py_TYPE(given.ptr())->tp_name);
  const auto array = py::reinterpret_borrow<py::array>(given);
  RL_CHECK(py::isinstance<py::array_t<T>>(given), name, ": must be ", type, ", not ",
           std::string(py::str(array.dtype())));
  RL_CHECK(array.ndim() == 1, name, ": must have one dimension, not ", array.ndim());
  RL_CHECK(array.size() < 2 || array.strides(0) == static_cast<py::ssize_t>(sizeof(T)), name,
           ": must be contiguous, has a stride of ", array.strides(0), " bytes");
  return {static_cast<const T*>(array.data()), static_cast<size_t>(array.size())};
}

// Another thread may write to an array while the GIL is released; what is checked is therefore a
// copy, and the copy is what is used.
template <class T>
std::vector<T> copy_of(std::span<const T> given) {
  return {given.begin(), given.end()};
}

std::vector<int32_t> ints(const py::handle& given, const char* name) {
  return copy_of(view<int32_t>(given, name, "int32"));
}
std::vector<int64_t> longs(const py::handle& given, const char* name) {
  return copy_of(view<int64_t>(given, name, "int64"));
}

template <class T>
std::span<T> out(py::array_t<T>& array) {
  return {array.mutable_data(), static_cast<size_t>(array.size())};
}

// None: the requests' own windows.
struct Windows {
  bool own;
  std::vector<int32_t> sizes;
};

Windows windows_of(const py::object& given) {
  if (given.is_none()) return {true, {}};
  return {false, ints(given, "windows")};
}

// Arrays of one batch of drafts.
struct Rows {
  py::array_t<int32_t> tokens, lengths;
  Forest::Drafts drafts;

  Rows(int64_t batch, int32_t width)
      : tokens({batch, int64_t{width}}),
        lengths(batch),
        drafts{tokens.mutable_data(), lengths.mutable_data(), width} {}
};

py::tuple draft(Forest& forest, const py::object& handles, const py::object& windows,
                int64_t running) {
  const auto h = longs(handles, "handles");
  const auto w = windows_of(windows);
  const auto batch = static_cast<int64_t>(h.size());
  Rows rows(batch, forest.width(batch, w.sizes, w.own, running));
  {
    const py::gil_scoped_release released;
    forest.draft(h, w.sizes, w.own, running, rows.drafts);
  }
  return py::make_tuple(rows.tokens, rows.lengths);
}

py::tuple step(Forest& forest, const py::object& handles, const py::object& accepted,
               const py::object& tokens, const py::object& offsets, const py::object& windows,
               int64_t running) {
  const auto h = longs(handles, "handles");
  const auto a = ints(accepted, "accepted");
  const auto t = ints(tokens, "tokens");
  const auto o = longs(offsets, "offsets");
  const auto w = windows_of(windows);
  const auto batch = static_cast<int64_t>(h.size());
  Rows rows(batch, forest.width(batch, w.sizes, w.own, running));
  {
    const py::gil_scoped_release released;
    forest.step(h, a, t, o, w.sizes, w.own, running, rows.drafts);
  }
  return py::make_tuple(rows.tokens, rows.lengths);
}

py::dict build(Forest& forest, const py::object& keys, const py::object& tokens,
               const py::object& response_offsets, const py::object& prompt_offsets,
               const py::object& rewards) {
  const auto k = longs(keys, "keys");
  const auto r = longs(response_offsets, "response_offsets");
  const auto p = longs(prompt_offsets, "prompt_offsets");
  const auto given = view<int32_t>(tokens, "tokens", "int32");
  const auto w = copy_of(view<float>(rewards, "rewards", "float32"));
  Built built;
  {
    const py::gil_scoped_release released;
    const auto t = copy_of(given);
    built = forest.build({k, t, r, p, w});
  }
  py::dict facts;
  facts["tokens"] = built.tokens;
  facts["states"] = built.states;
  facts["edges"] = built.edges;
  facts["bytes"] = built.bytes;
  facts["seconds"] = built.seconds;
  return facts;
}

py::dict stats(const Forest& forest) {
  const Stats s = [&] {
    const py::gil_scoped_release released;
    return forest.stats();
  }();
  py::dict facts;
  facts["prompts"] = s.prompts;
  facts["tokens"] = s.tokens;
  facts["states"] = s.states;
  facts["edges"] = s.edges;
  facts["history_bytes"] = s.history_bytes;
  facts["live_bytes"] = s.live_bytes;
  facts["live_tokens"] = s.live_tokens;
  facts["requests"] = s.requests;
  return facts;
}

// The current block as bytes, held by the array; None before the first swap.
py::object arena(const Forest& forest) {
  auto held = [&] {
    const py::gil_scoped_release released;
    return forest.current();
  }();
  if (held == nullptr) return py::none();
  const auto bytes = static_cast<py::ssize_t>(held->nbytes());
  const char* base = held->base();
  auto owner = std::make_unique<std::shared_ptr<const Arena>>(std::move(held));
  const py::capsule capsule(owner.get(),
                            [](void* p) { delete static_cast<std::shared_ptr<const Arena>*>(p); });
  owner.release();
  py::array_t<uint8_t> array(bytes, reinterpret_cast<const uint8_t*>(base), capsule);
  array.attr("flags").attr("writeable") = false;
  return array;
}

}  // namespace

void bind_suffix(py::module_& m) {
  const Options defaults;
  py::dict d;
  d["limit"] = defaults.limit;
  d["min_match"] = defaults.min_match;
  d["min_prob"] = defaults.min_prob;
  d["max_window"] = defaults.max_window;
  d["start_window"] = defaults.start_window;
  d["growth"] = defaults.growth;
  d["knee"] = defaults.knee;
  d["live"] = defaults.live != 0;
  d["candidates"] = defaults.candidates;
  d["live_match"] = defaults.live_match;
  d["factor"] = defaults.factor;
  d["stream"] = defaults.stream;
  m.attr("suffix_defaults") = d;  // those of rlcore/ops/suffix.py, which a test compares
  py::class_<Forest>(m, "SuffixForest")
      .def(py::init([](int32_t limit, int32_t min_match, double min_prob, int32_t max_window,
                       int32_t start_window, int32_t growth, int32_t knee, bool live,
                       int32_t candidates, int32_t live_match, double factor, int32_t stream,
                       int threads) {
             Options o;
             o.limit = limit;
             o.min_match = min_match;
             o.min_prob = min_prob;
             o.max_window = max_window;
             o.start_window = start_window;
             o.growth = growth;
             o.knee = knee;
             o.live = live ? 1 : 0;
             o.candidates = candidates;
             o.live_match = live_match;
             o.factor = factor;
             o.stream = stream;
             return std::make_unique<Forest>(o, threads);
           }),
           py::kw_only(), py::arg("limit"), py::arg("min_match"), py::arg("min_prob"),
           py::arg("max_window"), py::arg("start_window"), py::arg("growth"), py::arg("knee"),
           py::arg("live"), py::arg("candidates"), py::arg("live_match"), py::arg("factor"),
           py::arg("stream"), py::arg("threads"))
      .def("build", build, py::arg("keys"), py::arg("tokens"), py::arg("response_offsets"),
           py::arg("prompt_offsets"), py::arg("rewards"))
      .def("swap", &Forest::swap, py::call_guard<py::gil_scoped_release>())
      .def(
          "open",
          [](Forest& forest, const py::object& keys) {
            const auto k = longs(keys, "keys");
            py::array_t<int64_t> handles(static_cast<py::ssize_t>(k.size()));
            const auto to = out(handles);
            const py::gil_scoped_release released;
            forest.open(k, to);
            return handles;
          },
          py::arg("keys"))
      .def(
          "close",
          [](Forest& forest, const py::object& handles) {
            const auto h = longs(handles, "handles");
            const py::gil_scoped_release released;
            forest.close(h);
          },
          py::arg("handles"))
      .def(
          "advance",
          [](Forest& forest, const py::object& handles, const py::object& tokens,
             const py::object& offsets) {
            const auto h = longs(handles, "handles");
            const auto t = ints(tokens, "tokens");
            const auto o = longs(offsets, "offsets");
            const py::gil_scoped_release released;
            forest.advance(h, t, o);
          },
          py::arg("handles"), py::arg("tokens"), py::arg("offsets"))
      .def(
          "accept",
          [](Forest& forest, const py::object& handles, const py::object& lengths) {
            const auto h = longs(handles, "handles");
            const auto a = ints(lengths, "lengths");
            const py::gil_scoped_release released;
            forest.accept(h, a);
          },
          py::arg("handles"), py::arg("lengths"))
      .def("draft", draft, py::arg("handles"), py::arg("windows"), py::arg("running"))
      .def("step", step, py::arg("handles"), py::arg("accepted"), py::arg("tokens"),
           py::arg("offsets"), py::arg("windows"), py::arg("running"))
      .def(
          "matches",
          [](Forest& forest, const py::object& handles) {
            const auto h = longs(handles, "handles");
            const auto size = static_cast<py::ssize_t>(h.size());
            py::array_t<int32_t> history(size), live(size);
            const auto a = out(history), b = out(live);
            {
              const py::gil_scoped_release released;
              forest.matches(h, a, b);
            }
            return py::make_tuple(history, live);
          },
          py::arg("handles"))
      .def(
          "windows",
          [](Forest& forest, const py::object& handles) {
            const auto h = longs(handles, "handles");
            py::array_t<int32_t> windows(static_cast<py::ssize_t>(h.size()));
            const auto to = out(windows);
            const py::gil_scoped_release released;
            forest.windows(h, to);
            return windows;
          },
          py::arg("handles"))
      .def_property_readonly("nbytes",
                             [](const Forest& forest) {
                               const py::gil_scoped_release released;
                               return forest.nbytes();
                             })
      .def("stats", stats)
      .def("arena", arena);
}
