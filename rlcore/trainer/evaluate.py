"""Evaluate on all validation prompts, with the controller and engines of the training."""

import re
from collections.abc import Mapping

from rlcore.metrics import stats
from rlcore.records import Group, Sampling, Work, eval_group, eval_set_of
from rlcore.rollout.worker import RoundCallbacks
from rlcore.trainer.run import Run


def run(run: Run) -> dict[str, float]:
    """Evaluate all validation sets. On rank 0, add `val-core/*` and `val-aux/*` to the metrics."""
    cfg = run.cfg.eval
    found = evaluate(run, f"e{run.step}", cfg.temperature, cfg.samples_per_prompt)
    if cfg.greedy:
        for name, value in evaluate(run, f"g{run.step}", 0.0, 1).items():
            if name.endswith("/acc/mean@1"):
                found[name.replace("/acc/mean@1", "/acc/greedy")] = value
    run.progress.add(found)
    return found


def accuracy(found: Mapping[str, float]) -> float | None:
    """Return the mean of the validation sets' sampled accuracies; None if there are none."""
    means = [v for name, v in found.items() if re.fullmatch(r"val-core/.*/acc/mean@\d+", name)]
    return sum(means) / len(means) if means else None


def evaluate(run: Run, tag: str, temperature: float, num_samples: int) -> dict[str, float]:
    """Sample every validation prompt `num_samples` times. Return metrics on rank 0, else {}."""
    cfg = run.cfg
    sampling = Sampling(
        temperature=temperature,
        top_p=cfg.eval.top_p if temperature else 1.0,
        top_k=cfg.eval.top_k if temperature else 0,
        max_tokens=run.sampling.max_tokens,
        stop_ids=run.sampling.stop_ids,
    )
    work = [
        Work(id=eval_group(tag, s, i), prompt=prompt, num_samples=num_samples, sampling=sampling)
        for s, (_, prompts) in enumerate(run.data.eval_sets)
        for i, prompt in enumerate(prompts)
    ]
    end = run.rollout.run(work, callbacks=RoundCallbacks(repair=run.device.repair))
    if run.ranks.rank:
        return {}
    out: dict[str, float] = {}
    for s, (name, _) in enumerate(run.data.eval_sets):
        groups = [g for g in end.groups if eval_set_of(g.id) == s]
        out |= metrics_of(name, groups)
    return out


def metrics_of(name: str, groups: list[Group]) -> dict[str, float]:
    """Return the accuracy and response-length metrics of one validation set."""
    if not groups:
        return {}
    lengths = [n for g in groups for n in g.lengths]
    out = stats.evaluation(
        name,
        {g.id: g.scores for g in groups},
        {g.id: g.answers for g in groups if g.answers},
    )
    out[f"val-aux/{name}/num_prompts"] = float(len(groups))
    out[f"val-aux/{name}/response_length/mean"] = sum(lengths) / len(lengths)
    out[f"val-aux/{name}/response_length/max"] = float(max(lengths))
    return out
