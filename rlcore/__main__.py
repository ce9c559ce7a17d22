"""`python -m rlcore COMMAND`, or `rlcore COMMAND`. Light on purpose: Megatron's checkpoint helper
re-imports this module."""

import sys

COMMANDS = {
    "train": "train a model; --dry-run shows what would run",
    "sft": "make and warm-start the tiny model",
    "judge": "make the tiny judge of recipes/judge_tiny.sh",
    "plot": "draw runs: python -m rlcore plot RUN...",
    "view": "a page of a run's rollouts, to read in a browser: python -m rlcore view RUN",
    "trace": "what all ranks did when, for ui.perfetto.dev: python -m rlcore trace RUN",
    "doctor": "why a run stands or ended, from its flight records: python -m rlcore doctor RUN",
    "explain": "the arithmetic of a batch: python -m rlcore explain --data.prompts_per_step 64",
    "sim": "what a cluster would do: python -m rlcore sim run --gpus 32",
    "mux": "many jobs on the same nodes, phase by phase: mux up, add, status, down",
    "profile": "measure the rollout engine here: the best --rollout.tp, and a table for sim",
    "env": "what is installed here, to paste into a report",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m rlcore COMMAND [--section.key value ...]\n")
        for name, what in COMMANDS.items():
            print(f"  {name:8} {what}")
        print("\n  train --help lists every key.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"rlcore {argv[0]}: there is no such command; known: {', '.join(COMMANDS)}")
        return 2
    import importlib

    return importlib.import_module(f"rlcore.cli.{argv[0]}").main(argv[1:])


def script() -> int:
    """The program `rlcore`, which pip makes."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(script())
