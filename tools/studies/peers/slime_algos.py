"""The peer of compare_algos.py that answers with slime's own functions, see algo_peer.py.

The fourth word on the command line is a folder with slime's source. The functions are put together
as its `policy_loss_function` does, with the mean over tokens.
"""

import hashlib
import os
import sys
from argparse import Namespace
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # some of the functions are compiled on their first call

import algo_peer  # noqa: E402
import torch  # noqa: E402
from algo_peer import Answer, Case  # noqa: E402

sys.path.insert(0, sys.argv[4])

from slime.utils import ppo_utils  # noqa: E402


def loss(
    c: Case,
    clips: tuple[float, float, float],
    opsm_delta: float | None = None,
    kl: tuple[float, str] | None = None,
    unbiased_kl: bool = False,
) -> Answer:
    """The policy loss with the off-policy mask against the sampler, and the KL."""
    logp, mask = algo_peer.leaf(c["logp"]), c["mask"]
    low, high, dual = clips
    total, _ = ppo_utils.compute_policy_loss(c["old"] - logp, c["advantage"], low, high, dual)
    if opsm_delta is not None:
        rows = [list(c[name]) for name in ("sampler", "advantage", "mask")]
        args = Namespace(opsm_delta=opsm_delta)
        keep, _ = ppo_utils.compute_opsm_mask(args, list(logp), *rows)
        total = total * keep.view_as(total)
    if kl is not None:
        ratio = torch.exp(logp - c["old"]) if unbiased_kl else None
        total = total + kl[0] * ppo_utils.compute_approx_kl(logp, c["ref"], kl[1], ratio)
    return algo_peer.with_gradients((total * mask).sum() / mask.sum(), logp=logp)


if __name__ == "__main__":
    source = Path(ppo_utils.__file__).read_bytes()
    versions = {"ppo_utils.py sha256": hashlib.sha256(source).hexdigest()[:16]}
    algo_peer.serve({"loss": loss}, versions)
