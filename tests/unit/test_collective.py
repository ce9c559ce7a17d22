"""What all process groups of gloo have in common."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlcore.utils import collective


def loops() -> int:
    """Threads of this process that serve a gloo device."""
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def test_process_groups_share_a_device_and_keep_their_time():
    collective.share_gloo_device()
    collective.share_gloo_device()
    before = loops()
    groups = [collective.everyone(dist.HashStore(), 0, 1, 5.0 + k) for k in range(5)]
    assert loops() <= before + 1
    assert [g.options._timeout for g in groups] == [timedelta(seconds=5 + k) for k in range(5)]
    told = dist.ProcessGroupGloo._Options()
    told._devices = [dist.ProcessGroupGloo.create_default_device()]
    told._timeout = timedelta(seconds=3)
    groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, told))
    assert loops() <= before + 2  # its own
    for group in groups:
        x = torch.ones(3)
        group.allreduce([x]).wait()
        assert x.tolist() == [1, 1, 1]
