"""The name of our drafts among SGLang's speculative algorithms; in every process of an engine."""

from typing import Any

from sglang.srt.arg_groups.speculative_hook import _handle_ngram
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from rlcore.rollout.sglang_engine.names import ALGORITHM


class Algorithm(CustomSpecAlgo):
    """For SGLang it is of the kind NGRAM: no model drafts, and none of its caches are needed."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None:
        _handle_ngram(server_args)

    @classmethod
    def complete(cls) -> None:
        """Take over methods that the scheduler and the runners call, and that the base class does
        not have in this version."""
        for name, method in vars(SpeculativeAlgorithm).items():
            if callable(method) and not name.startswith("_") and not hasattr(cls, name):
                setattr(cls, name, method)


def register() -> None:
    """Once in a process."""
    Algorithm.complete()

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=False, spec_class=Algorithm)
    def worker(server_args: Any) -> type:
        from rlcore.rollout.sglang_engine.worker import Worker

        return Worker
