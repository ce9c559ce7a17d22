"""Convert MBPP to train.jsonl and val.jsonl for recipes/code_14b.sh.

    .venv/bin/python tools/prepare_mbpp.py ../shared/data/code/mbpp.jsonl data/code

The question is the task and, since it does not name the function, the first of its tests. Rows keep
test_list and test_setup_code, and without --shown-counts the test that was shown does not score.
Splits are the published ones: task ids 601-974 train, 511-600 validate.
"""

import argparse
import json
from pathlib import Path

SPLITS = {"train": range(601, 975), "val": range(511, 601)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("source", type=Path, help="file mbpp.jsonl")
    p.add_argument("folder", type=Path, help="output folder")
    p.add_argument(
        "--shown-counts", action="store_true", help="score also the test that the prompt shows"
    )
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in a.source.read_text(encoding="utf-8").splitlines()]
    for name, ids in SPLITS.items():
        out = [question(row, a.shown_counts) for row in rows if row["task_id"] in ids]
        text = "".join(json.dumps(row) + "\n" for row in out)
        (a.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{a.folder / name}.jsonl: {len(out)} rows")


def question(row: dict, shown_counts: bool) -> dict:
    """One row for training."""
    tests = row["test_list"]
    return {
        "question": f"{row['text']}\nThe program should pass this test:\n{tests[0]}\n",
        "test_list": tests if shown_counts or len(tests) == 1 else tests[1:],
        "test_setup_code": row["test_setup_code"],
        "task_id": row["task_id"],
    }


if __name__ == "__main__":
    main()
