"""Tokenizers of folders with `tiktoken.model` and without tokenizer.json, such as Moonlight's.

    tiktoken.model          a line for each token: its bytes in base64, and its id
    tokenization_*.py       code of the model's authors, which is read and never run: the assignment
                            to `pat_str` has the pattern that divides a text
    tokenizer_config.json   special tokens, whose ids follow

The encoding is byte-pair encoding. A piece of text starts as single bytes. Neighbours that together
are a token are merged, that of the lowest id first, until no neighbours are one. The `tokenizers`
library takes the merges as a list: for each token, by id, all pairs of tokens that make it.
"""

import ast
import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_text

FILE = "tiktoken.model"
_PATTERN_NAMES = ("pat_str", "PAT_STR")


def load(folder: Path, added: Mapping[int, AddedToken]) -> Tokenizer:
    """Return the tokenizer of a folder with `tiktoken.model`. `added`: special tokens by id; ids
    between them get names `<|reserved_token_ID|>`.

    Raises:
        ConfigError: a file is damaged, or no file has a pattern.
    """
    ids = _ids(folder / FILE)
    names = {token: _as_text(token) for token in ids}
    merges = []
    for token in ids:
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(a, b) for a, b in splits if a in ids and b in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(names[a], names[b]) for a, b in known]
    vocabulary = {names[token]: id for token, id in ids.items()}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern(folder)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    reserved = range(len(ids), max(added, default=-1) + 1)
    backend.add_tokens(
        [
            added.get(id) or AddedToken(f"<|reserved_token_{id}|>", normalized=False, special=True)
            for id in reserved
        ]
    )
    return backend


def _ids(file: Path) -> dict[bytes, int]:
    """Return the id of each token's bytes, in order of the ids, which must be 0, 1, 2, ..."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(read_text(file).splitlines()):
        try:
            token, id = line.split()
            found[base64.b64decode(token, validate=True)] = int(id)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"{file}: line {number + 1} is not a token in base64 and its id; fetch it again"
            ) from None
    if list(found.values()) != list(range(len(found))):
        raise ConfigError(f"{file}: ids are not 0, 1, 2, ... in order; fetch it again")
    missing = [b for b in range(256) if bytes([b]) not in found]
    if missing:
        raise ConfigError(f"{file}: has no token for byte {missing[0]}; fetch it again")
    return found


def _as_text(token: bytes) -> str:
    """Return the bytes in the alphabet of `tokenizers.ByteLevel`."""
    return "".join(_ALPHABET[b] for b in token)


def _alphabet() -> list[str]:
    """Return the character of each byte: itself if it is in the alphabet, else the next one from
    256."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sign for sign in signs if ord(sign) > 255)
    return [chr(b) if chr(b) in signs else next(others) for b in range(256)]


_ALPHABET = _alphabet()


def _pattern(folder: Path) -> str:
    """Return the pattern of a `tokenization_*.py`: a string, or strings in a call of `join`."""
    files = sorted(folder.glob("tokenization_*.py"))
    for file in files:
        try:
            tree = ast.parse(read_text(file))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = {getattr(t, "id", getattr(t, "attr", "")) for t in targets}
                if named & {*_PATTERN_NAMES} and (text := _text(node.value)):
                    return text
    raise ConfigError(
        f"{folder}: has {FILE}, but no tokenization_*.py that assigns its pattern to pat_str; "
        "fetch the folder again, or give one with tokenizer.json"
    )


def _text(node: ast.expr | None) -> str | None:
    """Return the string that an expression is, without running it; None if it is another one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
        ):
            texts = [_text(part) for part in parts]
            return None if None in texts else between.join(text for text in texts if text)
    return None
