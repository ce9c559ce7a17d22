"""The gang of ranks that tests run the whole program on."""

from rlcore.rollout import transport
from tests import runs


def test_nothing_else_gets_the_port_of_a_job_before_the_job_begins() -> None:
    """A gloo group listens at a port that the system picks, also after it is destroyed: where that
    was the next job's, rank 0 could not listen there while rank 1 waited for it."""
    low, high = transport._system_ports()
    jobs = runs.with_ports(2, [{"name": str(i)} for i in range(8)])
    assert not any(low <= job["port"] <= high for job in jobs)
    assert [job["port"] for job in runs.with_ports(1, jobs)] == [0] * 8
