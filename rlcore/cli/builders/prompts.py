"""Load the prompts, their order and the validation sets, on rank 0."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from rlcore.config.schema import Config
from rlcore.data import conversations, prompts
from rlcore.data.conversations import Demonstration
from rlcore.envs import registry as envs
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.hf.tool_calls import family_of
from rlcore.records import Prompt
from rlcore.trainer.policies import make_source, order_of
from rlcore.trainer.progress import Data
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce

_LIMIT = "--data.max_prompt_tokens + --rollout.max_tokens ="


def with_tasks(cfg: Config) -> Config:
    """If the environment generates its own prompts, set them as training and validation data."""
    task = cfg.env.TASK
    if not task or (cfg.data.train, cfg.data.val) == ((task,), (task,)):
        return cfg
    val = (task,) if cfg.data.val or cfg.eval.every else ()
    announce("prompts", f"generated task {task} of --env {cfg.select.env}")
    return replace(cfg, data=replace(cfg.data, train=(task,), val=val))


def run_tokenizer(cfg: Config, eos_ids: Sequence[int]) -> Tokenizer:
    """Load the tokenizer of a run; its chat template shows the tools of the environment. Raises
    ConfigError if it cannot."""
    found = load_tokenizer(cfg.model.tokenizer or cfg.model.path, eos_ids=eos_ids)
    if not cfg.select.env:
        return found
    tools = envs.resolve(cfg.select.env).tools(cfg.env)
    if not tools:
        return found
    if not is_chat(cfg):
        raise ConfigError(
            f"--data.template {cfg.data.template}: --env {cfg.select.env} shows tools by the chat "
            "template; set --data.template chat"
        )
    family_of(found.chat_template)
    found.show_tools(tools)
    return found


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
    further = load_demonstrations(cfg, tokenizer, prompts.entries(cfg.data, "demonstrations"))
    return Data(order=order, source=source, eval_sets=eval_sets, demonstrations=further)


def load_demonstrations(
    cfg: Config, tokenizer: Tokenizer, entries: Sequence[str], cap: int = 0
) -> list[Demonstration]:
    """Load the rows of entries of data.demonstrations, at most `cap` of each (0: all).

    Raises:
        ConfigError: an entry is a generated task, cannot be read, or has no usable row.
    """
    if tasks := prompts.TASKS.keys() & set(entries):
        raise ConfigError(
            f"--data.demonstrations {min(tasks)}: a generated task has no responses; give files"
        )
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    settings = replace(cfg.data, max_prompt_tokens=longest)
    if not is_chat(cfg):
        settings = replace(settings, template="none")
    found: list[Demonstration] = []
    for name, entry in zip(prompts.names_of(entries), entries, strict=True):
        rows = conversations.read(Path(entry), settings, tokenizer, cap, limit=_LIMIT)
        found += [msgspec.structs.replace(row, dataset=name) for row in rows]
    return found
