"""A run on a virtual cluster: the configuration of a real run, and what it would take there.

Every command of the simulator, `--dry-run` and the planner make a `SimJob` and take their seconds
from it. Policies come from `trainer/policies.py`, as in training, and a configuration that training
refuses is refused here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlcore import algos
from rlcore.config import resolve, rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.size import ModelSize, size_of
from rlcore.mcore.layout import check_model, layout_of
from rlcore.records import Request
from rlcore.sim.cost import CONSTANTS, Constants, EngineCost, engine_cost
from rlcore.sim.drafts import REAL, DraftGain
from rlcore.sim.phases import (
    Layout,
    TrainingCost,
    offload_s,
    resize_s,
    train_row,
    training_cost,
)
from rlcore.sim.profile import EngineMeasurements
from rlcore.sim.rewards import Rewards
from rlcore.sim.workload import Workload
from rlcore.trainer import memory, policies
from rlcore.trainer.plan import TrainRow
from rlcore.utils.errors import ConfigError
from rlcore.utils.gpus import Gpu

RowOf = Callable[[Request], int]


def config(*keys: str) -> Config:
    """Return the configuration of a run with these keys, written as on the command line."""
    needed = ("--model.path", "model", "--data.train", "data", "--eval.every", "0")
    given = (*needed, "--rollout.engine", "sglang", *keys)
    return resolve.parse(given, {"algo": algos.config_class})


@dataclass(frozen=True, kw_only=True)
class SimJob:
    """A run on a virtual cluster."""

    name: str
    cfg: Config
    hf: HFConfig
    gpu: Gpu
    gpus: int
    """GPUs of the run. A judge with GPUs of its own has them besides."""
    workload: Workload
    rewards: Callable[[RowOf], Rewards] = lambda row_of: Rewards()
    """Function that makes the reward scorers of a run, which may adapt during the run. Its argument
    returns the data set row of a request's prompt."""
    judge_bytes: float = 0.0
    """Bytes of each GPU that a judge's weights take."""
    measured: Mapping[int, EngineMeasurements] = field(default_factory=dict)
    """Measured costs of engines by `tp` (`rlcore profile`), instead of the cost model's."""
    is_roll: bool = False
    """Whether the job runs in ROLL, which pads samples and has an overhead of its own
    (`Constants`)."""
    overlap_logprobs: bool = False
    """Whether idle GPUs compute log-probs of finished responses during rollout (RLHFuse)."""
    measured_training: TrainingCost | None = None
    """Measured cost of training on all GPUs of the cluster, instead of the cost model's."""
    gain: DraftGain | None = REAL
    """What drafts from history gain, with --rollout.draft history; None: it is not known."""
    constants: Constants = CONSTANTS

    def __post_init__(self) -> None:
        """Refuse what training refuses.

        Raises:
            ConfigError: the configuration is invalid, or does not fit the cluster.
        """
        rules.check(self.cfg)
        if problems := rules.of_world(self.cfg, self.gpus, self.gpu.per_node):
            raise ConfigError("\n".join(problems))
        layout_of(self.cfg.train, self.train_gpus, 0)
        check_model(self.hf, self.cfg.train)
        if problem := self.problem(self.cfg.rollout.tp):
            raise ConfigError(problem)

    @property
    def drafts(self) -> DraftGain | None:
        """Tokens per forward with drafts; None without drafts. If the gain of --rollout.draft is
        not known, raise ConfigError."""
        draft = self.cfg.rollout.draft
        if draft == "ngram":
            raise ConfigError("--rollout.draft ngram: its gain is not known; simulate history")
        if draft == "none":
            return None
        if self.gain is None:
            raise ConfigError(f"--rollout.draft {draft}: its gain in this run is not known")
        return self.gain

    @property
    def rollout_gpus(self) -> int:
        """Number of GPUs that sample."""
        return self.cfg.cluster.rollout_ranks or self.gpus

    @property
    def train_gpus(self) -> int:
        """Number of GPUs that train."""
        return self.gpus - self.cfg.cluster.rollout_ranks

    @cached_property
    def model(self) -> ModelSize:
        return size_of(self.hf, lora=self.cfg.lora)

    def problem(self, tp: int) -> str:
        """Return why engines of `tp` GPUs are not possible; "" if they are."""
        sized = policies.with_tp(self.cfg, tp)
        if problems := memory.make_sampler(sized, self.hf, 0, gpu_bytes=0).problems:
            return problems[0]
        try:
            room = self.engine(tp).cache_tokens
        except ConfigError as error:
            return str(error)
        longest = self.workload.prompt_tokens + self.workload.cap
        if room < longest:
            return (
                f"an engine over {tp} x {self.gpu.name} has room for {room:.0f} tokens, but the "
                f"longest prompt and response have {longest}"
            )
        return ""

    def engine(self, tp: int) -> EngineCost:
        """Return the costs of an engine of `tp` GPUs. Raise ConfigError if there is no room for its
        weights, or it was not measured."""
        if self.measured:
            if tp not in self.measured:
                raise ConfigError(f"engines of {tp} GPUs were not measured")
            return self.measured[tp].cost
        r = self.cfg.rollout
        cost = engine_cost(
            self.model,
            self.gpu,
            tp,
            utilization=r.gpu_memory_utilization,
            other_bytes=self.judge_bytes,
            constants=self.constants,
        )
        if not r.kv_cache_tokens:
            return cost
        return replace(cost, cache_tokens=min(cost.cache_tokens, r.kv_cache_tokens * tp // r.tp))

    def layout(self, gpus: int) -> Layout:
        """Return the learner's layout on `gpus` GPUs."""
        t = self.cfg.train
        samples = self.cfg.data.prompts_per_step * self.cfg.rollout.samples_per_prompt
        return Layout(
            gpus=gpus,
            tp=t.tp,
            pp=t.pp,
            vpp=t.vpp,
            pp_layers=t.pp_layers,
            cp=t.cp,
            ep=t.ep,
            etp=t.etp,
            recompute=t.recompute,
            micro_batch=t.tokens_per_micro_batch,
            updates=samples // (t.samples_per_update or samples),
            epochs=t.epochs,
            offload=not self.cfg.cluster.rollout_ranks,
        )

    @cached_property
    def training(self) -> TrainingCost:
        """Cost of training on all GPUs that train."""
        return self.training_on(self.train_gpus)

    def training_on(self, gpus: int) -> TrainingCost:
        """Return the cost of training on `gpus` GPUs."""
        if (measured := self.measured_training) is not None:
            token_s, layout = measured.token_s * self.gpus / gpus, self.layout(gpus)
            return replace(
                measured, token_s=token_s, micro_batch=layout.micro_batch, updates=layout.updates
            )
        cost = training_cost(
            self.model,
            self.gpu,
            self.layout(gpus),
            shares_prefix=rules.shares_prefix(
                self.cfg.train, self.cfg.model.dtype, self.hf.head_dim, cuda=True
            ),
            reference=self.cfg.algo.needs_reference,
            rollout_tp=self.cfg.rollout.tp,
            apart=bool(self.cfg.cluster.rollout_ranks),
            constants=self.constants,
        )
        if self.is_roll:
            cap = self.constants.padding * self.workload.cap
            padded = cost.padded(self.workload.prompt_tokens + cap)
            return replace(padded, step_s=padded.step_s + self.constants.overhead_s)
        return cost

    def train_s(self, rows: Sequence[TrainRow]) -> float:
        """Return the seconds of log-probs and updates on the samples of a step."""
        work = self.training.work(rows)
        return self.training.update_s(work) + self.training.logprobs_s(work) + self.training.step_s

    def drawn(self) -> list[TrainRow]:
        """Return the samples of a step with one random draw of response lengths."""
        w, count = self.workload, self.cfg.rollout.samples_per_prompt
        return [
            train_row(str(row), w.prompt_tokens, n)
            for row in range(self.cfg.data.prompts_per_step)
            for n in w.lengths(row, count, self.cfg.run.seed)
        ]

    def resize_s(self, tp: int) -> float:
        """Return the seconds to change to engines of `tp` GPUs."""
        if self.measured:
            return self.measured[tp].start_s
        return resize_s(self.model, self.gpu, tp, self.constants)

    @property
    def offload_s(self) -> float:
        """Seconds in which half of the engines leave their GPUs to the learner (--mode stream)."""
        if self.measured_training is not None:
            return 0.0  # a part of the measured steps, if there is any
        return offload_s(self.model, self.gpu, self.gpus, self.constants)

    def with_(self, name: str, *keys: str, **fields: Any) -> "SimJob":
        """Return this job under another name, with further keys and fields."""
        return replace(self, name=name, cfg=resolve.with_keys(self.cfg, keys), **fields)
