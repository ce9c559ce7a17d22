"""Load tokenizers and chat templates of Hugging Face folders with only the `tokenizers` library.

Own code instead of AutoTokenizer, whose import takes 2.6 s of CPU time if torch is already imported
and 4.2 s otherwise; all imports of a dry run take 2.2 s. AutoTokenizer is used only if a folder has
no tokenizer.json. Unlike in transformers, decoding never "cleans up" spaces.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rlcore.hf import tiktoken_model
from rlcore.hf.config import as_ids
from rlcore.hf.messages import template_messages
from rlcore.hf.template import Template
from rlcore.utils.errors import ConfigError, LimitError
from rlcore.utils.files import fault, folder_fault, read_json, read_text
from rlcore.utils.log import announce

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Default chat template for tokenizers without one: the format of Qwen's models."""

_OTHER_FORMATS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_MOST_TOKENS_OF_A_CHARACTER = 8  # more tokens without a whole character are invalid UTF-8
_MOST_BYTES = 256 << 20
_LONG_CHARS = 100_000
_WHITE = [chr(i) for i in range(1 << 16) if chr(i).isspace()]
_SPACES = str.maketrans("", "", "\u0120\u010a\u0109\u010d\u2581")
"""Removes the signs for space, newline, tab, return (byte-level) and space (SentencePiece)."""
_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_READS_TOOLS = re.compile(r"\btools\b")
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


class AddedTokenSettings(msgspec.Struct):
    """Token in tokenizer_config.json or special_tokens_map.json."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class NamedTemplate(msgspec.Struct):
    """One of several chat templates of a tokenizer."""

    name: str
    template: str


class TokenizerSettings(msgspec.Struct):
    """Keys that are read from tokenizer_config.json, special_tokens_map.json and
    chat_template.json."""

    added_tokens_decoder: dict[int, AddedTokenSettings] | None = None
    bos_token: str | AddedTokenSettings | None = None
    eos_token: str | AddedTokenSettings | None = None
    pad_token: str | AddedTokenSettings | None = None
    unk_token: str | AddedTokenSettings | None = None
    chat_template: str | list[NamedTemplate] | None = None


class Tokenizer:
    """Converter between text and token ids. Use `load_tokenizer` to create one."""

    def __init__(
        self,
        backend: Backend,
        specials: Mapping[str, str],
        template: str | None,
        eos_ids: Sequence[int] = (),
        name: str = "tokenizer",
    ) -> None:
        """Create a tokenizer. `specials` maps roles (`eos_token`, ...) to tokens; `eos_ids` are
        further ids that end a response, in addition to the id of `eos_token`."""
        self._backend = backend
        self._specials = dict(specials)
        self._template = template
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._name = name
        own = [self.token_id(specials["eos_token"])] if "eos_token" in specials else []
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_ids]))
        """Token ids that end a response; the id of the tokenizer's `eos_token` comes first."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a chat template; otherwise `render_chat` uses ChatML."""
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """Source of the chat template that `render_chat` uses."""
        return self._template or CHATML

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Make the chat template show these tools (OpenAI's form) by default."""
        self._tools = tools

    def token_id(self, token: str) -> int:
        """Return the id of one token, spelled as in the vocabulary. Raise ConfigError if the
        vocabulary lacks the token."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise ConfigError(
                f"{self._name}: has no token {token!r}; use the model's own tokenizer"
            )
        return found

    def first_difference(self, other: "Tokenizer") -> str | None:
        """Return the token with the smallest id that another tokenizer lacks or has under another
        id, or that only the other one has; None if the vocabularies are equal."""
        ours, theirs = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        apart = {token: number for token, number in ours.items() ^ theirs.items()}
        return min(apart, key=lambda token: (apart[token], token), default=None)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text. Special tokens written in the text become their ids. Further special
        tokens (such as BOS) are added only with `add_special_tokens`. Raise ConfigError if a
        character is not in the vocabulary."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises only `Exception`
            raise ConfigError(
                f"{self._name}: cannot encode {text[:40]!r} ({error}); use another tokenizer"
            ) from error

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, without encoding it: encoding 30
        MB takes minutes. Return 0 for a short text, or if the tokenizer's kind has no bound."""
        if len(text) < _LONG_CHARS or not self._widest_token:
            return 0
        # A token may take any number of spaces, and NFC may join four characters to one.
        return -(-(len(text) - sum(map(text.count, _WHITE))) // (4 * self._widest_token))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text, without special tokens (by default) and unknown ids."""
        listed = [int(i) for i in ids]
        return self._backend.decode(listed, skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, special tokens included; the joined texts equal the
        decoded text. A character made of several tokens belongs to its last token."""
        out: list[str] = []
        start, done = 0, 0  # `start`: start of the decoding context; `done`: tokens already decoded
        for i in range(len(ids)):
            before = self.decode(ids[start:done], skip_special_tokens=False)
            text = self.decode(ids[start : i + 1], skip_special_tokens=False)
            if text.endswith("\ufffd") and i - done < _MOST_TOKENS_OF_A_CHARACTER:
                out.append("")
                continue
            out.append(text[len(before) :])
            start, done = done, i + 1
        return out

    def decode_batch(
        self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Decode each row of ids to text."""
        # The library's batch call would start a thread pool, which does not survive a fork.
        return [self.decode(row, skip_special_tokens) for row in rows]

    def defused(self, text: str) -> str:
        """Return the text with a space inserted into every special token, so that `encode` reads
        plain words. Otherwise untrusted text could end or begin a chat message."""
        for token in self._special_texts:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render messages in OpenAI's form with the chat template, by default up to the start of
        the assistant's answer. Messages may have `tool_calls`, `reasoning_content` and the role
        `tool`. `variables` are passed to the template, such as `tools` (OpenAI's form) or
        `enable_thinking=False`. Raise ConfigError if the template fails for the messages, for
        whatever reason, does not show the tools, or exceeds the limits of `hf/template.py`."""
        variables["add_generation_prompt"] = add_generation_prompt
        (found,) = self.render_chats([messages], **variables)
        if isinstance(found, ConfigError):
            raise found
        return found

    def render_chats(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], **variables: Any
    ) -> list[str | ConfigError]:
        """Render several lists of messages as `render_chat` does. A ConfigError stands for a list
        for which the template fails. Raise LimitError if the template exceeds its limits too
        often."""
        common = {
            "tools": list(self._tools) or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        common |= self._specials | variables
        if common["tools"] and not _READS_TOOLS.search(self.chat_template):
            raise ConfigError(
                f"{self._name}: the chat template does not show tools to the model; use a model "
                "trained for tool calls, or describe the tools in the system message"
            )
        asked: list[dict[str, Any]] = []
        errors: dict[int, ConfigError] = {}
        for i, chat in enumerate(chats):
            try:
                asked.append({**common, "messages": template_messages(chat, self.chat_template)})
            except ConfigError as error:
                errors[i] = error
        try:
            texts = iter(self._renderer.render(asked))
        except LimitError as error:
            raise LimitError(f"{self._name}: {error}") from error
        found = [errors[i] if i in errors else next(texts) for i in range(len(chats))]
        return [
            ConfigError(f"{self._name}: {f}") if isinstance(f, ConfigError) else f for f in found
        ]

    @cached_property
    def _widest_token(self) -> int:
        """Maximum number of characters, except spaces, that one token stands for; 0 if unknown."""
        return _widest(json.loads(self._backend.to_str()))

    @cached_property
    def _special_texts(self) -> list[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and token.content]

    @cached_property
    def _renderer(self) -> Template:
        if self._template is None:
            announce("chat template", f"{self._name} has none, using ChatML")
        return Template(self.chat_template)


def load_tokenizer(
    folder: str | Path, eos_ids: Sequence[int] = (), key: str = "--model.tokenizer"
) -> Tokenizer:
    """Load the tokenizer of a folder; `key` is the setting that names the folder.

    `eos_ids` are further ids that end a response, such as those of the model's config.json if the
    tokenizer is in another folder. The folder's own config.json and generation_config.json are
    always read. Raise ConfigError if the folder does not exist or has no tokenizer."""
    folder = Path(folder)
    if why := folder_fault(folder):
        raise ConfigError(f"{key} {folder}: {why}; give one with tokenizer.json")
    settings = _settings(folder / "tokenizer_config.json")
    backend = _backend(folder, settings, key)
    specials = _special_tokens(_settings(folder / "special_tokens_map.json"))
    specials |= _special_tokens(settings)
    ends: list[int] = []
    for file in ("generation_config.json", "config.json"):
        ends += as_ids(_optional(folder / file).get("eos_token_id"), str(folder / file))
    return Tokenizer(
        backend, specials, _template(folder, settings), [*ends, *eos_ids], f"tokenizer {folder}"
    )


def make_char_tokenizer(
    folder: str | Path,
    chars: Iterable[str],
    pad: str = "<pad>",
    eos: str = "<eos>",
    *,
    words: Sequence[str] = (),
    template: str | None = None,
) -> Tokenizer:
    """Write a tokenizer with one token per character: `pad` is 0, `eos` 1, then `chars` in order.
    Each of `words` is one token too, a special one if it begins with `<|`. `template` is the chat
    template. transformers and SGLang can load the folder too. Encoding other characters raises an
    error."""
    vocabulary = {token: number for number, token in enumerate([pad, eos, *chars, *words])}
    # "<unk>" has no id, so that the library raises an error for an unknown character.
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([pad, eos])
    backend.add_tokens([AddedToken(w, special=w.startswith("<|"), normalized=False) for w in words])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": eos,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return load_tokenizer(folder)


def _backend(folder: Path, settings: TokenizerSettings, key: str) -> Backend:
    file = folder / "tokenizer.json"
    if why := fault(file):
        if why == "no such file" and (folder / tiktoken_model.FILE).is_file():
            known = (settings.added_tokens_decoder or {}).items()
            added = {id: AddedToken(**msgspec.structs.asdict(token)) for id, token in known}
            return tiktoken_model.load(folder, added)
        if why == "no such file":
            return _converted(folder, key)
        raise ConfigError(f"{file}: {why}; fetch the file again")
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise ConfigError(
            f"{file}: has {size} bytes; a tokenizer has at most {_MOST_BYTES}; fetch the file again"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises only `Exception`
        raise ConfigError(f"{file}: not a tokenizer ({error}); fetch the file again") from error
    backend.no_padding()
    backend.no_truncation()
    # Add tokens that only tokenizer_config.json has; the library numbers them in this order.
    listed = sorted((settings.added_tokens_decoder or {}).items())
    new = [(number, t) for number, t in listed if backend.token_to_id(t.content) is None]
    backend.add_tokens([AddedToken(**msgspec.structs.asdict(token)) for _, token in new])
    for number, token in new:
        if backend.token_to_id(token.content) != number:
            raise ConfigError(
                f"{folder}: token {token.content!r} has id {number} in tokenizer_config.json, "
                "which is not the next free id of tokenizer.json; fetch both files again"
            )
    return backend


def _converted(folder: Path, key: str) -> Backend:
    """Read a tokenizer in another format (vocab.json, tokenizer.model) through transformers."""
    if not any((folder / name).is_file() for name in _OTHER_FORMATS):
        raise ConfigError(
            f"{key} {folder}: no tokenizer.json in it; give a folder with a tokenizer"
        )
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # transformers may raise any exception for a damaged file
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{key} {folder}: no tokenizer.json in it, and transformers cannot make one"
            f" ({reason[0] if reason else type(error).__name__}); give a folder with tokenizer.json"
        ) from error
    announce("tokenizer", f"{folder} has no tokenizer.json, read through transformers")
    return backend


def _optional(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if there is no such file."""
    return {} if fault(file) == "no such file" else read_json(file)


def _settings(file: Path) -> TokenizerSettings:
    try:
        return msgspec.convert(_optional(file), TokenizerSettings, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}; fetch the file again") from error


def _special_tokens(settings: TokenizerSettings) -> dict[str, str]:
    """Return the special tokens by role; a file may write a token as an object with `content`."""
    found = {}
    for role in _SPECIALS:
        token = getattr(settings, role)
        if token is not None:
            found[role] = token.content if isinstance(token, AddedTokenSettings) else token
    return found


def _template(folder: Path, settings: TokenizerSettings) -> str | None:
    """Return the chat template; None if the folder has none. As in transformers, a template file
    has precedence over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if fault(file) != "no such file":
        return read_text(file)
    template = _settings(folder / "chat_template.json").chat_template or settings.chat_template
    if isinstance(template, list):
        return {entry.name: entry.template for entry in template}.get("default")
    return template


def _widest(settings: Mapping[str, Any]) -> int:
    """Return the maximum number of characters, except spaces, that one token of a tokenizer.json
    stands for. Return 0 if a token may stand for any text, as an unknown token does."""
    model = settings["model"]
    splits, cleans = _steps(settings["pre_tokenizer"]), _steps(settings["normalizer"])
    vocabulary = model["vocab"]
    if model["type"] != "BPE":
        return 0
    if any(step["type"] == "ByteLevel" for step in splits):
        letters: Iterable[str] = pre_tokenizers.ByteLevel.alphabet()
    elif model.get("byte_fallback"):
        letters = (f"<0x{byte:02X}>" for byte in range(256))
    else:
        return 0
    if not all(letter in vocabulary for letter in letters):
        return 0
    if not all(map(_drops_no_text, splits)) or not all(map(_drops_no_text, cleans)):
        return 0
    tokens = [*vocabulary, *(token["content"] for token in settings["added_tokens"])]
    return max(len(token.translate(_SPACES)) for token in tokens)


def _steps(setting: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer of tokenizer.json."""
    if setting is None:
        return []
    if setting["type"] != "Sequence":
        return [setting]
    parts = setting.get("normalizers") or setting.get("pretokenizers") or []
    return [step for part in parts for step in _steps(part)]


def _drops_no_text(step: Mapping[str, Any]) -> bool:
    """Return whether a step keeps all characters except spaces, up to Unicode's composition."""
    match step["type"]:
        case "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split":
            return step["behavior"] in _KEEPING
        case "Replace":
            return step["pattern"] == {"String": " "}
    return False
