"""Check the inputs of a run: its settings, and data and rewards on some rows."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from rlcore.cli import inputs
from rlcore.cli.builders.model import model_config, with_room
from rlcore.cli.builders.prompts import run_tokenizer, with_tasks
from rlcore.cli.checks import CheckResult, disk
from rlcore.config import rules
from rlcore.config.schema import Config, RewardConfig, reward_sections
from rlcore.data import prompts
from rlcore.envs import registry as envs
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer
from rlcore.mcore.layout import layout_of
from rlcore.records import Prompt, RewardResult, Sample, request_of, training_group
from rlcore.rewards import registry
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.service import RewardService
from rlcore.utils.errors import ConfigError

ROWS = 10
"""Number of rows of each data file that are rendered and scored."""
SCORE_S = 300.0
"""Maximum seconds until a reward has scored all rows."""


def check(cfg: Config, world_size: int, ranks_per_node: int) -> list[CheckResult]:
    """Return the results for the run as a whole."""
    try:
        hf = model_config(cfg)
    except ConfigError as error:
        return [CheckResult("settings", "FAIL", line) for line in str(error).splitlines()]
    found = settings(cfg, hf, world_size, ranks_per_node)
    found.append(disk.check(cfg, hf))
    if any(result.state == "FAIL" for result in found if result.check == "settings"):
        return [*found, CheckResult("data", "SKIP", "the settings are refused")]
    try:
        tokens = run_tokenizer(cfg, hf.eos_ids)
        sets = rows(cfg, hf, tokens)
    except ConfigError as error:
        return [*found, CheckResult("data", "FAIL", str(error))]
    found += [data(name, some) for name, some in sets.items()]
    return found + rewards(cfg, [row for some in sets.values() for row in some], tokens)


def settings(cfg: Config, hf: HFConfig, world_size: int, ranks_per_node: int) -> list[CheckResult]:
    """Make the checks of `--dry-run`, except that of the memory plan."""
    problems = rules.broken(cfg)
    found = inputs.Findings(elsewhere=False)
    if not problems:
        problems = rules.of_world(cfg, world_size, ranks_per_node)
        with found.check("--train"):
            layout_of(cfg.train, max(world_size - cfg.cluster.rollout_ranks, 1), 0)
        inputs.check(cfg, hf, world_size, found)
    problems += found.problems
    results = [CheckResult("settings", "FAIL", line) for line in dict.fromkeys(problems)]
    results += [CheckResult("settings", "WARN", line) for line in found.unchecked.values()]
    said = "keys, model, tokenizer, weights and files are as the run needs them"
    return results or [CheckResult("settings", "PASS", said)]


def rows(cfg: Config, hf: HFConfig, tokens: Tokenizer) -> Mapping[str, list[Prompt]]:
    """Render the first rows of every data file and task, by data set.

    Raises:
        ConfigError: a file has no usable row.
    """
    cfg = with_room(with_tasks(cfg), hf)
    some = dataclasses.replace(cfg.data, num_prompts=ROWS, num_val_prompts=ROWS)
    train = prompts.load(some, "train", tokens, cfg.run.seed)
    found: dict[str, list[Prompt]] = {}
    for row in (train[i] for i in range(len(train))):
        found.setdefault(row.dataset, []).append(row)
    for name, held_out in prompts.load(some, "val", tokens, cfg.run.seed):
        found[name if name not in found else f"{name} of --data.val"] = list(held_out.rows)
    return found


def data(name: str, some: Sequence[Prompt]) -> CheckResult:
    """Describe the rendered rows of a data set."""
    lengths = [len(row.tokens) for row in some]
    text = f"{name}: {len(some)} rows, prompts of {min(lengths)} to {max(lengths)} tokens"
    return CheckResult("data", "PASS", text)


def rewards(cfg: Config, some: Sequence[Prompt], tokens: Tokenizer) -> list[CheckResult]:
    """Score the reference answer of each row and an empty answer, with each reward of the run."""
    if cfg.select.env and not envs.is_scored_by_reward(cfg.select.env, cfg.env):
        return [CheckResult("reward", "SKIP", f"--env {cfg.select.env} scores its own episodes")]
    terms = zip(
        registry.parts_of(cfg.select.reward), reward_sections(cfg.reward).values(), strict=True
    )
    return [reward(term.name, section, some, tokens, cfg.run.seed) for term, section in terms]


def reward(
    name: str, section: RewardConfig, some: Sequence[Prompt], tokens: Tokenizer, seed: int
) -> CheckResult:
    """Score reference answers and empty answers with one reward."""
    if isinstance(section, JudgeRewardConfig) and not section.url:
        return CheckResult("reward", "SKIP", f"{name}: only the run loads a judge on its own GPUs")
    reference = registry.resolve(name).reference
    texts = [reference(section, row) for row in some]
    try:
        scores = _scores(name, section, [*some, *some], [*texts, *[""] * len(some)], tokens, seed)
    except (ConfigError, RuntimeError, TimeoutError) as error:
        return CheckResult("reward", "FAIL", f"{name}: {error}")
    right, empty = scores[: len(some)], scores[len(some) :]
    failed = [(row, r.error) for row, r in zip([*some, *some], scores, strict=True) if r.error]
    if failed:
        row, reason = failed[0]
        return CheckResult(
            "reward",
            "FAIL" if len(failed) == len(scores) else "WARN",
            f"{name}: fails for {len(failed)} of {len(scores)} responses, first row {row.index} of "
            f"{row.dataset}: {reason}; check the reward's function and keys",
        )
    known = [i for i, text in enumerate(texts) if text]
    low = [i for i in known if right[i].score <= max(empty[i].score, 0.0)]
    if low:
        row, i = some[low[0]], low[0]
        return CheckResult(
            "reward",
            "WARN",
            f"{name}: {len(low)} of {len(known)} reference answers score no more than an empty "
            f"answer, first row {row.index} of {row.dataset}: {_short(texts[i])} scores "
            f"{right[i].score:g}, an empty answer {empty[i].score:g}; check --data.answer_field, "
            "and the form of answers that the reward expects",
        )
    references = f"reference answers score {_range(right)}" if known else "no reference answers"
    text = f"{name}: {len(some)} rows, {references}, empty answers score {_range(empty)}"
    return CheckResult("reward", "PASS", text)


def _scores(
    name: str,
    section: RewardConfig,
    some: Sequence[Prompt],
    texts: Sequence[str],
    tokens: Tokenizer,
    seed: int,
) -> list[RewardResult]:
    """Return the score of each text as the response to its prompt.

    Raises:
        RuntimeError: the reward cannot run.
        TimeoutError: the scores have not come within `SCORE_S`.
    """
    ids = [request_of(training_group(i), 0) for i in range(len(some))]
    scores: dict[str, RewardResult] = {}
    end, sent = time.monotonic() + SCORE_S, 0
    with RewardService(name, config=section, seed=seed) as service:
        while len(scores) < len(ids):
            while sent < len(ids) and service.room > 0:
                sample = _sample(ids[sent], some[sent], tokens.encode(texts[sent]))
                service.submit(ids[sent], sample, some[sent], texts[sent])
                sent += 1
            scores |= service.poll(1.0)
            if time.monotonic() > end:
                raise TimeoutError(f"has not scored {len(ids)} responses within {SCORE_S:g} s")
    return [scores[id] for id in ids]


def _sample(id: str, prompt: Prompt, tokens: Sequence[int]) -> Sample:
    size = len(tokens)
    return Sample(
        id=id,
        prompt=prompt.tokens,
        tokens=np.array(tokens, np.int32),
        logps=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        finish="stop",
    )


def _range(results: Sequence[RewardResult]) -> str:
    scores = sorted({result.score for result in results})
    return f"{scores[0]:g}" if len(scores) == 1 else f"{scores[0]:g} to {scores[-1]:g}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
