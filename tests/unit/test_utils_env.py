"""The report about the machine."""

import json

from rlcore.utils import env
from tests import kit


def test_the_report_is_plain_data_with_versions_and_devices():
    facts = json.loads(json.dumps(env.report()))
    assert facts["packages"]["torch"].startswith("2.")
    assert facts["cpu"]["cores"] >= 1 and facts["memory_gb"] > 0
    assert isinstance(facts["cuda"]["devices"], list)


def test_the_report_reads_as_lines():
    lines = env.describe()
    assert any(line.startswith("package   torch ") for line in lines)
    assert any(line.startswith("gpu ") for line in lines)


def test_equal_gpus_are_counted(monkeypatch):
    facts = env.report()
    device = {"name": "H200", "memory_gb": 140.0}
    facts["cuda"] = {"version": "13.0", "driver": "", "devices": [device, device]}
    lines = env.describe(facts)
    assert "gpu       2 x H200, 140 GB" in lines
    assert "cuda      13.0, driver unknown" in lines


def test_only_variables_of_the_list_are_reported(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("SOME_SECRET", "hidden")
    assert env.report()["variables"]["WORLD_SIZE"] == "4"
    assert "hidden" not in json.dumps(env.report())


def test_the_report_says_what_of_the_native_part_is_built():
    built = (kit.ROOT / "rlcore" / "_C_torch.so").is_file()
    assert ("_C_torch for CPU" in env.report()["native"]) == built
