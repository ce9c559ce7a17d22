"""The run's secret, and what other programs can do to the run's store."""

import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from rlcore.utils import health as gangs
from rlcore.utils.flight_recorder import FlightRecorder
from rlcore.utils.health import Health
from rlcore.utils.sealed import SECRET_BYTES, ForgedValueError, SealedStore, share_secret

SECRET = b"s" * SECRET_BYTES


def share(file: Path, rank: int, store: dist.Store, timeout_s: float = 10.0) -> bytes:
    return share_secret(file, rank, 3, store, timeout_s, time.monotonic)


def test_every_rank_gets_the_secret_and_nothing_of_it_stays(tmp_path: Path) -> None:
    store, file = dist.HashStore(), tmp_path / "runs" / ".name.0.secret"
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda rank: share(file, rank, store), range(3)))
    assert len(found[0]) == SECRET_BYTES and found == found[:1] * 3
    assert list(file.parent.iterdir()) == []
    keys = ["secret/there", "secret/read", "secret/end"]
    assert store.num_keys() == len(keys)
    assert not any(found[0] in store.get(key) for key in keys)


def test_only_the_user_of_the_run_can_read_the_file(tmp_path: Path) -> None:
    store, file = dist.HashStore(), tmp_path / "secret"
    first = threading.Thread(target=share, args=(file, 0, store))
    first.start()
    store.wait(["secret/there"], timedelta(seconds=10))
    assert file.stat().st_mode & 0o777 == 0o600
    store.add("secret/read", 2)
    first.join(10)
    assert not first.is_alive() and not file.exists()


def test_a_folder_that_cannot_be_made_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    store = dist.HashStore()
    (tmp_path / "file").touch()
    for rank in (0, 1):
        with pytest.raises(ValueError, match="--run.dir .*/file: cannot create the run's folder"):
            share(tmp_path / "file" / "secret", rank, store)


def refusals(files: list[Path], store: dist.Store) -> list[str]:
    """What each rank raises that looks for the secret in its own file."""

    def refusal(rank: int) -> str:
        with pytest.raises(ValueError) as error:
            share(files[rank], rank, store)
        return str(error.value)

    with ThreadPoolExecutor(len(files)) as ranks:
        return list(ranks.map(refusal, range(len(files))))


def test_a_disk_that_the_nodes_do_not_share_is_named_by_every_rank(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "secret", tmp_path / "there" / "secret"
    found = refusals([here, here, there], dist.HashStore())
    assert found == found[:1] * 3
    assert re.search("rank 2 cannot read .* a disk shared by all nodes", found[0])
    assert list(here.parent.iterdir()) == []


def test_a_file_that_has_not_arrived_whole_is_named_by_every_rank(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "secret", tmp_path / "there" / "secret"
    there.parent.mkdir()
    there.write_bytes(b"half")
    assert all(
        "rank 1 reads 4 bytes" in said for said in refusals([here, there, here], dist.HashStore())
    )


def test_a_rank_that_does_not_read_it_ends_the_start_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="some rank did not read the run's secret"):
        share(tmp_path / "secret", 0, dist.HashStore(), timeout_s=0.1)
    assert list(tmp_path.iterdir()) == []


def test_values_of_other_programs_and_moved_values_are_refused() -> None:
    raw = dist.HashStore()
    store = SealedStore(raw, SECRET)
    store.set("a", "1")
    assert store.get("a") == b"1"
    for forged in (b"1", b"", os.urandom(64), SealedStore(raw, b"x" * 32)._code("a", b"1") + b"1"):
        raw.set("a", forged)
        with pytest.raises(ForgedValueError, match="the value of a in the run's store"):
            store.get("a")
    store.set("ab", "1")
    raw.set("a", raw.get("ab"))
    with pytest.raises(ForgedValueError):
        store.get("a")


@pytest.mark.parametrize(
    ("forged", "knows_secret"),
    [
        ("[1]", False),
        ('{"number": 1e300, "from": 0, "reason": ""}', False),
        ("{", True),
        ('{"number": 1e9, "from": 2, "reason": ""}', True),
    ],
)
def test_a_forged_alarm_ends_nothing_and_mutes_no_later_one(
    tmp_path: Path, forged: str, knows_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A malformed alarm of a rank, which knows the secret, is ignored as well."""
    monkeypatch.setattr(gangs, "GRACE_S", 1.0)
    raw = dist.HashStore()
    store = SealedStore(raw, SECRET)
    two = [
        Health(FlightRecorder(r, 2, tmp_path), store, beat_s=0.01).start(signals=False)
        for r in range(2)
    ]
    try:
        (store if knows_secret else raw).set("alarm", forged)
        end = time.monotonic() + 20
        while not all(gang._forged for gang in two) and time.monotonic() < end:
            time.sleep(0.01)
        assert all(gang._thread.is_alive() and not gang._alarms for gang in two)
        two[1].alarm("the update has made no progress for 6 s")
        two[0].wait_for_alarm()
        assert two[0]._alarms == two[1]._alarms == 1
        record = json.loads((tmp_path / "flight" / "rank0.json").read_text())
        assert record["reason"] == "alarm from rank 1"
    finally:
        for gang in two:
            gang.close()


def test_a_forged_sign_of_life_is_not_believed(tmp_path: Path) -> None:
    raw = dist.HashStore()
    gang = Health(FlightRecorder(0, 2, tmp_path), SealedStore(raw, SECRET))
    raw.set("beat/1", "{}")
    assert list(gang._last_beats()) == [0]


def test_the_health_thread_survives_what_it_did_not_expect(tmp_path: Path) -> None:
    gang = Health(
        FlightRecorder(0, 2, tmp_path), SealedStore(dist.HashStore(), SECRET), beat_s=0.01
    )
    calls: list[int] = []

    def broken() -> str:
        calls.append(1)
        raise KeyError("machine")

    gang._cannot_finish = broken  # type: ignore[method-assign]
    gang.start(signals=False)
    end = time.monotonic() + 20
    while len(calls) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(calls) >= 3
    gang.close()
