"""Command line to configuration: selectors, overrides, one-sentence errors."""

import ast
import dataclasses
import inspect
import itertools
import json
import math
import re
import textwrap
from pathlib import Path

import pytest

from rlcore import algos
from rlcore.algos.base import TOKEN_BASELINES
from rlcore.cli.judge import JudgeConfig
from rlcore.cli.settings import parse
from rlcore.cli.tiny import TinyConfig
from rlcore.config import other_names, resolve, rules, schema
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.rewards import registry as rewards


def test_the_last_occurrence_of_a_key_wins():
    cfg = parse(["--run.seed", "1", "--train.lr", "1e-3", "--run.seed=7"])
    assert (cfg.run.seed, cfg.train.lr) == (7, 1e-3)


def test_lists_are_replaced_not_extended():
    assert parse(["--data.train", "a", "b", "--data.train", "c"]).data.train == ("c",)


def test_flags_take_true_false_no_or_nothing():
    assert parse(["--debug.shuffle_rewards"]).debug.shuffle_rewards
    assert parse(["--debug.shuffle_rewards", "true"]).debug.shuffle_rewards
    assert not parse(["--train.sp", "false"]).train.sp
    assert not parse(["--train.no_sp"]).train.sp
    assert parse(["--train.no_sp", "--train.sp"]).train.sp
    assert parse(["--train.no-sp", "false"]).train.sp


def test_words_become_values_of_the_type_of_the_key():
    words = "--cluster.gpu_memory_gb None --rollout.stop_ids 1 2 --data.system true --data.val"
    cfg = parse([*words.split(), "--train.lr", "inf", "--reward.answer_marker", "-x"])
    assert (cfg.cluster.gpu_memory_gb, cfg.rollout.stop_ids, cfg.data.system) == (
        None,
        (1, 2),
        "true",
    )
    assert (cfg.data.val, cfg.train.lr, cfg.reward.answer_marker) == ((), math.inf, "-x")
    assert parse(["--train.lr", "fast", "--train.lr", "1e-3"]).train.lr == 1e-3


def test_selectors_choose_the_class_of_their_section():
    cfg = parse(["--algo", "grpo", "--algo.clip_high", "0.3", "--reward", "math"])
    assert type(cfg.algo).__name__ == "GRPOConfig" and cfg.algo.clip_high == 0.3
    assert type(cfg.reward).__name__ == "MathRewardConfig"
    assert cfg.select.reward == "math"


def test_a_sum_of_rewards_has_a_section_for_each_and_common_keys_are_of_all():
    cfg = parse(
        ["--reward", "math:1,exact:0.5", "--reward.timeout_s", "5", "--reward.math.timeout_s", "2"]
    )
    assert (cfg.reward.math.timeout_s, cfg.reward.exact.timeout_s) == (2.0, 5.0)
    words = "--reward exact,math --reward.answer_marker > --reward.no_require_boxed"
    words += " --reward.on_error -1"
    cfg = parse([*words.split(), "--reward.exact.on_error", "-2"])
    assert (cfg.reward.exact.answer_marker, cfg.reward.math.require_boxed) == (">", False)
    assert (cfg.reward.exact.on_error, cfg.reward.math.on_error) == (-2.0, -1.0)
    with pytest.raises(
        ValueError,
        match="did you mean --reward.exact.answer_marker",
    ):
        parse([*words.split(), "--reward.math.answer_marker", "x"])
    broken = rules.broken(parse([*words.split(), "--reward.math.timeout_s", "0"]))
    assert "--reward.math.timeout_s 0: must be above 0" in broken
    adaptive = rules.broken(parse([*words.split(), "--reward.adaptive_timeout"]))
    assert any("only one reward of a sum" in line for line in adaptive)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--algo.clip_hihg", "1"], ["--algo.clip_hihg", "did you mean --algo.clip_high?"]),
        (["--lr", "1"], ["--lr", "here verl's actor.optim.lr is --train.lr"]),
        (["--train.num_layers", "1"], ["did you mean --model.num_layers?"]),
        (
            ["--data.foo", "1"],
            ["--data.foo", "the keys of --data are train, val, prompts_per_step"],
        ),
        (["--foo.bar", "1"], ["--foo.bar", "see --help"]),
        (["--train.lr", "fast"], ["--train.lr fast", "float"]),
        (["--algo.loss_agg_mode", "mean"], ["--algo.loss_agg_mode mean", "token-mean"]),
        (["--mode", "asink"], ["--mode asink", "allowed are"]),
        (["--algo"], ["--algo", "needs a value"]),
        (["--reward", "math", "judge"], ["--reward math judge: takes one value"]),
        (["--mode=sync", "label", "--run.seed", "1"], ["--mode sync label: takes one value"]),
        (["--run.seed"], ["--run.seed: needs a value, a whole number (int)"]),
        (["--run.seed", "1e6"], ["--run.seed 1e6: must be a whole number (int)"]),
        (["--run.seed", "1", "2"], ["--run.seed 1 2: takes one value"]),
        (["--train.sp", "maybe"], ["--train.sp maybe: must be true or false"]),
        (["--train.no_lr", "1"], ["--train.no_lr: there is no such key"]),
        (
            ["--cluster.gpu_memory_gb", "x"],
            ["--cluster.gpu_memory_gb x: must be a number (float) or None"],
        ),
        (["--rollout.stop_ids", "1", "b"], ["--rollout.stop_ids 1 b: must be a whole number"]),
        (["--algo.rollout_rs", "token_k9"], ["--algo.rollout_rs token_k9: allowed", "token_k3?"]),
        (["7"], ["7", "expected a key"]),
        (["--algo", "nonesuch"], ["--algo nonesuch", "allowed are"]),
    ],
)
def test_a_bad_command_line_is_one_sentence(argv, words):
    with pytest.raises(ValueError) as e:
        parse(argv)
    for word in words:
        assert word in str(e.value)
    assert "\n" not in str(e.value)


def test_the_resolved_configuration_is_saved_as_json(tmp_path):
    cfg = parse(["--run.seed", "3"])
    resolve.save(cfg, tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["run"]["seed"] == 3 and saved["algo"]["clip_low"] == 0.2


def good() -> Config:
    return parse(["--model.path", "m", "--data.train", "label", "--data.val", "label"])


def test_a_good_configuration_breaks_no_rule():
    assert rules.broken(good()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train", ()),
        ("model.path", ""),
        ("data.val", ()),
        ("rollout.samples_per_prompt", 1),
        ("train.samples_per_update", 7),
        ("rollout.max_tokens", 0),
        ("train.lr", -1.0),
        ("rollout.top_p", 0.0),
        ("rollout.temperature", 0.0),
        ("algo.rollout_is_threshold", 0.0),
        ("reward.timeout_s", 0.0),
        ("train.min_lr", 1.0),
        ("train.beta2", 1.0),
        ("train.offload_activations", True),
        ("train.min_lr", -1.0),
        ("train.adam_eps", 0.0),
        ("rollout.kv_cache_tokens", -5),
        ("model.num_layers", 2_147_483_648),
        ("rollout.kv_cache_tokens", 1),
        ("rollout.progress_interval_s", -1.0),
        ("eval.top_k", -1),
        ("model.num_layers", -1),
        ("debug.decode_floor_ms", -1.0),
        ("rollout.tp", 0),
        ("train.cp", 0),
        ("log.trace_steps", -2),
        ("log.prometheus_port", 65536),
        ("checkpoint.grace_s", 601.0),
        ("env.timeout_s", float("nan")),
        ("reward.correct_score", float("nan")),
        ("rollout.tp", 2),
        ("rollout.gpu_memory_utilization", 1.0),
        ("rollout.sglang_args", ("attention_backend",)),
        ("sync.bucket_mb", 0),
        ("sync.ranks_per_site", -1),
        ("cluster.gpu_memory_gb", -1.0),
        ("cluster.gpu_memory_gb", float("inf")),
    ],
)
def test_every_rule_names_its_key(key, value):
    cfg = parse(["--env", "latency", "--model.path", "m", "--data.train", "x", "--data.val", "x"])
    section, _, name = key.partition(".")
    part = dataclasses.replace(getattr(cfg, section), **{name: value})
    found = rules.broken(dataclasses.replace(cfg, **{section: part}))
    assert any(line.startswith(f"--{key}") for line in found), found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", ""),
        ("--algo.overlong_share 0.2", "--algo.overlong_share 0.2: lowers rewards below 0"),
        ("--algo.kl_reward_coef 0.1", "--algo.kl_reward_coef 0.1: lowers rewards below 0"),
        ("--rollout.samples_per_prompt 1", "--rollout.samples_per_prompt 1: maxrl needs at"),
    ],
)
def test_maxrl_needs_rewards_of_0_or_more_and_groups(words, said):
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label", *words.split()]
    found = rules.broken(parse([*argv, "--algo.adv_estimator", "maxrl"]))
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", ""),
        ("--algo.bypass_mode", "--algo.bypass_mode: skips the pass of old log-probs, but --algo"),
        ("--algo.routing_replay old", "--algo.routing_replay old: the pass of old log-probs"),
        ("--rollout.samples_per_prompt 1", "--rollout.samples_per_prompt 1: {} needs at least 2"),
        ("--mode stream", "--algo.adv_estimator {}: needs all samples of a step before the"),
        ("--algo.equal_reward_groups drop", "--algo.equal_reward_groups drop: with adv_estimator"),
        (
            "--algo.truncated_responses drop",
            "--algo.truncated_responses drop: --algo.adv_estimator",
        ),
    ],
)
@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_token_baselines_need_the_pass_of_old_log_probs_and_groups(name, words, said):
    base = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
    base += ["--train.samples_per_update", "64"] if "stream" not in words else []
    found = rules.broken(parse([*base, "--algo.adv_estimator", name, *words.split()]))
    said = said.format(name)
    assert any(line.startswith(said) for line in found) if said else found == [], found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "",
            "--algo.adv_estimator gdpo: normalises each term of a sum of rewards, but --reward",
        ),
        ("--reward exact:1,math:0.5", ""),
        ("--reward exact,math --algo.kl_reward_coef 0.1", "--algo.kl_reward_coef 0.1: acts on the"),
        ("--reward exact,math --algo.overlong_share 0.2", "--algo.overlong_share 0.2: acts on the"),
        (
            "--reward exact,math --algo.equal_reward_groups drop",
            "--algo.equal_reward_groups drop: acts on the sum of the rewards, and ",
        ),
        ("--reward exact,math --debug.shuffle_rewards", "--debug.shuffle_rewards: acts on the sum"),
        ("--reward exact,math --env tools", "--env tools: acts on the sum of the rewards, and "),
        (
            "--reward exact,math --rollout.samples_per_prompt 1",
            "--rollout.samples_per_prompt 1: gdpo",
        ),
    ],
)
def test_gdpo_needs_a_sum_of_rewards_and_nothing_that_acts_on_the_sum(words: str, said: str):
    base = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
    found = rules.broken(parse([*base, "--algo.adv_estimator", "gdpo", *words.split()]))
    assert any(line.startswith(said) for line in found) if said else found == [], found


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--rollout.process", "inline"], "--rollout.process inline"),
        (["--rollout.quantize", "int8"], "--rollout.quantize int8"),
        (["--rollout.dtype", "float64"], "--rollout.dtype float64"),
    ],
)
def test_sglang_refuses_what_is_the_torch_engines(argv, key):
    base = ["--model.path", "m", "--data.train", "label", "--data.val", "label", *argv]
    assert rules.broken(parse(base)) == []
    [line] = rules.broken(parse([*base, "--rollout.engine", "sglang", "--rollout.tp", "2"]))
    assert line.startswith(key)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mode async --async.alpha 1", ""),
        (
            "--mode async --async.alpha 0.5",
            "--rollout.routing histopipe: .* --async.alpha 1 or more",
        ),
        ("", "--rollout.routing histopipe: .* set --mode async"),
        ("--mode async --rollout.queue", "unset --rollout.queue"),
    ],
)
def test_histopipe_is_for_a_flow_that_does_not_end(words, said):
    base = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
    base += [
        "--data.num_prompts",
        "64",
        "--cluster.rollout_ranks",
        "2" if "async" in words else "0",
    ]
    cfg = parse([*base, "--rollout.routing", "histopipe", *words.split()])
    found = rules.broken(cfg)
    assert len(found) == bool(said) and all(re.search(said, line) for line in found), found
    if not said:
        assert rules.of_world(cfg, 4, 4) == []
        one = dataclasses.replace(cfg.cluster, rollout_ranks=1)
        (line,) = rules.of_world(dataclasses.replace(cfg, cluster=one), 4, 4)
        assert line.startswith(
            "--rollout.routing histopipe: needs two engines, and 1 rollout ranks"
        )


def assert_rule_of_sglang(words: str, said: str) -> None:
    """With that engine these words break one rule, which says this, or none."""
    base = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
    found = rules.broken(parse([*base, "--rollout.engine", "sglang", *words.split()]))
    assert len(found) == bool(said) and all(re.search(said, line) for line in found), found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rollout.draft history --data.num_prompts 64", ""),
        ("--rollout.draft ngram --draft.verify_tokens 16 --draft.max_length 15 --rollout.tp 2", ""),
        (
            "--rollout.draft ngram --draft.max_length 8",
            "--draft.max_length 8: must be below draft.verify_tokens 8",
        ),
        (
            "--rollout.draft ngram --draft.verify_tokens 1",
            "--draft.verify_tokens 1: must be from 2",
        ),
        ("--rollout.sglang_args speculative_algorithm=NGRAM", "use --rollout.draft"),
        (
            "--rollout.engine torch --rollout.draft ngram --draft.verify_tokens 4",
            "verify_tokens 4: only SGLang",
        ),
        ("--rollout.tp 8 --rollout.ep 4", ""),
        ("--rollout.tp 4 --rollout.ep 3", "--rollout.ep 3: must divide rollout.tp 4"),
        (
            "--rollout.tp 2 --rollout.ep 2 --rollout.adaptive_tp",
            "with rollout.ep 2 keep their size",
        ),
        ("--rollout.sglang_args ep_size=2", "use --rollout.ep instead"),
        (
            "--rollout.draft ngram --draft.verify_tokens 64 --algo.routing_replay rollout",
            "--draft.verify_tokens 64: SGLang records the experts",
        ),
        ("--rollout.draft ngram --algo.routing_replay rollout", ""),
        ("--rollout.draft ngram --draft.matcher device", ""),
        (
            "--rollout.engine torch --rollout.draft ngram --draft.matcher device",
            "--draft.matcher device: only SGLang uses it; unset it",
        ),
    ],
)
def test_drafts_of_sglang_have_a_width(words, said):
    assert_rule_of_sglang(words, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp_size=4", "tp_size=4: rlcore sets this argument itself; use --rollout.tp instead"),
        ("random_seed=1", "use --run.seed instead"),
        ("mem_fraction_static=0.9", "use --rollout.gpu_memory_utilization instead"),
        ("load_format=auto", "rlcore sets this argument itself; remove it"),
        ("moe_runner_backend=auto", "weight updates would be wrong; use one of triton,"),
        ("moe_runner_backend=flashinfer_trtllm", "weight updates would be wrong"),
    ],
)
def test_what_rlcore_tells_sglang_itself_is_not_for_a_user(words, said):
    assert_rule_of_sglang(f"--rollout.sglang_args attention_backend=triton {words}", said)


def test_what_rlcore_does_not_need_in_sglang_is_for_a_user():
    words = "attention_backend=triton moe_runner_backend=triton disable_cuda_graph=true"
    assert_rule_of_sglang(f"--rollout.sglang_args {words}", "")


def test_a_switch_with_a_third_state_needs_no_value():
    def found(*words):
        return parse(list(words)).rollout.fp32_lm_head

    assert found() is None
    assert found("--rollout.fp32_lm_head") is True
    assert found("--rollout.no_fp32_lm_head") is False
    assert found("--rollout.fp32_lm_head", "false") is False
    assert found("--rollout.fp32_lm_head", "None") is None
    with pytest.raises(ValueError, match="no_fp32_lm_head None: must be true or false"):
        found("--rollout.no_fp32_lm_head", "None")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rollout.adaptive_tp", ""),
        ("--rollout.adaptive_tp --rollout.tp 2 --rollout.max_tp 8", ""),
        ("--debug.rollout_tp 1 2 1", ""),
        ("--rollout.max_tp 4", "--rollout.max_tp 4: has no effect without"),
        ("--rollout.adaptive_tp --rollout.tp 3", "--rollout.tp 3 .* powers of two"),
        ("--rollout.adaptive_tp --rollout.max_tp 6", "--rollout.max_tp 6: with .* powers of two"),
        ("--rollout.adaptive_tp --rollout.tp 4 --rollout.max_tp 2", "at least rollout.tp 4"),
        ("--rollout.adaptive_tp --debug.rollout_tp 1 2", "--debug.rollout_tp 1 2: .* unset one"),
        ("--debug.rollout_tp 0", "--debug.rollout_tp 0: each must be at least 1"),
        ("--rollout.engine torch --rollout.adaptive_tp", "--rollout.adaptive_tp: .* sglang"),
    ],
)
def test_engines_that_change_their_size_have_rules(words, said):
    assert_rule_of_sglang(words, said)


def test_sizes_that_engines_may_come_to_divide_the_ranks_too():
    words = "--rollout.engine sglang --rollout.adaptive_tp --rollout.max_tp 4"
    (line,) = rules.of_world(parse(words.split()), 2, 2)
    assert line.startswith("--rollout.max_tp 4: must divide the 2 ranks")
    words = "--rollout.engine sglang --debug.rollout_tp 1 2 3"
    (line,) = rules.of_world(parse(words.split()), 4, 2)
    assert line.startswith("--debug.rollout_tp 3: must divide the 4 ranks, and an engine is within")


def test_engines_over_nodes_do_not_share_them_with_other_jobs():
    cfg = parse(["--rollout.engine", "sglang", "--rollout.tp", "4", "--mux.url", "redis://h"])
    assert not rules.of_world(cfg, 8, 4)
    (line,) = rules.of_world(cfg, 8, 2)
    assert line.startswith("--rollout.tp 4: with --mux.url an engine must be within the 2 ranks")


@pytest.mark.parametrize(
    ("world", "node", "key"),
    [
        (8, 4, ""),
        (8, 2, ""),  # over two nodes
        (8, 8, ""),
        (6, 2, "--rollout.tp 4"),
        (24, 3, "--rollout.tp 4"),
        (24, 6, "--rollout.tp 4"),
        (4, 4, "--sync.ranks_per"),
    ],
)
def test_engines_and_sites_are_whole_parts_of_the_world(world, node, key):
    cfg = parse(["--rollout.engine", "sglang", "--rollout.tp", "4", "--sync.ranks_per_site", "8"])
    found = rules.of_world(cfg, world, node)
    assert any(line.startswith(key) for line in found) if key else found == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--mode async --cluster.rollout_ranks 2 --async.alpha 0.5 --async.weight_update "
            "in_place",
            "",
        ),
        ("--mode async", "--cluster.rollout_ranks 0: --mode async needs ranks that only sample"),
        ("--async.alpha 3", "--async.alpha: has no effect without --mode async"),
        ("--async.alpha -1 --mode async --cluster.rollout_ranks 2", "--async.alpha -1: must be"),
        (
            "--mode async --cluster.rollout_ranks 2 --schedule tail_batching",
            "--schedule tail_batching: --mode async has no rounds",
        ),
        (
            "--mode async --cluster.rollout_ranks 2 --data.num_prompts 64 --rollout.draft history "
            "--rollout.routing histopipe --async.alpha 1",
            "",
        ),
        (
            "--mode async --cluster.rollout_ranks 2 --debug.deterministic_order",
            "--debug.deterministic_order: needs --mode sync",
        ),
        ("--mode async --cluster.rollout_ranks 2 --debug.replay elsewhere", ""),
        ("--debug.record", "--debug.record: has no effect without --mode async"),
        (
            "--mode async --cluster.rollout_ranks 2 --debug.record --debug.replay elsewhere",
            "--debug.record: a replay has nothing new",
        ),
        (
            "--cluster.rollout_ranks 2 --mode stream",
            "--cluster.rollout_ranks 2: --mode stream lets",
        ),
        (
            "--cluster.rollout_ranks 2 --sync.route gather",
            "--sync.route gather: updates only engines on train ranks",
        ),
        ("--cluster.train_cores 1", "--cluster.train_cores 1: has no effect without"),
        ("--mux.slo 3", "--mux.slo: has no effect without --mux.url"),
        ("--mux.url redis://h", ""),
        (
            "--mux.url redis://h --rollout.adaptive_tp --rollout.engine sglang",
            "--mux.url: engines change their size between the phases",
        ),
        ("--mux.url redis://h --cluster.rollout_ranks 1 --mux.slo 1.5", ""),
        ("--mux.url redis://h --cluster.rollout_ranks 1 --mux.slo 0.5", "--mux.slo 0.5: must be"),
        (
            "--mux.url redis://h --cluster.rollout_ranks 1 --mode async",
            "--mode async: with --mux.url rollout and training alternate",
        ),
        (
            "--env frozenlake --mode async --async.alpha 1 --cluster.rollout_ranks 2 "
            "--rollout.routing histopipe",
            "--rollout.routing histopipe: an episode of --env cannot",
        ),
        *[
            (f"--mux.url redis://h --cluster.rollout_ranks 2 --mux.tail_nodes 1 {more}", said)
            for more, said in (
                ("", ""),
                ("--env frozenlake", "--mux.tail_nodes 1: with --env an episode cannot"),
                (
                    "--debug.deterministic_order",
                    "--mux.tail_nodes 1: with --debug.deterministic_order responses",
                ),
                ("--debug.replay elsewhere", "--mux.tail_nodes 1: with --debug.replay responses"),
                (
                    "--rollout.engine sglang --rollout.tp 2",
                    "--mux.tail_nodes 1: engines of several ranks cannot release",
                ),
            )
        ],
    ],
)
def test_ranks_that_only_sample_and_staleness_have_rules(words, said):
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label", *words.split()]
    found = rules.broken(parse(argv))
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--env frozenlake --env.num_groups 40 --env.group_size 9 --env.slippery", ""),
        ("--env latency --data.train label", ""),
        ("--env latency", "--data.train: is empty"),
        ("--data.train label --env.workers 3", "--env.workers: has no effect without --env"),
        ("--env frozenlake --env.workers 0", "--env.workers 0: must be above 0"),
        ("--env frozenlake --env.retries -1", "--env.retries -1: must be 0 or more"),
        ("--env frozenlake --env.max_turns 0", "--env.max_turns 0: must be above 0"),
        ("--env frozenlake --env.timeout_s 1800", "--env.timeout_s 1800: must be below"),
        ("--env frozenlake --env.num_groups 3", "--env.num_groups 3: must be at least data.pro"),
        ("--env frozenlake --env.group_size 3", "--env.group_size 3: must be at least rollout."),
        ("--env frozenlake --schedule tail_batching", ""),
        (
            "--env frozenlake --schedule tail_batching --env.num_groups 40",
            "--env.num_groups 40: --schedule tail_batching starts more by itself; use tail.eta_pr",
        ),
        (
            "--env frozenlake --schedule tail_batching --env.group_size 9",
            "--env.group_size 9: --schedule tail_batching starts more by itself; use tail.eta_sam",
        ),
        ("--env frozenlake --rollout.draft history --data.num_prompts 64", ""),
        ("--env latency --data.train label --env.turns 20", "--env.turns 20: must be at most"),
        ("--env latency --data.train label --env.fail_slow 2", "--env.fail_slow 2: must be from"),
        ("--env swe --data.train x --env.tests_timeout_s 900", "--env.tests_timeout_s 900: must b"),
        (
            "--env frozenlake --env.num_groups 40 --mode async --cluster.rollout_ranks 1",
            "--env.num_groups 40: --mode async has no rounds",
        ),
    ],
)
def test_environments_have_rules(words, said):
    argv = ["--model.path", "m", "--eval.every", "0", *words.split()]
    found = rules.broken(parse(argv))
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algo.routing_replay rollout", ""),
        ("--algo.routing_replay rollout --rollout.engine sglang", ""),
        ("--algo.routing_replay old --train.epochs 2", ""),
        (
            "--algo.routing_replay old",
            "--algo.routing_replay old: has no effect with one update per step",
        ),
        (
            "--algo.routing_replay old --train.epochs 2 --algo.bypass_mode --algo.rollout_is none",
            "--algo.routing_replay old: --algo.bypass_mode computes no old log-probs",
        ),
    ],
)
def test_replay_has_rules(words, said):
    assert_broken(words, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train.moe_aux_loss_coef 0.1 --train.moe_z_loss_coef 0.1", ""),
        ("--train.moe_bias_update_rate 0.1 --algo.rollout_rs token_k1", ""),
        (
            "--train.moe_aux_loss_coef 0.1 --algo.rollout_rs token_k1",
            "--train.moe_aux_loss_coef 0.1: --algo.rollout_rs token_k1 rejects tokens",
        ),
        (
            "--train.moe_z_loss_coef 0.1 --mode stream",
            "--train.moe_z_loss_coef 0.1: needs all samples of a step before the first gradient",
        ),
        (
            "--train.moe_bias_update_rate -1",
            "--train.moe_bias_update_rate -1: must be 0 or more",
        ),
    ],
)
def test_balancing_has_rules(words, said):
    assert_broken(words, said)


def assert_broken(words, said):
    """Check that these keys break a rule, whose text begins with `said`; "": none."""
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label", *words.split()]
    found = rules.broken(parse(argv))
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algo gkd --teacher.models m --data.demonstrations a", ""),
        ("--algo gkd --data.demonstrations a", "--teacher.models: is empty"),
        (
            "--algo opd --teacher.models m --data.demonstrations a",
            "--data.demonstrations a: --algo opd trains only on what the policy has sampled; use",
        ),
        ("--data.demonstration_share 0.4", "--data.demonstration_share 0.4: has no effect without"),
        (
            "--algo gkd --teacher.models m --data.demonstrations a --data.teacher_prompt_field b",
            "--data.demonstrations a: have no prompt of the teacher's own",
        ),
        *(
            (f"--algo gkd --teacher.models m --data.demonstrations a {key}", f"{key}: needs log-")
            for key in ("--algo.rollout_rs token_k1", "--algo.bypass_mode", "--algo.kl_coef 0.1")
        ),
    ],
)
def test_demonstrations_have_rules(words, said):
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label", *words.split()]
    found = rules.broken(parse(argv))
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(
    ("words", "silence_s"),
    [
        ("", ""),
        ("--env.retries 0 --env.episode_timeout_s 1794", ""),
        ("--env.retries 0 --env.episode_timeout_s 1795", "1800"),
        ("--env.episode_timeout_s 7200", "14410"),
        ("--env.episode_timeout_s 7200 --rollout.stall_timeout_s 14411", ""),
    ],
)
def test_a_harness_that_asks_nothing_is_no_stalled_round(words, silence_s):
    argv = ["--model.path", "m", "--data.train", "a", "--data.val", "b", "--env", "endpoint"]
    said = rules.broken(parse([*argv, "--env.command", "run", *words.split()]))
    assert len(said) == bool(silence_s), said
    if said:
        assert said[0].startswith("--env.episode_timeout_s ") and f"the {silence_s} s" in said[0]
        assert "must be below rollout.stall_timeout_s 1800" in said[0]


@pytest.mark.parametrize("words, told", [("", True), ("--env.max_branches 1", False)])
def test_an_overlong_share_is_refused_where_an_episode_has_several_rows(words, told):
    argv = ["--model.path", "m", "--data.train", "a", "--data.val", "b", "--env", "endpoint"]
    argv += ["--env.command", "run", "--algo", "dapo", *words.split()]
    said = [line for line in rules.broken(parse(argv)) if "overlong" in line]
    assert len(said) == told, said
    assert not told or said[0].startswith("--algo.overlong_share 0.2: compares the length of a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lora.rank 8", ""),
        ("--lora.rank 8 --lora.targets q_proj v_proj --algo.kl_coef 0.1", ""),
        ("--lora.alpha 8", "--lora.alpha: has no effect without --lora.rank"),
        ("--lora.rank -1", "--lora.rank -1: must be from 0 to 4096"),
        ("--lora.rank 8 --lora.alpha 0", "--lora.alpha 0: must be above 0"),
        ("--lora.rank 8 --lora.targets q_proj qkv", "--lora.targets qkv: must be among q_proj,"),
        ("--lora.rank 8 --lora.targets", "--lora.targets: is empty; name projections"),
        ("--lora.rank 8 --train.transformer_impl te", "--train.transformer_impl te: its layers"),
    ],
)
def test_adapters_have_rules(words, said):
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label", *words.split()]
    found = rules.broken(parse(argv))
    assert [line[: len(said)] for line in found] == ([said] if said else [])


@pytest.mark.parametrize(
    "words",
    [
        "--rollout.temperature 0.7 --train.pp 2 --train.cp 2 --mode stream --rollout.draft ngram",
        "--rollout.top_k 3",
        "--rollout.top_p 0.9",
        "--rollout.min_p 0.1",
        "--rollout.quantize int8",
        "--rollout.dtype bfloat16",
        "--lora.rank 8",
        "--train.tp 2",
        "--train.fused_loss",
        "--train.head_chunk_tokens 512",
        "--mode async --cluster.rollout_ranks 1",
        "--rollout.engine sglang",
    ],
)
def test_what_gives_other_bits_is_refused_with_true_on_policy(words: str) -> None:
    """The first key of every case, but for the first case, all of whose keys are supported."""
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
    argv += ["--model.dtype", "float32", *words.split()]
    assert rules.broken(parse(argv)) == []
    found = rules.broken(parse([*argv, "--train.true_on_policy"]))
    keys = [line.partition(": train.true_on_policy excludes it, since ")[0] for line in found]
    assert words.startswith(keys[0]) if keys else "--rollout.temperature" in words, found
    assert len(keys) <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rollout.engine sglang --rollout.fp32_lm_head False", []),
        ("--rollout.engine sglang", ["--rollout.fp32_lm_head None"]),
        ("--rollout.fp32_lm_head False", ["--rollout.engine torch"]),
        (
            "--rollout.engine sglang --rollout.fp32_lm_head False --rollout.tp 2 --train.cp 2 "
            "--train.share_prefix true",
            ["--rollout.tp 2", "--train.cp 2", "--train.share_prefix true"],
        ),
    ],
)
def test_on_a_gpu_true_on_policy_is_sglang_with_transformer_engine(
    words: str, said: list[str]
) -> None:
    argv = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
    argv += ["--train.true_on_policy", "--train.transformer_impl", "te", *words.split()]
    assert [line.partition(":")[0] for line in rules.broken(parse(argv))] == said


@pytest.mark.parametrize(
    ("ranks", "tp", "said"),
    [
        (3, 1, ""),
        (4, 2, ""),
        (6, 1, "--cluster.rollout_ranks 6: leaves none of the 6 ranks to train"),
        (3, 3, ""),
        (2, 4, "--rollout.tp 4: must divide the 6 ranks"),
        (3, 2, "--rollout.tp 2: must divide the 3 rollout ranks and the 3 train ranks"),
    ],
)
def test_ranks_are_left_to_train_and_engines_are_whole(ranks, tp, said):
    words = f"--rollout.engine sglang --rollout.tp {tp} --cluster.rollout_ranks {ranks}"
    found = rules.of_world(parse(words.split()), 6, 6)
    assert found[0].startswith(said) if said else found == []


def test_a_password_in_an_address_is_not_written_down():
    url = "redis://job-a:secret@host:6390"
    cfg = parse(["--mux.url", url])
    assert cfg.mux.url == url
    assert json.loads(resolve.to_json(cfg))["mux"]["url"] == "redis://job-a:***@host:6390"
    assert resolve.keys(cfg)["mux.url"] == "redis://job-a:***@host:6390"


SECTIONS = (
    *(
        s
        for s in filter(inspect.isclass, vars(schema).values())
        if dataclasses.is_dataclass(s) and s is not Config
    ),
    *map(algos.config_class, algos.NAMES),
    *map(rewards.config_class, (*rewards.REWARDS, "http://host/path")),
    *map(envs.config_class, envs.ENVS),
    JudgeConfig,
    TinyConfig,
)
"""Every class of a section, and of the options of a subcommand."""


def texts(section: type) -> dict[str, str]:
    """Return the text of every key: the docstring below its field, which tyro reads."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise([*tree.body, None]):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = inspect.cleandoc(text)
    return {f.name: found.get(f.name, "") for f in dataclasses.fields(section)}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)
def test_every_key_and_section_has_a_text(section: type):
    title = section.__doc__ or ""
    assert not title.startswith(section.__name__), "no docstring, so no title in --help"
    for key, text in {"": title, **texts(section)}.items():
        name = f"{section.__name__}.{key}: {text!r}"
        assert text, f"{name} has no text"
        assert not text.startswith("Of ") and text.endswith("."), f"{name}: noun phrase or verb"
        assert text[0] in "`" or text[0].isupper(), f"{name} begins in the middle of a sentence"
        assert "\n\n" not in text, f"{name} has more than one paragraph"


def test_texts_of_help_are_wrapped_once():
    lines = resolve.help_text(good()).splitlines()
    width, lines = max(map(len, lines[4:])), [line.rstrip() for line in lines]
    for first, second in itertools.pairwise(lines):
        if first.startswith(" " * 8) and second.startswith(" " * 8):
            assert len(f"{first} {second.split()[0]}") > width, f"{first}\n{second}"
    assert {"  --async.alpha FLOAT", "  --algo.clip_high FLOAT"} <= set(lines)


def test_settings_without_effect_are_named_and_the_run_goes_on():
    said = rules.warnings(
        parse(
            ["--algo.lam", "0.9", "--algo.kl_horizon", "5", "--rollout.top_p", "0.9"]
            + ["--rollout.sglang_args", "a=1", "--sync.ranks_per_site", "2"]
        )
    )
    assert [line.split()[0] for line in said] == [
        "--rollout.top_p",
        "--algo.lam",
        "--algo.kl_horizon",
        "--rollout.sglang_args",
        "--sync.ranks_per_site",
    ]
    assert rules.warnings(parse([])) == []
    (said,) = rules.warnings(parse(["--env", "frozenlake", "--rollout.draft", "history"]))
    assert "the task frozenlake is endless and repeats no prompt" in said
    capped = ["--algo.bypass_mode", "--algo.rollout_is_threshold", "5"]
    (said,) = rules.warnings(parse(capped))  # the loss's ratio is the weight
    assert said.startswith("--algo.rollout_is_threshold 5.0: has no effect")
    assert rules.warnings(parse(["--algo", "reinforce", *capped])) == []


def test_moments_in_bfloat16_need_decay_rates_that_rounding_does_not_undo():
    """Between neighbouring numbers of bfloat16 is at least 1/256 of the smaller one."""
    keys = ["--model.path", "m", "--data.train", "label", "--data.val", "label", "--train.beta2"]
    rounded = ["--train.moments_dtype", "bfloat16"]
    assert rules.broken(parse([*keys, "0.996", *rounded])) == []
    assert rules.broken(parse([*keys, "0.999"])) == []
    [line] = rules.broken(parse([*keys, "0.999", *rounded]))
    assert line.startswith("--train.beta2 0.999: must be at most 0.996 with train.moments_dtype")
    [line] = rules.broken(parse([*keys, "0.9", *rounded, "--train.beta1", "0.998"]))
    assert line.startswith("--train.beta1 0.998: must be at most")
    [line] = rules.broken(parse([*keys, "0.9", *rounded, "--model.dtype", "float64",
                                 "--train.no_distributed_optimizer"]))  # fmt: skip
    assert line.startswith("--train.moments_dtype bfloat16: needs a model.dtype")


def test_names_of_other_frameworks_lead_to_keys_that_exist():
    """Every old name is gone, and every key that the tables name exists in some configuration."""
    known = set(resolve.SELECTORS)
    for words in ("--reward exact", "--reward math", "--reward code", "--reward judge", "--env swe",
                  "--env tools", "--algo ppo", "--algo grpo", "--algo gspo"):  # fmt: skip
        known |= resolve.keys(parse(words.split())).keys()
    assert not other_names.RENAMED.keys() & known
    assert set(other_names.RENAMED.values()) <= known
    for table in (other_names.VERL, other_names.TRL, other_names.SLIME):
        for theirs, ours in table.items():
            assert re.split("[:, ]", ours)[0] in known, (theirs, ours)


@pytest.mark.parametrize(
    "given",
    [
        "--model.path m --train.sp --rollout.stop_ids 1 2 --data.train a b",
        "--reward exact:1,math:0.5 --reward.exact.answer_marker > --reward.math.require_boxed",
        "--env frozenlake --env.max_turns 3 --algo dapo --mode stream",
    ],
)
def test_keys_as_words_give_the_configuration_again(given: str):
    cfg = parse(given.split())
    keys = resolve.keys(cfg)
    for form in (keys, json.loads(resolve.to_json(cfg))):  # flat, and as in config.json
        assert resolve.keys(parse(resolve.words(form))) == keys


@pytest.mark.parametrize("who", ["verl", "TRL", "slime"])
def test_the_page_for_other_frameworks_has_their_tables(who: str):
    page = (Path(__file__).parents[2] / "recipes" / "COMING_FROM.md").read_text()
    section = re.search(rf"^## {who}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \| ?(.*?) ?\|$", section[1], re.M)
    table = getattr(other_names, who.upper())
    told = {theirs: re.split("[:, ]+", ours, maxsplit=1) for theirs, ours in table.items()}
    assert {t: [k, *filter(None, [note])] for t, k, note in rows} == told


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.place", "it is now --rollout.routing"),
        ("draft.no_gate", "it is now --draft.no_adaptive"),
        ("reward.exact.after", "it is now --reward.exact.answer_marker"),
        ("actor_rollout_ref.rollout.n", "here verl's rollout.n is --rollout.samples_per_prompt"),
        ("train.learning_rate", "here TRL's learning_rate is --train.lr"),
        ("train.eps_clip", "here slime's eps_clip is --algo.clip_low"),
        ("train.lora_rank", "here verl's model.lora_rank is --lora.rank"),
    ],
)
def test_a_key_of_another_framework_is_refused_with_ours(key: str, words: str):
    with pytest.raises(ValueError, match=f"^--{key}: there is no such key; {words}$"):
        parse([f"--{key}", "1"])
