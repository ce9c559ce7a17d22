"""Folders with tiktoken.model, against tokenizer.json of the same tokens and against the rule
itself."""

import base64
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from rlcore.hf.tokenizer import load_tokenizer
from rlcore.hf.weights import _write_rest
from rlcore.utils.errors import ConfigError
from tests.unit.test_hf_tokenizer import TEXTS

SPECIALS = {"300": "[EOS]", "303": "<|im_end|>"}
CODE = '''
class Tokens(Base):
    num_reserved_special_tokens: int = 8
    pat_str = "|".join(
        [
            r"""[a-z]+""",
            r"""\\s+|[^a-z\\s]""",
        ]
    )
    def __init__(self):
        raise RuntimeError("is never run")
'''


def write(folder: Path, tokens: list[bytes], code: str = CODE, specials: dict = SPECIALS) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {id}" for id, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenization_tokens.py").write_text(code)
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_tokens.Tokens", None]},
        "eos_token": "[EOS]",
        "added_tokens_decoder": {id: {"content": c, "special": True} for id, c in specials.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# Ids 256 to 299. "hug" has two divisions; "bu", "un" overlap; "gs" is of a higher id than "ug".
WORDS = [b"ug", b"un", b"hug", b"gs", b"bu", b"bun", b"  ", b"hugs", "ü".encode(), b"pugs"]
TOKENS = [bytes([b]) for b in range(256)] + WORDS
TOKENS += [b"a" * n for n in range(2, 2 + 300 - len(TOKENS))]


def by_the_rule(text: str) -> list[int]:
    """A piece that is a token, else neighbours whose union has the lowest id are joined."""
    ids, out = {token: id for id, token in enumerate(TOKENS)}, []
    for piece in re.findall(r"[a-z]+|\s+|[^a-z\s]", text):
        whole = piece.encode()
        parts = [whole] if whole in ids else [bytes([b]) for b in whole]
        while True:
            pairs = [(ids.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
            found = [(id, i) for id, i in pairs if id is not None]
            if not found:
                break
            _, i = min(found)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        out += [ids[part] for part in parts]
    return out


def test_neighbours_are_joined_by_the_lowest_id(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, TOKENS))
    for text in ["hugs", "pugs bun  buns", "aaaaaaa" * 9, "bugs hun ügs", "a\n  b", "", *TEXTS[:3]]:
        ids = tokenizer.encode(text)
        assert ids == by_the_rule(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == (300,)
    assert tokenizer.encode("bun<|im_end|>[EOS]") == [261, 303, 300]
    assert tokenizer.decode([261, 301, 303]) == "bun"
    assert tokenizer.decode([261, 301], skip_special_tokens=False) == "bun<|reserved_token_301|>"


def test_the_tokens_of_qwen_give_the_ids_of_its_tokenizer(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "tokenizer_qwen"
    whole = json.loads((folder / "tokenizer.json").read_text())
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    of_sign = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}
    vocabulary = sorted(whole["model"]["vocab"], key=whole["model"]["vocab"].get)
    pattern = whole["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    tokens = [bytes(of_sign[c] for c in token) for token in vocabulary]
    specials = {str(t["id"]): t["content"] for t in whole["added_tokens"]}
    write(
        tmp_path,
        tokens,
        f"PAT_STR = {pattern!r}\n",
        specials | {str(max(map(int, specials)) + 1): "[EOS]"},
    )
    ours, theirs = load_tokenizer(tmp_path), load_tokenizer(folder)
    page = (Path(__file__).parents[2] / "README.md").read_text()
    for text in [*TEXTS, page, page[::-1], "你好，世界！混合English文本。 don't we'll 1234567"]:
        assert ours.encode(text) == theirs.encode(text)


def test_an_exported_folder_has_the_files(tmp_path: Path) -> None:
    class Model:
        path = str(tmp_path)

        def to_dict(self) -> dict:
            return {}

    out = tmp_path / "out"
    out.mkdir()
    _write_rest(Model(), write(tmp_path / "in", TOKENS), out)  # type: ignore[arg-type]
    assert load_tokenizer(out).encode("bun") == [261]


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"code": "pat_str = pattern()"},
            "has tiktoken.model, but no tokenization_*.py that assigns",
        ),
        ({"code": "pat_str ="}, "has tiktoken.model, but no tokenization_*.py that assigns"),
        ({"tokens": TOKENS[1:]}, "has no token for byte 0"),
        ({"tokens": [*TOKENS[:-1], b"a"]}, "ids are not 0, 1, 2"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, change: dict, said: str) -> None:
    write(tmp_path, **({"tokens": TOKENS} | change))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_tokenizer(tmp_path)


def test_a_line_that_is_no_token_is_refused(tmp_path: Path) -> None:
    write(tmp_path, TOKENS)
    with open(tmp_path / "tiktoken.model", "a") as file:
        file.write("!!! 300\n")
    with pytest.raises(ConfigError, match="line 301 is not a token in base64 and its id"):
        load_tokenizer(tmp_path)
