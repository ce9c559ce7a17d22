"""No wait above five seconds is silent."""

import threading

import pytest

from rlcore.utils import waits
from rlcore.utils.log import log


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lambda form, *rest: lines.append(form % rest))
    return lines


def test_a_long_wait_is_told_again_and_again_until_it_ends(said: list[str]) -> None:
    enough = threading.Event()

    def count(form: str, *rest: object) -> None:
        said.append(form % rest)
        if len(said) == 3:
            enough.set()

    log.info = count  # type: ignore[method-assign]  # the fixture restores it
    with waits.waiting("starting engines", 0.01, 0.01):
        assert enough.wait(60)
    num = len(said)
    assert set(said) == {"starting engines: 0 s so far"}
    assert not enough.wait(0) or len(said) == num


def test_a_short_wait_says_nothing_and_an_error_ends_it(said: list[str]) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), waits.waiting("starting engines"):
        raise KeyError
    assert said == [] and threading.active_count() == before
