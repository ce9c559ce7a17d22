"""Build the rollout engine of a rank (torch or SGLang), with or without environments."""

import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.distributed import TCPStore

from rlcore.cli.builders.folder import run_folder
from rlcore.cli.builders.model import max_model_tokens
from rlcore.cli.world import World, host_of
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.engine import EpisodeEngine, EpisodeHost
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer
from rlcore.mcore.check import check_replay
from rlcore.ops import native
from rlcore.protocols import Engine
from rlcore.records import GroupId, Prompt
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.trainer.policies import with_tp
from rlcore.utils.errors import ConfigError
from rlcore.utils.listen import open_store
from rlcore.utils.log import announce

TORCH_ENGINE = "rlcore.rollout.torch_engine.engine:build"
SGLANG_ENGINE = "rlcore.rollout.sglang_engine.engine:build"


def make_engine(cfg: Config, hf: HFConfig, world: World) -> Engine:
    """Start this rank's engine, or its share of an engine over --rollout.tp ranks.

    Raises:
        ConfigError: SGLang is configured but not installed.
    """
    r = cfg.rollout
    if r.engine == "sglang":
        return _sglang_engine(cfg, hf, world)
    settings = engine_settings(cfg, hf, world)
    inline = r.process == "inline" or (r.process == "auto" and world.size == 1)
    announce(
        "engine", f"torch, {settings['dtype']}, {'in this process' if inline else 'child process'}"
    )
    if inline:
        del settings["config"]
        return TorchEngine(hf, **(settings | {"device": world.device}))
    return ChildEngine(
        TORCH_ENGINE,
        settings,
        threads=r.threads,
        rank=world.rank,
        deadline_s=cfg.cluster.timeout_s,
    )


def engine_settings(cfg: Config, hf: HFConfig, world: World) -> dict[str, Any]:
    """Return the settings of the engine as plain data. For an engine over several ranks, the caller
    adds the position of the rank."""
    r = cfg.rollout
    if cfg.algo.routing_replay != "none":
        check_replay(hf)
    settings = {
        "config": hf.to_dict(),
        "device": str(world.device),
        "dtype": rules.engine_dtype(cfg),
        "seed": cfg.run.seed,
        "max_running": r.max_running_requests,
        "cache_tokens": r.kv_cache_tokens,
        "max_model_tokens": max_model_tokens(cfg, hf),
        "threads": r.threads,
        "progress_s": r.progress_interval_s,
        "fp32_head": rules.has_fp32_lm_head(cfg, cuda=world.device.type == "cuda"),
        "records_routes": cfg.algo.routing_replay == "rollout",
        "rank": world.rank,
    }
    if r.engine == "torch":
        return settings | {
            "true_on_policy": cfg.train.true_on_policy,
            "decode_floor_ms": cfg.debug.decode_floor_ms,
            "quantize": r.quantize,
            "draft": r.draft,
            "draft_settings": draft_settings(cfg),
        }
    check_engine(cfg, hf)
    sglang = {k: _value(v) for k, _, v in (x.partition("=") for x in r.sglang_args)}
    if cfg.train.true_on_policy:
        sglang["enable_deterministic_inference"] = True
    return settings | {
        "memory_fraction": r.gpu_memory_utilization,
        "ep": r.ep,
        "draft": r.draft,
        "draft_width": cfg.draft.verify_tokens,
        "draft_settings": draft_settings(cfg),
        "draft_matcher": draft_matcher(cfg, world.device.type),
        "sglang": sglang,
        "deadline_s": cfg.cluster.timeout_s,
    }


def check_engine(cfg: Config, hf: HFConfig | None) -> None:
    """Raise ConfigError if SGLang is configured but is not installed or does not support the model
    `hf`."""
    if cfg.rollout.engine != "sglang":
        return
    if hf is not None and hf.num_experts and hf.tie_word_embeddings:
        raise ConfigError(
            "--rollout.engine sglang: SGLang does not support tie_word_embeddings for mixtures of "
            "experts, and would sample with an untrained output layer; use --rollout.engine torch"
        )
    if hf is not None and hf.arch == "qwen3_moe" and hf.dense_layers:
        raise ConfigError(
            "--rollout.engine sglang: SGLang gives every layer of a Qwen3-MoE model experts, but "
            "this model has dense layers; use --rollout.engine torch"
        )
    if hf is not None:
        check_experts(cfg, hf)
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "--rollout.engine sglang: SGLang is not installed; run bash tools/setup.sh --sglang, "
            "or set --rollout.engine torch"
        )


def check_experts(cfg: Config, hf: HFConfig) -> None:
    """Raise ConfigError if --rollout.ep does not suit the experts of the model `hf`."""
    ep, sliced = cfg.rollout.ep, max(1, cfg.rollout.tp // cfg.rollout.ep)
    if ep > 1 and not hf.num_experts:
        raise ConfigError(f"--rollout.ep {ep}: the model has no experts; set 1")
    if hf.num_experts % ep:
        raise ConfigError(f"--rollout.ep {ep}: must divide the {hf.num_experts} experts of a layer")
    if hf.num_experts and hf.moe_intermediate_size % sliced:
        raise ConfigError(
            f"--rollout.tp {cfg.rollout.tp} --rollout.ep {ep}: every expert is cut into {sliced} "
            f"slices, which must divide its width {hf.moe_intermediate_size}; raise rollout.ep, so "
            "that fewer ranks share an expert"
        )


def draft_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings of drafting. With --debug.deterministic_order the engine always drafts,
    and only after its index of earlier responses is complete, so drafts do not depend on timing."""
    names = (
        "max_length",
        "initial_length",
        "length_growth",
        "min_match",
        "max_match",
        "max_spec_factor",
        "min_token_prob",
    )
    steady = cfg.debug.deterministic_order
    return {name: getattr(cfg.draft, name) for name in names} | {
        "adaptive": cfg.draft.adaptive and not steady,
        "wait": steady,
    }


def draft_matcher(cfg: Config, device: str) -> Literal["device", "host"]:
    """Return where drafts are matched: on the engine's device or on the host.

    Raises:
        ConfigError: --draft.matcher is device, but rlcore's kernels do not run on the device.
    """
    if not rules.matches_on_device(cfg, device == "cuda"):
        return "host"
    off = os.environ.get("RLCORE_NATIVE") == "0"
    why = "RLCORE_NATIVE is 0" if off else native.obstacle(device)
    if why and cfg.draft.matcher == "device":
        raise ConfigError(
            f"--draft.matcher device: rlcore's kernels do not run here ({why}); {native.REMEDY}, "
            "or set --draft.matcher host"
        )
    return "host" if why else "device"


def _sglang_engine(cfg: Config, hf: HFConfig, world: World) -> ChildEngine:
    """Start SGLang in a child process, since SGLang kills its whole process on an error."""
    plain = engine_settings(cfg, hf, world)
    where = "CUDA" if world.device.type == "cuda" else "CPU"
    tp = f"tp {cfg.rollout.tp}" + (" at the start" if rules.changes_size(cfg) else "")
    tp += f" ep {cfg.rollout.ep}" if cfg.rollout.ep > 1 else ""
    announce("engine", f"sglang on {where}, {plain['dtype']}, {tp}, child process")
    if cfg.rollout.draft != "none":
        overlap = plain["draft_matcher"] == "device" and where == "CUDA"
        scheduler = "overlapped" if overlap else "without overlap"
        announce("draft matcher", f"{plain['draft_matcher']}, scheduler {scheduler}")
    # Numbers of resizes, and of engine starts since the last resize.
    sizes, starts, sized = 0, itertools.count(), cfg
    store: TCPStore | None = None  # of the latest start; deleting it would end it

    def resize(tp: int) -> None:
        nonlocal sizes, starts, sized
        sizes, starts, sized = sizes + 1, itertools.count(), with_tp(cfg, tp)

    def settings() -> dict[str, Any]:
        nonlocal store
        tp, share = sized.rollout.tp, {}
        if tp > 1:
            first = world.rank - world.rank % tp
            nodes = max(1, tp // world.ranks_per_node)
            meeting = f"engine/{sizes}/{first}/{next(starts)}"
            if world.rank == first:
                host = host_of(world, cfg.cluster.interface) if nodes > 1 else "127.0.0.1"
                store = open_store(host)
                world.sealed.set(meeting, f"{host}:{store.port}")
            share = {
                "tp": tp,
                "nodes": nodes,
                "shares": tp,
                "share": world.rank - first,
                "dist_init_addr": world.sealed.get(meeting).decode(),
            }
        return engine_settings(sized, hf, world) | share

    return ChildEngine(
        SGLANG_ENGINE,
        settings,
        threads=cfg.rollout.threads,
        rank=world.rank,
        start_s=cfg.cluster.timeout_s,
        resize=resize,
    )


def _value(text: str) -> Any:
    """Parse a value of --rollout.sglang_args as JSON; keep it as a string if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def make_episodes(
    cfg: Config,
    world: World,
    engine: Engine,
    dialogue: Dialogue,
    decode: Callable[[Sequence[int]], str],
    prompt_of: Callable[[GroupId], Prompt],
    host: EpisodeHost | None,
) -> EpisodeEngine:
    """Wrap the engine of a rank so that its responses are episodes of an environment. With
    --debug.deterministic_order all episodes advance turn by turn in lockstep."""
    processes = "harnesses" if host else f"{cfg.env.workers} worker processes"
    announce("env", f"{cfg.select.env}, {processes}")
    return EpisodeEngine(
        engine,
        cfg.select.env,
        envs.resolve(cfg.select.env),
        cfg.env,
        dialogue=dialogue,
        decode=decode,
        prompt_of=prompt_of,
        seed=cfg.run.seed,
        barrier=cfg.debug.env_barrier or cfg.debug.deterministic_order,
        log_file=run_folder(cfg) / "logs" / f"env{world.rank}.log",
        host=host,
    )


def make_host(cfg: Config, hf: HFConfig, world: World, tokenizer: Tokenizer) -> EpisodeHost | None:
    """Make what plays the episodes of a rank, if the environment has no processes of its own."""
    make = envs.resolve(cfg.select.env).host
    if make is None:
        return None
    return make(
        cfg.env,
        tokenizer,
        num_tokens=hf.vocab_size,
        max_tokens=max_model_tokens(cfg, hf),
        log_file=run_folder(cfg) / "logs" / f"env{world.rank}.log",
    )
