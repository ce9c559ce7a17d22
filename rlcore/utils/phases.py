"""Name the phases of a run, for spans, metrics, step line, memory plan, dry run, simulator and jobs
that share nodes.

The names are verl's timing names, such as `update_weights` for sending the learner's weights to the
engines. The names of phases that only colocated runs have are rlcore's.
"""

STEP = {
    "wait_permit": "waiting for a permit of shared nodes; loading and storing the phase's state",
    "gen": "generation, from the first request to the last response",
    "reward": "waiting for rewards after the last response",
    "exchange": "moving samples from rollout ranks to train ranks",
    "sleep_engine": "freeing the engine's memory for the learner",
    "load_learner": "loading the learner from host memory",
    "old_log_prob": "log-probs of the learner before the first update",
    "ref": "log-probs of the reference model",
    "teacher": "log-probs of the teachers",
    "values": "values of the critic before its first update",
    "adv": "advantages, whitening, KL penalties",
    "update_critic": "forward, backward and optimizer steps of the critic",
    "update_actor": "forward, backward and optimizer steps of the actor",
    "resize_engines": "replacing the rollout engines by engines of another TP size",
    "pause_engines": "pausing the engines for a weight update, with mode async",
    "update_weights": "sending weights to the engines",
    "offload_learner": "moving the learner to host memory",
    "wake_engine": "allocating the engine's memory again",
}
"""Phases of a step in order; phases do not overlap. `timing_s/step` is the sum of their times plus
the time outside of any phase."""

BETWEEN = {
    "testing": "evaluation; not part of the step",
    "save_checkpoint": "writing a checkpoint, or waiting for one; not part of the step",
}
"""Phases between two steps."""

BEFORE = {
    "start": "building learner and engines, reported in the first row written",
}
"""Phases before the first step of a process."""

WITHIN = {
    "step": "one step, with all phases of `STEP`",
    "stream": "training on some ranks while others decode, part of gen",
    "wait_learner": "waiting for the train ranks, on rollout ranks",
    "build": "building the learner, part of start, in the memory plan",
    "optimizer_step": "the optimizer's part of update_actor, in the memory plan",
}
"""Names of spans that enclose phases or are part of a phase; only `step` has a separate metric."""

ALL = STEP | BETWEEN | BEFORE | WITHIN

POOLS = ("rollout", "train")
"""Pools of nodes that jobs share. A permit of `rollout` covers gen and reward; a permit of `train`
covers exchange to update_weights; a permit of `step` covers all these phases."""
