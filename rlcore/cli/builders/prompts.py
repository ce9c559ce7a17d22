"""Load the prompts, their order and the validation sets, on rank 0."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlcore.cli.builders.learner import wants
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.data import prompts
from rlcore.data.data_order import ShuffledEpochs, WeightedEpochs
from rlcore.hf.tokenizer import Tokenizer
from rlcore.records import Prompt
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.tail_batching import TailBatching
from rlcore.trainer.progress import Data
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


def with_tasks(cfg: Config) -> Config:
    """If the environment generates its own prompts, set them as training and validation data."""
    task = cfg.env.TASK
    if not task or (cfg.data.train, cfg.data.val) == ((task,), (task,)):
        return cfg
    val = (task,) if cfg.data.val or cfg.eval.every else ()
    announce("prompts", f"generated task {task} of --env {cfg.select.env}")
    return replace(cfg, data=replace(cfg.data, train=(task,), val=val))


def is_chat(cfg: Config) -> bool:
    """Return whether prompts use the chat template. If so, environments write user messages;
    otherwise, as in generated tasks, environments write plain text."""
    template, tasks = cfg.data.template, prompts.TASKS.keys() & set(cfg.data.train)
    return template == "chat" or (template == "auto" and not tasks)


def counts_rows(cfg: Config) -> bool:
    """Return whether an invalid row, or too few rows, can end the run."""
    data = cfg.data
    of_others = data.drop_duplicates and len(data.train) > 1  # a file may have only duplicates
    return of_others or data.bad_rows == "refuse" or cfg.select.schedule == "tail_batching"


def load_data(
    cfg: Config,
    tokenizer: Tokenizer,
    eval_sets: Sequence[tuple[str, Sequence[Prompt]]] | None = None,
) -> Data:
    """Load prompts, their order and the validation sets, which `eval_sets` replaces if given."""
    if not cfg.run.steps and not cfg.data.train:  # an evaluation alone
        held_out = prompts.load(cfg.data, "val", tokenizer, cfg.run.seed)
        return Data(eval_sets=[(name, found.rows) for name, found in held_out])
    train = prompts.load(cfg.data, "train", tokenizer, cfg.run.seed)
    sizes = train.sizes if isinstance(train, prompts.RowSet) else ()
    order = order_of(cfg, (sizes or [len(train)]) if train.is_finite else None)
    if eval_sets is None:
        held_out = prompts.load(cfg.data, "val", tokenizer, cfg.run.seed)
        prompts.overlap(train, held_out)  # warns of validation prompts in the training data
        eval_sets = [(name, found.rows) for name, found in held_out]
    source = make_source(cfg, order, train.__getitem__)
    return Data(order=order, source=source, eval_sets=eval_sets)


def order_of(cfg: Config, sizes: Sequence[int] | None) -> ShuffledEpochs | WeightedEpochs:
    """Return the order of the training rows, a mixture if data.weights is set. `sizes`: number of
    rows of each entry of data.train; None: an endless task."""
    seed, shuffle = cfg.run.seed, cfg.data.shuffle
    if cfg.data.weights and sizes is not None:
        return WeightedEpochs(sizes, cfg.data.weights, seed, shuffle)
    return ShuffledEpochs(sum(sizes) if sizes is not None else None, seed, shuffle)


def max_replaced(cfg: Config) -> int:
    """Return the number of groups of equal scores that a step replaces at most; 0: none."""
    if cfg.algo.equal_reward_groups != "replace":
        return 0
    return math.ceil(cfg.algo.max_replaced_groups * cfg.data.prompts_per_step)


def make_source(
    cfg: Config, sampler: ShuffledEpochs | WeightedEpochs, prompt_of: Callable[[int], Prompt]
) -> EpochPrompts | TailBatching:
    """Return the prompt source of --schedule. `prompt_of` returns the prompt of a row."""
    sizes = {
        "num_prompts": cfg.data.prompts_per_step,
        "num_samples": cfg.rollout.samples_per_prompt,
    }
    if cfg.select.schedule == "all":

        def next_prompts(n: int) -> list[Prompt]:
            return [prompt_of(row) for _, row in sampler.next(n)]

        return EpochPrompts(
            next_prompts,
            **sizes,
            greedy_baseline=wants(cfg) == "remax",
            num_started=cfg.env.num_groups,
            group_size=cfg.env.group_size,
            max_replaced=max_replaced(cfg),
        )
    tail, rows = cfg.tail, sampler.state()["num_rows"]
    starts = int(tail.eta_prompts * cfg.data.prompts_per_step)
    if rows is not None and rows < starts:
        raise ConfigError(
            f"--data.train {' '.join(cfg.data.train)}: has {rows} prompts but a short round starts "
            f"{starts} different prompts; lower --data.prompts_per_step"
        )
    return TailBatching(
        sampler.next,
        prompt_of,
        **sizes,
        eta_prompts=tail.eta_prompts,
        eta_samples=tail.eta_samples,
        quotas=rules.quotas(cfg) or None,
        max_replaced=max_replaced(cfg),
    )
