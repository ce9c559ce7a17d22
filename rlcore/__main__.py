"""Run a command: `python -m rlcore COMMAND`, or `rlcore COMMAND`.

Only the command's own module is imported, so that every command starts fast."""

import atexit
import gc
import io
import os
import sys
from contextlib import suppress

COMMANDS = {
    "train": "train a model; --dry-run only checks the run and shows its plan",
    "preflight": "check machines, network, data and reward before a run; takes the keys of train",
    "recipe": "list the recipes, or copy one to edit it: rlcore recipe list",
    "sft": "fine-tune a model on your conversations; takes the keys of train",
    "tiny": "make a tiny model and warm-start it: the model of recipes/grpo_tiny.sh",
    "judge": "make the tiny judge of recipes/judge_tiny.sh",
    "eval": "evaluate a model, or a run's checkpoint: rlcore eval MODEL --data.val FILE",
    "export": "write a checkpoint as a Hugging Face folder: rlcore export RUN",
    "report": "write a report of a run, with plot and all numbers: rlcore report RUN",
    "plot": "plot the metrics of runs: rlcore plot RUN...",
    "view": "write a run's rollouts as an HTML page: rlcore view RUN",
    "trace": "merge the traces of all ranks for ui.perfetto.dev: rlcore trace RUN",
    "doctor": "tell why a run hangs or has exited: rlcore doctor RUN",
    "explain": "show the batch arithmetic of a step: rlcore explain --data.prompts_per_step 64",
    "sim": "simulate training on a cluster: rlcore sim run --gpus 32",
    "mux": "share nodes between jobs: rlcore mux up, add, status, down",
    "profile": "measure the rollout engine: the best --rollout.tp, and a table for sim",
    "env": "show what is installed, for a bug report",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m rlcore COMMAND [--section.key value ...]\n")
        for name, what in COMMANDS.items():
            print(f"  {name:9} {what}")
        print("\n  train --help lists every key.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"rlcore {argv[0]}: there is no such command; known: {', '.join(COMMANDS)}")
        return 2
    import importlib

    return importlib.import_module(f"rlcore.cli.{argv[0]}").main(argv[1:])


def script() -> int:
    """Run the command line; pip installs this function as the program `rlcore`."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first that is registered runs last
    codes.append(main(sys.argv[1:]))
    return codes[0]


def _leave(codes: list[int]) -> None:
    """Exit with the command's code as soon as all exit handlers have run. torch's threads are still
    there then, and abort the process now and then while Python is finalised."""
    if codes and "torch" in sys.modules:
        for found in gc.get_objects():  # open files of users' functions, stdout and stderr
            if issubclass(type(found), io.IOBase):
                with suppress(Exception):
                    found.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(script())
