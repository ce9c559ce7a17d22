"""The peer of compare_algos.py that answers with TRL's own loss functions, see algo_peer.py.

`_compute_loss` runs on a trainer that was never set up: it has the attributes which the function
reads, and its forward returns the case's log-probs and entropies.
"""

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import algo_peer  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from algo_peer import Answer, Case  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.experimental.gmpo import GMPOTrainer  # noqa: E402


def loss(
    c: Case,
    loss_type: str,
    max_tokens: int,
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    sapo: tuple[float, float] = (1.0, 1.05),
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0),
    off_policy_mask: float | None = None,
    unbiased_kl: bool = False,
) -> Answer:
    """The loss of a batch in one micro-batch on one process, `gmpo` from trl.experimental."""
    logp, entropy = algo_peer.leaf(c["logp"]), algo_peer.leaf(c["entropy"])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        _entropy_bonus_enabled=entropy_coef != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            num_processes=1,
            sync_gradients=True,
        ),
        args=SimpleNamespace(
            delta=None,
            sapo_temperature_pos=sapo[0],
            sapo_temperature_neg=sapo[1],
            steps_per_generation=1,
            use_bias_correction_kl=unbiased_kl,
            vespo_k_pos=vespo[0],
            vespo_lambda_pos=vespo[1],
            vespo_k_neg=vespo[2],
            vespo_lambda_neg=vespo[3],
        ),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        entropy_coef=entropy_coef,
        epsilon_high=epsilon_high,
        epsilon_low=epsilon,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=max_tokens,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
    )
    no_prompt = torch.zeros(len(logp), 0, dtype=torch.int64)
    # One advantage per response, as TRL has it.
    inputs: dict[str, Any] = {
        "prompt_ids": no_prompt,
        "prompt_mask": no_prompt,
        "completion_ids": torch.zeros(logp.shape, dtype=torch.int64),
        "completion_mask": c["mask"],
        "advantages": c["response_advantage"],
        "old_per_token_logps": c["old"],
        "ref_per_token_logps": c["ref"],
        "sampling_per_token_logps": c["sampler"],
        "num_items_in_batch": c["mask"].sum(),
    }
    kind = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
    found = kind._compute_loss(trainer, None, inputs)
    return algo_peer.with_gradients(found, logp=logp, entropy=entropy)


if __name__ == "__main__":
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    algo_peer.serve({"loss": loss}, versions)
