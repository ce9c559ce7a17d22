"""Choose the first model, and its first sizes, that fit the GPU by the memory plan.

    python recipes/largest_fit.py MODEL... -- TOKENS:RECOMPUTE... -- [any key of rlcore train ...]

Every choice is a dry run. MODEL is a name in models/ or a folder. The last line of the output has
train.tokens_per_micro_batch, train.recompute and the model; the reasons go to stderr.
"""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from rlcore.cli import train

MEMORY = ("--cluster.gpu_memory_gb", "--rollout.gpu_memory_utilization", "--rollout.kv_cache")
"""First words of the dry run's errors about memory."""


def dry_run(model: str, words: list[str]) -> tuple[bool, str]:
    """Return whether a choice fits the GPU, and the dry run's sentence about it.

    Raises:
        SystemExit: the settings are refused for another reason, or the memory is not checked.
    """
    facts = Path(__file__).parent / "models" / f"{model}.json"
    os.environ["MODEL_CONFIG"] = str(facts) if facts.is_file() else ""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = train.main(["--model.path", model, *words, "--dry-run"])
    refused = [line for line in err.getvalue().splitlines() if line]
    memory = [
        line for line in refused if line.startswith(tuple(f"cannot run: {m}" for m in MEMORY))
    ]
    if code and refused != memory:
        print(*refused, sep="\n", file=sys.stderr)
        raise SystemExit(code)
    if code:
        return False, refused[0].removeprefix("cannot run: ").partition("; ")[0]
    fits = [line.strip() for line in out.getvalue().splitlines() if line.startswith("  fits ")]
    if not fits:
        raise SystemExit(
            "rlcore: --cluster.gpu_memory_gb 0: this recipe chooses a model by the memory of the "
            "GPU; give its GB, or leave the key out"
        )
    return True, fits[0]


def main(argv: list[str]) -> int:
    """Print the choice; return 2 if no choice fits."""
    cut = argv.index("--")
    models, rest = argv[:cut], argv[cut + 1 :]
    cut = rest.index("--")
    sizes, words = [size.split(":") for size in rest[:cut]], rest[cut + 1 :]
    # --preflight and --report DIR are of the recipe.
    words = [w for w in words if w != "--preflight" and not w.startswith("--report=")]
    if "--report" in words:
        at = words.index("--report")
        del words[at : at + 2]
    if {"--help", "-h"} & set(words):  # The text is the same for all models.
        print(*sizes[0], models[0])
        return 0
    larger = ""
    for model in models:
        for tokens, recompute in sizes:
            keys = ["--train.tokens_per_micro_batch", tokens, "--train.recompute", recompute]
            fits, why = dry_run(model, [*keys, *words])
            choice = f"{model}, {tokens} tokens per micro-batch, recompute {recompute}"
            if fits:
                print(f"rlcore: {choice}: {why}{larger}", file=sys.stderr)
                print(tokens, recompute, model)
                return 0
        larger = f"\nrlcore: {choice}: does not fit: {why}"
    print(f"rlcore: no model fits.{larger}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
