"""Check for `--dry-run` all inputs that a run opens before its first step.

Each check calls the same function as the run, so it reports the same error. Not checked are
resources that another process may hold (the run's folder, a port), checksums of checkpoints, and
errors that appear only during a step.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from rlcore.cli import world
from rlcore.cli.builders import teachers
from rlcore.cli.builders.engine import check_engine
from rlcore.cli.builders.folder import cannot_be_made, run_folder
from rlcore.cli.builders.learner import total_updates
from rlcore.cli.builders.model import with_room
from rlcore.cli.builders.prompts import (
    counts_rows,
    load_data,
    load_demonstrations,
    run_tokenizer,
    with_tasks,
)
from rlcore.cli.builders.rewards import judge_sections, own_judges
from rlcore.cli.builders.sharing import address_of, check_mux
from rlcore.cli.builders.sizes import size_policy
from rlcore.cli.builders.weights import check_allocator
from rlcore.config.schema import Config
from rlcore.data import prompts
from rlcore.data.hub import UnreachableError, is_name
from rlcore.hf import hub
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.names import HEAD, expected
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.hf.weights import WeightReader
from rlcore.mcore.check import check as check_learner
from rlcore.mcore.check import check_replay
from rlcore.mcore.layout import layout_of
from rlcore.mcore.schedule import learning_rate
from rlcore.metrics.sinks import check_wandb
from rlcore.mux.profile import Profile
from rlcore.rewards.judge import mps
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.engine import key_of
from rlcore.rewards.judge.rubric import Rubric, verdict_ids
from rlcore.rollout.replay import EventLog
from rlcore.rollout.round_log import Log
from rlcore.rollout.transport import listening_host
from rlcore.trainer import callbacks, resume
from rlcore.trainer.policies import estimator, make_elastic
from rlcore.utils.errors import ConfigError


@dataclass
class Findings:
    """Errors in the inputs of a run, and checks that were not possible on this machine."""

    elsewhere: bool
    """Whether the run is planned for another machine, which may have files that this one lacks."""
    problems: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    """Errors that may not occur where the run starts, by setting such as `--data.train FILE`."""

    @contextlib.contextmanager
    def check(self, setting: str, *, may_lack: bool = False) -> Iterator[None]:
        """Collect a ConfigError of the `with` block in `problems`. If only this machine may lack
        the file, package or network of the setting (`may_lack`), collect the error in `unchecked`.
        """
        try:
            yield
        except ConfigError as error:
            if may_lack or (self.elsewhere and isinstance(error, UnreachableError)):
                self.unchecked[setting] = str(error)
            else:
                self.problems += str(error).splitlines()

    def may_lack(self, path: str) -> bool:
        """Return whether the file or folder is missing here and may exist where the run starts."""
        return self.elsewhere and not Path(path).exists()


class _NoTokenizer:
    """Substitute for a missing tokenizer. It returns no tokens, so no prompt is too long."""

    def encode(self, text: str) -> list[int]:
        return []

    def min_tokens(self, text: str) -> int:
        return 0

    def render_chat(self, messages: object) -> str:
        return ""

    def render_chats(self, chats: Sequence[object]) -> list[str | ConfigError]:
        return [""] * len(chats)


def check(cfg: Config, hf: HFConfig | None, world_size: int, found: Findings) -> None:
    """Add to `found` all errors that a run raises between the check of rules and its first step.

    Args:
        cfg: a configuration that breaks no rule.
        hf: architecture of the model; None if it is not known.
    """
    model = f"--model.path {cfg.model.path}"
    if found.may_lack(cfg.model.path):
        with found.check(model, may_lack=True):
            HFConfig.from_folder(cfg.model.path)
    machine(cfg, hf, world_size, found)
    with found.check("--run.callbacks"):
        callbacks.find(cfg.run.callbacks)
    judges(cfg, found)
    if hf is not None:
        taught(cfg, hf, found)
    with found.check("--mux"):
        check_mux(cfg)
    if cfg.mux.url:
        with found.check(f"--mux.url {cfg.mux.url}", may_lack=found.elsewhere):
            address_of(cfg.mux.url)
    if cfg.mux.profile:
        with found.check(
            f"--mux.profile {cfg.mux.profile}", may_lack=found.may_lack(cfg.mux.profile)
        ):
            Profile.read(Path(cfg.mux.profile))
    saved(cfg, found)
    if hf is not None:
        sizes(cfg, hf, world_size, found)
        weights(cfg, hf, found)
        with contextlib.suppress(ConfigError):  # the function `sizes` has reported this error
            cfg = with_room(cfg, hf)
    data(cfg, tokenizer(cfg, hf, found), found)


def machine(cfg: Config, hf: HFConfig | None, world_size: int, found: Findings) -> None:
    """Check packages, CPU cores, the network and the folder of runs."""
    c = cfg.cluster
    with found.check("the CPU cores", may_lack=found.elsewhere):
        world.check_cores(c.rollout_cores, c.train_cores)
    if c.interface and world_size > 1:  # the run's nodes may have other interfaces
        with found.check(f"--cluster.interface {c.interface}", may_lack=True):
            listening_host("", c.interface)
    with found.check(f"--rollout.engine {cfg.rollout.engine}", may_lack=found.elsewhere):
        check_engine(cfg, hf)
    if not cfg.mux.url:
        with found.check("PYTORCH_ALLOC_CONF"):
            check_allocator(cfg, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if cfg.log.wandb:
        with found.check(f"--log.wandb {cfg.log.wandb}", may_lack=found.elsewhere):
            check_wandb(cfg.log.wandb)
    with found.check("--reward.mps on", may_lack=True):  # this may be a login node without a GPU
        mps.wanted(cfg.reward)
    with found.check(f"--run.dir {cfg.run.dir}", may_lack=found.elsewhere):
        if error := folder_error(run_folder(cfg)):
            raise cannot_be_made(cfg, error)


def folder_error(folder: Path) -> OSError | None:
    """Return the error that creating the folder would raise; None if creation would succeed."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    code, name = 0, folder
    if not at.is_dir():
        code, name = (
            (errno.EEXIST, at) if at in (folder, folder.parent) else (errno.ENOTDIR, folder.parent)
        )
    elif not os.access(at, os.W_OK | os.X_OK):
        code, name = errno.EACCES, at
    return OSError(code, os.strerror(code), str(name)) if code else None


def judges(cfg: Config, found: Findings) -> None:
    """Check rubrics, API keys of judge servers, and model folders of the run's own judges."""
    own = own_judges(cfg)
    for key, section in judge_sections(cfg).items():
        file = section.rubric
        with found.check(f"--{key}.rubric {file}", may_lack=bool(file) and found.may_lack(file)):
            Rubric(section)
        if section.url:
            with found.check(f"--{key}.api_key_env", may_lack=found.elsewhere):
                key_of(section)
        if key in own:
            folder = section.model
            with found.check(f"--{key}.model {folder}", may_lack=found.may_lack(folder)):
                judge(section)


def taught(cfg: Config, hf: HFConfig, found: Findings) -> None:
    """Check folders and tokenizers of the teachers on the run's own GPUs."""
    lacks = found.may_lack(cfg.model.tokenizer or cfg.model.path)  # compared with the teacher's
    for folder in teachers.folders(cfg):
        with found.check(f"--teacher.models {folder}", may_lack=lacks or found.may_lack(folder)):
            teacher = teachers.check(cfg, hf, folder)
            if not hub.is_download(folder):
                WeightReader(folder).check(expected(teacher))


def judge(section: JudgeRewardConfig) -> None:
    """Check a judge's model as the judge's process does before reading weights. If the model cannot
    work, raise the same ConfigError as the process."""
    hf = HFConfig.from_folder(section.model, "--reward.model")
    tokens = load_tokenizer(section.model, key="--reward.model")
    if section.method == "prefill":
        for key in ("good", "bad"):
            verdict_ids(getattr(section, key), tokens.encode, key)
    WeightReader(section.model).check(expected(hf))


def saved(cfg: Config, found: Findings) -> None:
    """Check files of earlier runs: the checkpoint to resume and the log to replay."""
    setting = f"--run.resume {cfg.run.resume}"
    with found.check(setting, may_lack=found.may_lack(cfg.run.resume)):
        resume.check(cfg, run_folder(cfg))
    if path := cfg.debug.replay:
        with found.check(f"--debug.replay {path}", may_lack=found.may_lack(path)):
            if cfg.select.mode == "async":
                EventLog(Path(path), cfg.run.seed)
            else:
                Log(Path(path))


def sizes(cfg: Config, hf: HFConfig, world_size: int, found: Findings) -> None:
    """Check settings against the model and the number of ranks."""
    try:
        layout_of(cfg.train, max(world_size - cfg.cluster.rollout_ranks, 1), 0)
    except ConfigError:
        return  # `dry_run.show` has already reported this error
    plain = replace(cfg.train, transformer_impl="local", apex=False)
    with found.check("--train"):
        check_learner(hf, cfg.model, plain, cfg.lora)
        if cfg.algo.routing_replay != "none":
            check_replay(hf)
    if (cfg.train.transformer_impl, cfg.train.apex) != ("local", False):
        setting = f"--train.transformer_impl {cfg.train.transformer_impl}" + (
            " --train.apex" if cfg.train.apex else ""
        )
        with found.check(setting, may_lack=found.elsewhere or not torch.cuda.is_available()):
            check_learner(hf, cfg.model, cfg.train, cfg.lora)
    with found.check("--train.lr_schedule"):
        total = total_updates(cfg)
        learning_rate(cfg.train, cfg.train.lr_warmup_updates, total)
    with found.check("--rollout.max_tokens"):
        with_room(cfg, hf)
    ranks = world.World(
        rank=0,
        size=world_size,
        local_rank=0,
        device=torch.device("cpu"),
        store=None,
        rollout_ranks=cfg.cluster.rollout_ranks,
    )
    with found.check("--mode stream"):
        make_elastic(cfg, hf, ranks.size)
    with found.check("--rollout.adaptive_tp"):
        size_policy(cfg, hf, ranks)


def weights(cfg: Config, hf: HFConfig, found: Findings) -> None:
    """Check names and shapes of the initial weights of actor, its adapters, and critic."""
    if path := cfg.lora.path:
        with found.check(f"--lora.path {path}", may_lack=found.may_lack(path)):
            peft.reader(path, hf, cfg.lora)
    if cfg.model.random_init:
        return
    folders = {"--model.path": cfg.model.path}
    if estimator(cfg) == "gae" and cfg.critic.path:
        folders["--critic.path"] = cfg.critic.path
    for key, folder in folders.items():
        if f"{key} {folder}" in found.unchecked:
            continue
        if hub.is_download(folder) and not any(Path(folder).glob("*.safetensors")):
            continue  # The run downloads them.
        wanted = {n: s for n, s in expected(hf).items() if key == "--model.path" or n != HEAD}
        with found.check(f"{key} {folder}", may_lack=found.may_lack(folder)):
            WeightReader(folder).check(wanted)


def tokenizer(cfg: Config, hf: HFConfig | None, found: Findings) -> Tokenizer | None:
    """Load the tokenizer. Return None if it is missing or broken here."""
    folder = cfg.model.tokenizer or cfg.model.path
    if f"--model.path {folder}" in found.unchecked or (hf is None and not cfg.model.tokenizer):
        return None  # the error in --model.path is already reported
    with found.check(f"--model.tokenizer {folder}", may_lack=found.may_lack(folder)):
        return run_tokenizer(cfg, hf.eos_ids if hf is not None else ())
    return None


def data(cfg: Config, tokens: Tokenizer | None, found: Findings) -> None:
    """Check the first usable row of every file. If an invalid row, or too few rows, can end the
    run, check all rows."""
    cfg = with_tasks(cfg)
    if counts_rows(cfg) and tokens is not None:
        sources = (*cfg.data.train, *cfg.data.val, *cfg.data.demonstrations)
        if not any(found.may_lack(s) for s in sources if s not in prompts.TASKS):
            with found.check("--data"):
                load_data(cfg, tokens)
            return
    for source in prompts.entries(cfg.data, "demonstrations"):
        lacks = not is_name(source) and found.may_lack(source)
        with found.check(f"--data.demonstrations {source}", may_lack=lacks):
            if tokens is not None:
                load_demonstrations(cfg, tokens, [source], cap=1)
            else:
                next(prompts.rows_of(Path(source)), None)
    one = replace(cfg.data, num_prompts=1, num_val_prompts=1)
    for key in ("train", "val"):
        here = []
        for source in prompts.entries(cfg.data, key):
            if source in prompts.TASKS or not found.may_lack(source):
                here.append(source)
                continue
            with found.check(f"--data.{key} {source}", may_lack=not is_name(source)):
                prompts.read_file(Path(source), source, one, tokens or _NoTokenizer())
        if here and (tokens is not None or not prompts.TASKS.keys() & set(here)):
            with found.check(f"--data.{key}"):
                some = tuple(here)
                if key == "train":
                    of = replace(one, train=some)
                    rows = prompts.load(of, "train", tokens or _NoTokenizer(), cfg.run.seed)
                    rows[0]  # an error here: the tokenizer lacks a character of a generated task
                else:
                    of = replace(one, val=some)
                    prompts.load(of, "val", tokens or _NoTokenizer(), cfg.run.seed)
