"""Attention backends and CUDA graphs for decode steps of several widths on a GPU.

The width of a step is its number of tokens per request. SGLang captures graphs for one width,
`speculative_num_draft_tokens`. Its adaptive EAGLE captures more and swaps them between steps
(`build_adaptive_runtime_state`). `Widths` does so for drafts that need no draft model. An attention
backend is made for one width, also if a step runs without graphs."""

from collections.abc import Iterable
from typing import Any

from sglang.srt.runtime_context import get_context, get_spec


class Widths:
    """The widths that a model runner supports, and the switch between them."""

    def __init__(self, model_runner: Any, widths: Iterable[int]) -> None:
        """Make a backend and capture graphs for every width for which `model_runner` has none."""
        self._runner = model_runner
        largest = get_spec().speculative_num_draft_tokens
        self._states = {largest: (model_runner.attn_backend, model_runner.decode_cuda_graph_runner)}
        for width in sorted(set(widths) - {largest}, reverse=True):
            self._states[width] = self._capture(width)

    def use(self, width: int) -> None:
        """Switch the model runner to `width` for the next forward."""
        self._runner.attn_backend, self._runner.decode_cuda_graph_runner = self._states[width]

    def _capture(self, width: int) -> tuple[Any, Any]:
        runner, largest = self._runner, get_spec().speculative_num_draft_tokens
        workspace, graphs = runner.init_new_workspace, runner.decode_cuda_graph_runner
        get_context().override("rlcore", speculative_num_draft_tokens=width)
        try:
            backend = runner._get_attention_backend(init_new_workspace=True)
            if graphs is not None:
                graphs = type(graphs)(
                    runner, attn_backend=backend, speculative_num_draft_tokens=width
                )
        finally:
            runner.init_new_workspace = workspace
            get_context().override("rlcore", speculative_num_draft_tokens=largest)
        return backend, graphs
