"""Widths of decode steps, with stand-ins for SGLang's context and model runner."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Graphs:
    """Stand-in for SGLang's graph runner."""

    def __init__(self, runner: Any, *, attn_backend: Any, speculative_num_draft_tokens: int):
        if speculative_num_draft_tokens == 3:
            raise RuntimeError("out of memory")
        self.made = attn_backend, speculative_num_draft_tokens


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's settings of drafts; steps are 8 wide."""
    spec = SimpleNamespace(speculative_num_draft_tokens=8)
    context = SimpleNamespace(override=lambda source, **new: vars(spec).update(new))
    module: Any = ModuleType("sglang.srt.runtime_context")
    module.get_context, module.get_spec = lambda: context, lambda: spec
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    monkeypatch.delitem(sys.modules, "rlcore.rollout.sglang_engine.widths", raising=False)
    yield spec
    sys.modules.pop("rlcore.rollout.sglang_engine.widths", None)


@pytest.fixture
def runner(spec: SimpleNamespace) -> Any:
    def backend(init_new_workspace: bool) -> str:
        runner.init_new_workspace = init_new_workspace
        return f"backend of {spec.speculative_num_draft_tokens}"

    graphs = Graphs(None, attn_backend="first", speculative_num_draft_tokens=8)
    runner: Any = SimpleNamespace(
        attn_backend="first",
        decode_cuda_graph_runner=graphs,
        init_new_workspace=False,
        _get_attention_backend=backend,
    )
    return runner


@pytest.mark.parametrize("is_eager", [False, True])
def test_every_width_has_its_backend_and_its_graphs(
    runner: Any, spec: SimpleNamespace, is_eager: bool
) -> None:
    from rlcore.rollout.sglang_engine.widths import Widths

    if is_eager:
        runner.decode_cuda_graph_runner = None
    widths = Widths(runner, [1, 2, 4, 8])
    assert spec.speculative_num_draft_tokens == 8 and not runner.init_new_workspace
    for width in (2, 8, 1, 4):
        widths.use(width)
        backend = "first" if width == 8 else f"backend of {width}"
        assert runner.attn_backend == backend
        if is_eager:
            assert runner.decode_cuda_graph_runner is None
        else:
            assert runner.decode_cuda_graph_runner.made == (backend, width)


def test_a_failed_capture_leaves_the_settings_as_they_were(
    runner: Any, spec: SimpleNamespace
) -> None:
    from rlcore.rollout.sglang_engine.widths import Widths

    with pytest.raises(RuntimeError, match="out of memory"):
        Widths(runner, [1, 3, 8])
    assert spec.speculative_num_draft_tokens == 8 and not runner.init_new_workspace
    assert runner.attn_backend == "first"
