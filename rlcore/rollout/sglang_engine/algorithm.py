"""Register our drafting as a speculative algorithm of SGLang, in every process of an engine."""

import json
import os
from typing import Any

from sglang.srt.arg_groups.speculative_hook import _handle_ngram
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from rlcore.rollout.sglang_engine.names import ALGORITHM, DRAFTS


class Algorithm(CustomSpecAlgo):
    """Speculative algorithm that SGLang treats like NGRAM: no draft model, no draft KV cache."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None:
        _handle_ngram(server_args)

    @classmethod
    def complete(cls) -> None:
        """Copy methods of `SpeculativeAlgorithm` that the base class lacks in this SGLang version.
        SGLang calls these methods on every algorithm."""
        for name, method in vars(SpeculativeAlgorithm).items():
            if callable(method) and not name.startswith("_") and not hasattr(cls, name):
                setattr(cls, name, method)


def register() -> None:
    """Register the algorithm. Call this once per process."""
    Algorithm.complete()
    # The host's matcher needs the result of a step before the next step begins.
    overlap = json.loads(os.environ[DRAFTS])["matcher"] == "device"

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=overlap, spec_class=Algorithm)
    def worker(server_args: Any) -> type:
        from rlcore.rollout.sglang_engine.worker import DraftWorker

        return DraftWorker
