"""`python -m rlcore tiny --out FOLDER --seed N`: make a tiny model and warm-start it by SFT.

The result is a Hugging Face folder (Qwen3, or Qwen3-MoE with `--experts`; tokenizer of the task's
characters). The model solves the generated task of `--task` (default `label`) about half of the
time, so that RL can improve it. If the folder already has a model, the command does nothing.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # importing torch would slow down the command line
    from rlcore.cli.world import World
    from rlcore.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Make a tiny Qwen3 model and warm-start it on a generated task by supervised fine-tuning."""

    out: Path
    """Folder to which the model is written."""
    task: Literal["label", "oneline", "frozenlake", "calc"] = "label"
    """Generated task to learn; its characters are the vocabulary."""
    seed: int = 0
    """Seed of weights and training data."""
    steps: int = 500
    """Maximum number of steps, over which the learning rate decays to a tenth."""
    lr: float = 3e-3
    """Learning rate after warm-up."""
    rows_per_step: int = 32
    """Number of training rows per step."""
    probe_every: int = 5
    """Number of steps between two measurements of the accuracy."""
    probe_from: int = 100
    """First step at which the accuracy is measured."""
    probe_prompts: int = 512
    """Number of prompts on which the accuracy is measured."""
    target: float = 0.5
    """Accuracy of sampled answers at which the warm start ends."""
    hidden: int = 128
    """Hidden size of the model."""
    layers: int = 3
    """Number of layers."""
    heads: int = 4
    """Number of attention heads."""
    kv_heads: int = 2
    """Number of key-value heads."""
    head_dim: int = 32
    """Size of an attention head."""
    intermediate: int = 256
    """Intermediate size of the MLP, or of a token's experts together."""
    experts: int = 0
    """Number of experts of a layer; 0: a dense model."""
    experts_per_token: int = 2
    """Number of experts that a token uses, with `experts`."""
    max_tokens: int = 144
    """Maximum number of tokens in a response."""


def main(argv: Sequence[str]) -> int:
    """Make and train the model, unless its folder already has one. Return the exit code."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    import tyro

    cfg = tyro.cli(TinyConfig, args=list(argv), prog="rlcore tiny", use_underscores=True)
    if (cfg.out / "model.safetensors").is_file():
        print(f"{cfg.out} exists; choose another --out")
        return 0
    from rlcore.hf.weights import MODEL_FILES, check_target

    check_target(cfg.out, MODEL_FILES)
    return run(cfg)


def run(cfg: TinyConfig) -> int:
    """Train and save the model; called on every rank. Return the exit code."""
    from rlcore.cli import world
    from rlcore.cli.builders import folder
    from rlcore.cli.train import failed

    start = cfg.out.with_name(cfg.out.name + ".start")
    settings = settings_of(cfg, start)
    try:
        here = world.join(settings.cluster.timeout_s, 0, folder.run_folder(settings))
    except ConfigError:
        raise
    except Exception as e:
        rank = os.environ.get("RANK", "0")
        return exits.fail(e, folder.run_folder(settings) / "logs" / f"rank{rank}.log")
    try:
        folder.open_folder(settings, here)
        accuracy = train_model(cfg, settings, start, here)
    except Exception as e:
        return failed(settings, here, e)
    finally:
        if here.health is not None:
            here.health.close()
    world.leave(here)  # after this barrier of all ranks, no rank reads the start folder
    if here.rank == 0:
        shutil.rmtree(start)
        if accuracy < cfg.target:
            print(
                f"--target {cfg.target}: not reached within --steps {cfg.steps}; raise --steps or "
                f"lower --target, the accuracy is {accuracy:.3f}",
                file=sys.stderr,
            )
    return 0


def train_model(cfg: TinyConfig, settings: "Config", start: Path, here: "World") -> float:
    """Make, train and save a model, and return its accuracy. `start`: folder of random weights."""
    import numpy as np

    from rlcore.cli import builders
    from rlcore.cli.builders.prompts import run_tokenizer
    from rlcore.data import conversations, prompts
    from rlcore.data.conversations import Demonstration
    from rlcore.hf.weights import save_folder
    from rlcore.trainer import warm_start
    from rlcore.utils import collective
    from rlcore.utils.log import log

    task = prompts.TASKS[cfg.task]
    if here.rank == 0:
        write_start(cfg, start)
    collective.barrier()
    tokenizer = run_tokenizer(settings, ())
    encode = prompts.encoder(settings.data, tokenizer)
    probe = [
        task.to_prompt(task.make("probe", cfg.seed, i), i, encode) for i in range(cfg.probe_prompts)
    ]
    log.info(
        "warm start: trains a tiny model on examples of the task %s, until it solves %g %% of %d "
        "probe prompts; the model goes to %s",
        cfg.task,
        100 * cfg.target,
        cfg.probe_prompts,
        cfg.out,
    )
    built = builders.run(settings, here, eval_sets=[("probe", probe)])
    try:
        turns = getattr(task, "TURNS", task.CHARS)

        def demonstrations(index: int) -> Demonstration:
            row = task.make("train", cfg.seed, index)
            if isinstance(task, prompts.ChatTaskModule):
                chat = {settings.data.prompt_field: task.conversation(row)}
                return next(conversations.demonstrations(chat, settings.data, tokenizer))
            response = [*tokenizer.encode(row.demonstration), tokenizer.eos_ids[0]]
            learn = [c in turns for c in row.demonstration]  # each character is one token
            return Demonstration(
                prompt=np.array(tokenizer.encode(row.prompt), np.int32),
                response=np.array(response, np.int32),
                learn=np.array([*learn, True]),
            )

        accuracy = warm_start.train(
            built,
            demonstrations,
            rows_per_step=cfg.rows_per_step,
            probe_every=cfg.probe_every,
            probe_from=cfg.probe_from,
            target=cfg.target,
        )
        save_folder(built.learner.export(), built.hf, start, None if here.rank else cfg.out)
        if here.rank == 0:
            facts = {"probe_accuracy": accuracy, "steps": built.step, "seed": cfg.seed}
            (cfg.out / "warm_start.json").write_text(json.dumps(facts) + "\n")
            log.info("warm start: probe accuracy %.3f, model in %s", accuracy, cfg.out)
    finally:
        built.close()
    return accuracy


def settings_of(cfg: TinyConfig, start: Path) -> "Config":
    """Return the settings of the training run, whose folder is beside the model's folder."""
    from rlcore.cli.settings import parse
    from rlcore.config.schema import (
        CheckpointConfig,
        DataConfig,
        LogConfig,
        ModelConfig,
        RolloutConfig,
        RunConfig,
        TrainConfig,
    )

    # Reward `exact` compares programs as texts; running all probes in a sandbox takes minutes.
    keys = {
        "label": ["--reward.answer_marker", ">"],
        "frozenlake": ["--env", "frozenlake", "--env.max_turn_tokens", "1"],
        "calc": ["--env", "tools", "--env.tools", "calc", "--env.calls", "native"],
    }
    patience = ["--env.timeout_s", "600"] if cfg.task == "calc" else []  # all probes start at once
    base = parse(["--reward", "exact", *keys.get(cfg.task, []), *patience])
    return replace(
        base,
        run=RunConfig(
            dir=str(cfg.out.parent),
            name=f"warm_start-s{cfg.seed}",
            seed=cfg.seed,
            steps=cfg.steps,
            resume="fresh",
        ),
        model=ModelConfig(path=str(start), dtype="float32", random_init=True),
        data=DataConfig(
            train=(cfg.task,),
            prompts_per_step=cfg.rows_per_step,
            template="chat" if cfg.task == "calc" else "auto",
        ),
        rollout=RolloutConfig(samples_per_prompt=1, max_tokens=cfg.max_tokens),
        train=TrainConfig(
            lr=cfg.lr,
            lr_schedule="linear",
            lr_warmup_updates=20,
            min_lr=cfg.lr / 10,
            beta2=0.98,
            weight_decay=0.01,
            tokens_per_micro_batch=4096,
        ),
        checkpoint=CheckpointConfig(every=0, every_minutes=0, at_end=False),
        log=LogConfig(tensorboard=False),
    )


def write_tokenizer(task: str, folder: Path) -> int:
    """Write the tokenizer of a generated task, and return the size of its vocabulary."""
    from rlcore.data.prompts import TASKS, ChatTaskModule
    from rlcore.hf.tokenizer import make_char_tokenizer

    found = TASKS[task]
    if not isinstance(found, ChatTaskModule):
        make_char_tokenizer(folder, found.CHARS)
        return len(found.CHARS) + 2
    make_char_tokenizer(
        folder, found.CHARS, eos=found.END, words=found.WORDS, template=found.TEMPLATE
    )
    return len(found.CHARS) + len(found.WORDS) + 2


def write_start(cfg: TinyConfig, folder: Path) -> None:
    """Write config.json and tokenizer of the tiny model; the run starts from random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": write_tokenizer(cfg.task, folder),
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.intermediate,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if cfg.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": cfg.experts,
            "num_experts_per_tok": cfg.experts_per_token,
            "moe_intermediate_size": cfg.intermediate // cfg.experts_per_token,
            "norm_topk_prob": True,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
