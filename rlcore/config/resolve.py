"""Command line to `Config`: selectors first, nearest-name errors, JSON out.

tyro does the typing; this file adds three things it does not have: the selectors `--algo`,
`--reward`, `--env`, `--mode`, `--schedule` that choose a section's class, one-sentence errors that
name the nearest key, and the last occurrence of a key winning, so that recipes can be overridden by
"$@".
"""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.schema import Config, SelectConfig
from rlcore.utils.errors import ConfigError
from rlcore.utils.secret import hide

ADDRESS = "mux.url"
"""May hold a password."""
SELECTORS = tuple(f.name for f in dataclasses.fields(SelectConfig))


def parse(argv: Sequence[str], sections: dict[str, Callable[[str], type]]) -> Config:
    """The configuration that `argv` describes.

    `sections` maps a selector to the function that turns its name into the section's config class,
    such as {"algo": algos.config_class}. ConfigError in one sentence on a bad key or value.
    """
    argv = _split_equals(argv)
    chosen, rest = _take_selectors(argv)
    select = SelectConfig(**chosen)
    for name in SELECTORS:
        _check_choice(name, getattr(select, name))
    made = {name: resolve(getattr(select, name))() for name, resolve in sections.items()}
    default = Config(select=select, **made)
    rest = _for_each(rest, default)
    _check_keys(rest, default)
    return _tyro(_last_wins(rest), default)


def keys(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of the configuration with its value, without passwords: {"run.seed": 0, ...}."""
    flat = {}
    for f in dataclasses.fields(config):
        value, name = getattr(config, f.name), prefix + f.name.rstrip("_")
        value = hide(value) if name == ADDRESS else value
        flat |= keys(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return flat


def to_json(config: Config) -> str:
    """The resolved configuration, one section an object, without passwords."""
    sections = dataclasses.asdict(config)
    section, key = ADDRESS.split(".")
    sections[section][key] = hide(sections[section][key])
    return json.dumps({name.rstrip("_"): part for name, part in sections.items()}, indent=2)


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(config) + "\n")


def _split_equals(argv: Sequence[str]) -> list[str]:
    out: list[str] = []
    for a in argv:
        if a.startswith("--") and "=" in a:
            out += a.split("=", 1)
        else:
            out.append(a)
    return out


def _take_selectors(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    chosen, rest, i = {}, [], 0
    while i < len(argv):
        name = argv[i].removeprefix("--").removeprefix("select.")
        if argv[i].startswith("--") and name in SELECTORS:
            if i + 1 == len(argv) or argv[i + 1].startswith("--"):
                raise ConfigError(f"--{name}: needs a value, such as {_example(name)}")
            chosen[name] = argv[i + 1]
            i += 2
        else:
            rest.append(argv[i])
            i += 1
    return chosen, rest


def _example(selector: str) -> str:
    return f"--{selector} {SelectConfig.__dataclass_fields__[selector].default or 'NAME'}"


def _check_choice(name: str, value: str) -> None:
    hint = typing.get_type_hints(SelectConfig)[name]
    allowed = typing.get_args(hint)
    if allowed and value not in allowed:
        raise ConfigError(f"--{name} {value}: {_allowed(value, allowed)}")


def _allowed(value: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, [str(a) for a in allowed], n=1)
    text = "allowed are " + ", ".join(map(str, allowed))
    return text + (f"; did you mean {near[0]}?" if near else "")


def _for_each(argv: list[str], default: Config) -> list[str]:
    """Where a section is made of sections (a sum of rewards), a key without the name of one is of
    all that have it: `--reward.timeout_s 5` becomes `--reward.math.timeout_s 5`, ..."""
    known = keys(default)
    out: list[str] = []
    for chunk in _chunks(argv):
        section, _, key = chunk[0][2:].replace("-", "_").partition(".")
        part = getattr(default, section, None)
        names = [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
        spelt = [
            f"{section}.{n}.{key}" for n in names if dataclasses.is_dataclass(getattr(part, n))
        ]
        found = [k for k in spelt if _positive(k) in known]
        out += [w for k in found for w in (f"--{k}", *chunk[1:])] if found else chunk
    return out


def _positive(key: str) -> str:
    """`train.no_sp` is about `train.sp`."""
    section, _, name = key.rpartition(".")
    return f"{section}.{name.removeprefix('no_')}"


def _check_keys(argv: list[str], default: Config) -> None:
    """Refuse unknown keys here, in one sentence with the nearest name."""
    known = keys(default)
    for a in argv:
        if not a.startswith("--"):
            continue
        name = a[2:].replace("-", "_")
        if name in known or isinstance(known.get(_positive(name)), bool):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        if not near:  # a right key in a wrong section
            near = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]][:1]
        hint = f"; did you mean --{near[0]}?" if near else "; see --help"
        raise ConfigError(f"{a}: there is no such key{hint}")


def _chunks(argv: list[str]) -> list[list[str]]:
    """Every key with its values."""
    chunks: list[list[str]] = []
    for a in argv:
        if a.startswith("--"):
            chunks.append([a])
        elif chunks:
            chunks[-1].append(a)
        else:
            raise ConfigError(f"{a}: expected a key such as --run.seed before this value")
    return chunks


def _last_wins(argv: list[str]) -> list[str]:
    """Keep the last occurrence of every key, with its values."""
    last = {_positive(chunk[0][2:].replace("-", "_")): chunk for chunk in _chunks(argv)}
    return [a for chunk in last.values() for a in chunk]


def help_text(default: Config) -> str:
    """Every key with its type, default and meaning."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        _cli(["--help"], default)
    return out.getvalue().replace("async_", "async")


def _cli(argv: list[str], default: Config) -> Config:
    import tyro  # half a second that `--help` of another command should not pay

    return tyro.cli(
        Config,
        args=[re.sub(r"^--async\.", "--async_.", a) for a in argv],  # a word of Python's own
        default=default,
        prog="rlcore train",
        use_underscores=True,
        config=(tyro.conf.AvoidSubcommands,),
    )


def _tyro(argv: list[str], default: Config) -> Config:
    """Typed values by tyro; the box it prints on an error becomes one sentence."""
    screen = io.StringIO()
    try:
        with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(screen):
            return _cli(_negations(argv), default)
    except SystemExit:
        raise ConfigError(_sentence(screen.getvalue(), argv)) from None


def _negations(argv: list[str]) -> list[str]:
    """`--a.flag false` and `--a.no_flag` both become tyro's `--a.no-flag`."""
    out: list[str] = []
    for i, a in enumerate(argv):
        if a.lower() in ("true", "false") and out and argv[i - 1].startswith("--"):
            if a.lower() == "false":
                section, _, key = out[-1].rpartition(".")
                out[-1] = f"{section}.no_{key}"
            continue
        out.append(a)
    return out


def _sentence(screen: str, argv: list[str]) -> str:
    """tyro's box without its frame, its title and its reference to --help."""
    text = " ".join(re.sub(r"[\u2500-\u257f]|-{5,}", " ", screen).split())
    text = text.replace("--async_.", "--async.")
    text = text.partition("Argument helptext:")[0].partition("For full helptext")[0]
    text = re.sub(r"^(Parsing|Value) error|^Invalid choice|^Missing argument", "", text).strip()
    named = [
        a for a in argv if a.startswith("--") and a.replace("-", "_") in text.replace("-", "_")
    ]
    if not named:
        return text
    return f"{named[0]} {' '.join(_values_of(argv, named[0]))}: {text}"


def _values_of(argv: list[str], key: str) -> list[str]:
    words: list[str] = []
    for a in argv[argv.index(key) + 1 :]:
        if a.startswith("--"):
            break
        words.append(a)
    return words
