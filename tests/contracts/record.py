"""Write tests/contracts/signatures.json: what `pins.txt` asks of packages that CI lacks.

    python -m tests.contracts.record   # after a change of a pin, or of a row of such a package

It downloads the wheels of the pinned versions and reads their Python files. Nothing is installed or
run. Apex has no wheels, so `test_pins.py` compares its rows where Apex is installed.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tests.contracts.pins import NOT_INSTALLED
from tests.contracts.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("signatures.json")
TRANSFORMER_ENGINE = ("2.9.0", "2.10.0", "2.11.0")
"""A version of each minor release that pyproject.toml allows."""


def locked(package: str) -> set[str]:
    """Return the versions of a package in tools/locks."""
    text = "".join(path.read_text() for path in (ROOT / "tools/locks").glob("cuda-*.txt"))
    return set(re.findall(rf"^{package}==(\S+)", text, re.MULTILINE))


def shapes(package: str, sources: Sources) -> dict[str, dict[str, Any]]:
    """Return what a package offers of what the table asks: shapes by name, without empty parts."""
    found: dict[str, dict[str, Any]] = {}
    for pin in (pin for rows in NOT_INSTALLED.values() for pin in rows):
        if pin.name.partition(".")[0] != package:
            continue
        shape = sources.shape(pin.name, pin.has.split(), pin.mentions.split())
        if shape is None:
            continue
        one = found.setdefault(pin.name, {})
        if pin.args is not None:
            one["takes"] = shape.takes
        for part, words in (("has", shape.has), ("mentions", shape.mentions)):
            if words:
                one[part] = sorted({*one.get(part, ()), *words})
    return found


def of_wheel(package: str, version: str) -> dict[str, dict[str, Any]]:
    """Download a wheel and return the shapes in it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, f"{package}=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        return shapes(package, Sources({package: [Path(folder) / package]}))


def main() -> None:
    wanted = {
        "torch_memory_saver": sorted(locked("torch-memory-saver")),
        "transformer_engine": TRANSFORMER_ENGINE,
    }
    record = {
        package: {version: of_wheel(package, version) for version in versions}
        for package, versions in wanted.items()
    }
    FILE.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
