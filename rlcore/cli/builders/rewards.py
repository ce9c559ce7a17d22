"""Build the rewards of a rank, and plan the memory of judges on its accelerator."""

from collections.abc import Sequence

from rlcore.cli.builders.folder import run_folder
from rlcore.cli.world import World
from rlcore.config.schema import Config, reward_sections
from rlcore.envs import registry as envs
from rlcore.hf.config import HFConfig
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.residency import footprint
from rlcore.rewards.service import RewardService
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.trainer import memory


def make_deadlines(cfg: Config) -> AdaptiveTimeout | None:
    """Return the per-prompt timeouts of rewards; None if no reward has adaptive_timeout."""
    for r in reward_sections(cfg.reward).values():
        if r.adaptive_timeout:  # `rules.py` allows adaptive_timeout for only one reward of a sum
            return AdaptiveTimeout(r.min_timeout_s, r.timeout_s, r.timeout_factor)
    return None


def make_scorer(
    cfg: Config, world: World, deadlines: AdaptiveTimeout | None
) -> RewardService | None:
    """Return the reward service of a rank; None if the environment scores its own episodes."""
    if cfg.select.env and not envs.is_scored_by_reward(cfg.select.env, cfg.env):
        return None
    return RewardService(
        cfg.select.reward,
        config=cfg.reward,
        seed=cfg.run.seed,
        log_file=run_folder(cfg) / "logs" / f"reward{world.rank}.log",
        deadlines=deadlines,
    )


def judges_of(cfg: Config) -> list[tuple[JudgeRewardConfig, HFConfig]]:
    """Return the configuration and architecture of each judge on the run's own GPUs."""
    own = own_judges(cfg).values()
    return [(section, HFConfig.from_folder(section.model, "--reward.model")) for section in own]


def judge_sections(cfg: Config) -> dict[str, JudgeRewardConfig]:
    """Return the configuration sections of all judges, by key such as `reward.judge`."""
    sections = reward_sections(cfg.reward).items()
    return {k: s for k, s in sections if isinstance(s, JudgeRewardConfig)}


def own_judges(cfg: Config) -> dict[str, JudgeRewardConfig]:
    """Return the configuration sections of judges on the run's own GPUs, by key."""
    return {k: s for k, s in judge_sections(cfg).items() if not s.url}


def beside(judges: Sequence[tuple[JudgeRewardConfig, HFConfig]]) -> memory.OtherMemory:
    """Return the memory that judges take on each GPU, for the memory plan."""
    found = [footprint(section, hf) for section, hf in judges]
    if not found:
        return memory.NOBODY
    context = memory.PROCESS_CONTEXT * len(found)
    stay, work, host = (sum(getattr(f, k) for f in found) for k in ("stay", "work", "host"))
    return memory.OtherMemory(
        always=(memory.Item("judge", stay + context, True),),
        generate=(memory.Item("judge's work", work, True, True),),
        host=(memory.Item("judge's layers", host),) if host else (),
    )
