"""Open the folder of a run, start its log, and save its settings."""

import json
from pathlib import Path

from rlcore.cli.world import World
from rlcore.config import resolve, rules
from rlcore.config.schema import Config
from rlcore.trainer import resume
from rlcore.utils import collective, lock, log
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault, read_json


def run_folder(cfg: Config) -> Path:
    return Path(cfg.run.dir) / (cfg.run.name or "run")


def open_folder(cfg: Config, world: World) -> None:
    """Make the run's folder and start its log. Collective.

    If the folder has an older run that is not resumed, the folder is first moved aside. Log files
    are opened after that, so that none of them is in the moved folder.

    Raises:
        ConfigError: the folder cannot be made, another run uses it, or the run's export would
            delete a foreign file.
    """
    folder, aside = run_folder(cfg), None
    log.setup(world.rank)
    if world.rank == 0:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if who := lock.hold(folder.with_name(f".{folder.name}.lock")):
                raise ConfigError(
                    f"--run.name {folder.name}: {who} uses {folder}; choose another name or stop "
                    "that run first, since two runs would mix metrics and delete each other's "
                    "checkpoints"
                )
            wanted = resume.wanted_by(cfg, folder)
            starts = wanted == "auto" and not resume.found(folder)
            if starts or wanted == "fresh":
                aside = resume.move_aside(folder)
            resume.check_exports(cfg, folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise cannot_be_made(cfg, e) from e
    collective.barrier(world.everyone)
    log.setup(world.rank, folder / "logs")
    log.announce("run folder", str(folder))
    if aside is not None:
        log.log.info("moved the earlier run of this name to %s", aside)
    for line in rules.warnings(cfg) if world.rank == 0 else ():
        log.log.warning("%s", line)


def cannot_be_made(cfg: Config, error: OSError) -> ConfigError:
    """Return the error to raise if the run's folder cannot be made."""
    return ConfigError(
        f"--run.dir {cfg.run.dir}: cannot create the folder {run_folder(cfg)} ({error.strerror}: "
        f"{error.filename}); choose another"
    )


def tell_changes(cfg: Config, file: Path) -> None:
    """Warn if the settings of a resumed run differ from the settings saved in `file`. Another
    `run.steps` is usual, but moves the end of a decay."""
    if fault(file) == "no such file":
        return
    try:
        old = read_json(file, "changed settings cannot be listed")
    except ConfigError as e:
        log.log.warning("%s", e)
        return
    old = {section: keys for section, keys in old.items() if isinstance(keys, dict)}
    new = json.loads(resolve.to_json(cfg))
    decays = cfg.train.lr_schedule != "constant" and not cfg.train.lr_decay_updates
    usual = {"run.resume"} if decays else {"run.resume", "run.steps"}
    changes = [
        f"--{section}.{key} {old[section][key]} -> {value}"
        + (" (the learning rate decays until then)" if f"{section}.{key}" == "run.steps" else "")
        for section in new
        for key, value in new[section].items()
        if section not in ("log", "debug") and f"{section}.{key}" not in usual
        if old.get(section, {}).get(key, value) != value
    ]
    if changes:
        log.log.warning("settings changed since the resumed run: %s", ", ".join(changes))


def save_settings(cfg: Config, folder: Path, *, goes_on: bool) -> None:
    """Write `config.json`. If the run resumes (`goes_on`), first warn of changed settings."""
    if goes_on:
        tell_changes(cfg, folder / "config.json")
    resolve.save(cfg, folder / "config.json")
