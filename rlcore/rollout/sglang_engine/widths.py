"""Decode steps of several widths on a GPU: attention backend and CUDA graphs of each width.

SGLang captures its graphs for one number of tokens per request, `speculative_num_draft_tokens`. Its
own adaptive EAGLE makes further ones and swaps them between steps (`build_adaptive_runtime_state`);
this is the same for drafts without a draft model. Eager steps need the attention backend, too,
since it keeps the width."""

from collections.abc import Iterable
from typing import Any

from sglang.srt.runtime_context import get_context, get_spec


class Widths:
    """All widths of a model runner, one of which is in use."""

    def __init__(self, model_runner: Any, widths: Iterable[int]) -> None:
        """Capture graphs for `widths`, beside those that the model runner has."""
        self._runner = model_runner
        largest = get_spec().speculative_num_draft_tokens
        self._states = {largest: (model_runner.attn_backend, model_runner.decode_cuda_graph_runner)}
        for width in sorted(set(widths) - {largest}, reverse=True):
            self._states[width] = self._capture(width)

    def use(self, width: int) -> None:
        """Let the next forward verify `width` tokens per request."""
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
