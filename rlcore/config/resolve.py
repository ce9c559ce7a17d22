"""Parse a command line into a `Config`, and write a `Config` as JSON.

The selectors `--algo`, `--reward`, `--env`, `--mode`, `--schedule` choose the class of a section.
Then every key is looked up in the schema, and the words after it are parsed as the field's type.
An error names the nearest valid key. The last occurrence of a key wins, so that "$@" can override a
recipe. tyro writes the text of `--help`.
"""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config import other_names
from rlcore.config.schema import Config, SelectConfig
from rlcore.utils.bounds import wanted
from rlcore.utils.errors import ConfigError
from rlcore.utils.secret import hide

ADDRESS = "mux.url"
"""Key whose value may contain a password."""
SELECTORS = tuple(f.name for f in dataclasses.fields(SelectConfig))
_SECTIONS = tuple(f.name.rstrip("_") for f in dataclasses.fields(Config))


def parse(
    argv: Sequence[str],
    sections: dict[str, Callable[[str], type]],
    early: Callable[[Config], None] | None = None,
) -> Config:
    """Parse `argv` into a configuration.

    Args:
        sections: for each selector, a function that returns the config class of a name, such as
            {"algo": algos.config_class}. The functions are called in order. Each may import torch,
            so it is called only if all keys of earlier sections are valid.
        early: called before these functions, with a configuration of all other sections.

    Raises:
        ConfigError: a key or value is wrong.
    """
    argv = _split_equals(argv)
    chosen, rest = _take_selectors(argv)
    for name, value in chosen.items():
        _check_choice(name, value)
    select = SelectConfig(**typing.cast(Any, chosen))
    chunks = _chunks(rest)
    fixed = [c for c in chunks if _section(c) in _SECTIONS and _section(c) not in sections]
    cfg = _given(Config(select=select), fixed)
    if early is not None:
        early(cfg)
    for name, resolve in sections.items():
        cfg = dataclasses.replace(cfg, **{name: resolve(getattr(select, name))()})
        cfg = _given(cfg, [c for c in chunks if _section(c) == name])
    # A key of an unknown section raises a ConfigError.
    return _given(cfg, [c for c in chunks if _section(c) not in _SECTIONS])


def with_keys(cfg: Config, argv: Sequence[str]) -> Config:
    """Return `cfg` with further keys, of which the selectors may be --mode and --schedule. Raise
    ConfigError if a key or value is wrong."""
    chosen, rest = _take_selectors(_split_equals(argv))
    assert chosen.keys() <= {"mode", "schedule"}, "the other selectors choose classes of sections"
    for name, value in chosen.items():
        _check_choice(name, value)
    select = dataclasses.replace(cfg.select, **typing.cast(Any, chosen))
    return _given(dataclasses.replace(cfg, select=select), _chunks(rest))


def keys(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return all keys with their values, such as {"run.seed": 0}, but without passwords."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value, name = getattr(config, f.name), prefix + f.name.rstrip("_")
        value = hide(value) if name == ADDRESS else value
        flat |= keys(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return flat


def words(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return keys with their values, as `keys` or config.json has them, as words of a command line.
    Values of sections may be mappings themselves."""
    out: list[str] = []
    for key, value in keys.items():
        name = prefix + key
        if isinstance(value, Mapping):
            out += words(value, f"{name}.")
        elif isinstance(value, bool):
            section, _, last = name.rpartition(".")
            out.append(f"--{name}" if value else f"--{section}.no_{last}")
        elif isinstance(value, list | tuple):
            out += [f"--{name}", *map(str, value)]
        else:
            out += [f"--{name}", str(value)]
    return out


def to_json(config: Config) -> str:
    """Return the resolved configuration as JSON, one object per section, without passwords."""
    sections = dataclasses.asdict(config)
    section, key = ADDRESS.split(".")
    sections[section][key] = hide(sections[section][key])
    return json.dumps({name.rstrip("_"): part for name, part in sections.items()}, indent=2)


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration as JSON."""
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
            if i + 2 < len(argv) and not argv[i + 2].startswith("--"):
                raise ConfigError(f"--{name} {argv[i + 1]} {argv[i + 2]}: takes one value")
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


def _for_each(chunks: list[list[str]], default: Config) -> list[list[str]]:
    """If a section has subsections (a sum of rewards), set a key given without a subsection in all
    of them: `--reward.timeout_s 5` becomes `--reward.math.timeout_s 5` and so on."""
    known = _types(default)
    out: list[list[str]] = []
    for option, *words in chunks:
        section, _, key = option[2:].replace("-", "_").partition(".")
        part = getattr(default, section, None)
        names = [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
        spelt = [
            f"{section}.{n}.{key}" for n in names if dataclasses.is_dataclass(getattr(part, n))
        ]
        found = [k for k in spelt if k in known or _is_switch(known.get(_positive(k)))]
        out += [[f"--{k}", *words] for k in found] or [[option, *words]]
    return out


def _positive(key: str) -> str:
    """Return the positive form of a negated key: `train.sp` for `train.no_sp`."""
    section, _, name = key.rpartition(".")
    return f"{section}.{name.removeprefix('no_')}"


def _is_switch(kind: Any) -> bool:
    """Return whether a key of type `kind` needs no value, as in --train.sp and --train.no_sp."""
    return kind is bool or bool in typing.get_args(kind)


def _chunks(argv: list[str]) -> list[list[str]]:
    """Group the words of a command line into chunks; each is a key with its values."""
    chunks: list[list[str]] = []
    for a in argv:
        if a.startswith("--"):
            chunks.append([a])
        elif chunks:
            chunks[-1].append(a)
        else:
            raise ConfigError(f"{a}: expected a key such as --run.seed before this value")
    return chunks


def _given(cfg: Config, chunks: list[list[str]]) -> Config:
    """Return `cfg` with the keys in `chunks` set; each chunk is a key with its values."""
    return _with(cfg, _values(_for_each(chunks, cfg), cfg))


def _section(chunk: list[str]) -> str:
    return chunk[0][2:].replace("-", "_").partition(".")[0]


def _values(chunks: list[list[str]], default: Config) -> dict[str, Any]:
    """Return the value of every given key; the last occurrence of a key wins."""
    known = _types(default)
    last = {_key(chunk[0], known): chunk for chunk in chunks}
    found = {}
    for key, chunk in last.items():
        is_negated = chunk[0][2:].replace("-", "_") != key  # negated, as in --train.no_sp
        value = _value(bool if is_negated else known[key], chunk)
        found[key] = not value if is_negated else value
    return found


def _types(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every key of a section and its subsections, by key."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(type(section))
    for f in dataclasses.fields(section):
        value, name = getattr(section, f.name), prefix + f.name.rstrip("_")
        is_section = dataclasses.is_dataclass(value)
        found |= _types(value, f"{name}.") if is_section else {name: hints[f.name]}
    return found


def _key(option: str, known: dict[str, Any]) -> str:
    """Return the key of an option such as `--train.sp` or `--train.no_sp`."""
    name = option[2:].replace("-", "_")
    if name in known:
        return name
    if _is_switch(known.get(_positive(name))):
        return _positive(name)
    if said := other_names.explain(name):
        raise ConfigError(f"{option}: there is no such key; {said}")
    # The key may be in another section.
    near = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        raise ConfigError(f"{option}: there is no such key; did you mean --{near[0]}?")
    section = name.partition(".")[0]
    own = ", ".join(k.partition(".")[2] for k in known if k.startswith(f"{section}."))
    hint = f"the keys of --{section} are {own}" if own else "see --help"
    raise ConfigError(f"{option}: there is no such key; {hint}")


def _value(kind: Any, chunk: list[str]) -> Any:
    """Parse the words after an option into a value of type `kind`.

    Raises:
        ConfigError: the words cannot be parsed as this type.
    """
    option, *words = chunk
    given = hide(" ".join(word or "''" for word in chunk))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_switch(kind) and not words:
        return True
    if origin is list or (origin is tuple and args[1:] == (...,)):
        return origin(_one(given, args[0], word) for word in words)
    if not words:
        raise ConfigError(f"{option}: needs a value, {wanted(kind)}")
    if origin is tuple and len(words) == len(args):
        return tuple(_one(given, one, word) for one, word in zip(args, words, strict=True))
    if len(words) > 1:
        raise ConfigError(f"{given}: takes one value, {wanted(kind)}")
    return _one(given, kind, words[0])


def _one(given: str, kind: Any, word: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if word not in map(str, args):
            raise ConfigError(f"{given}: {_allowed(word, args)}")
        return next(a for a in args if str(a) == word)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            with contextlib.suppress(ConfigError):
                return _one(given, option, word)
    elif kind is bool and word.lower() in ("true", "false"):
        return word.lower() == "true"
    elif kind is types.NoneType and word.lower() == "none":
        return None
    elif kind in (str, Path):
        return kind(word)
    elif kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    raise ConfigError(f"{given}: must be {wanted(kind)}")


def _with(section: Any, values: dict[str, Any]) -> Any:
    """Return the section with `values` set, which are given by key, such as `math.timeout_s`."""
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        name, value = f.name.rstrip("_"), getattr(section, f.name)
        if not dataclasses.is_dataclass(value):
            changes |= {f.name: values[name]} if name in values else {}
            continue
        below = {k[len(name) + 1 :]: v for k, v in values.items() if k.startswith(f"{name}.")}
        changes |= {f.name: _with(value, below)} if below else {}
    return dataclasses.replace(section, **changes)


def help_text(default: Config) -> str:
    """Return the text of `--help`: every key with its type, default and meaning."""
    import tyro  # slow to import (half a second), and only --help needs tyro

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        tyro.cli(
            Config,
            args=["--help"],
            default=default,
            prog="rlcore train",
            use_underscores=True,
            config=(tyro.conf.AvoidSubcommands,),
        )
    filled = re.sub(r"(?m)^ {8}\S.*\n(?: {8}\S.*\n)+", _fill, out.getvalue())
    return filled.replace("async_", "async")


def _fill(paragraph: re.Match[str]) -> str:
    """Wrap a paragraph of --help again, since tyro keeps the line breaks of a docstring."""
    width, indent = max(map(len, paragraph[0].splitlines())), " " * 8
    words = " ".join(paragraph[0].split())
    return (
        textwrap.fill(
            words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        ).rstrip()
        + "\n"
    )
