"""Prompt sets: JSONL and parquet files, data sets on the Hugging Face hub, or a generated task, as
tokenised `Prompt` records.

Invalid rows are reported with file and line, too long prompts are counted, and the run continues. A
file without a usable row is an error. Rows are tokenised when they are read, because the length
filter needs the tokens and row numbers count only kept rows.

Files are read by own code instead of `datasets`, which keeps a second copy of them in a cache and
knows no lines. It reads data sets on the hub (`hub.py`), whose errors name row numbers.
"""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Protocol, overload, runtime_checkable

import numpy as np

from rlcore.data import calc_task, cards_task, hub, label_task, lake_task, oneline_task
from rlcore.data.generated import NUM_VAL, Split, TaskRow
from rlcore.data.packed import PackedPrompts
from rlcore.records import Prompt
from rlcore.utils import files, net
from rlcore.utils.bounds import show
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log

_SHOWN = 5
"""Number of invalid rows that are reported individually; the others are only counted."""
_EXAMPLE_CHARS = 60
MOST_ROW_BYTES = 64 << 20
"""Maximum size of a line. A file without newlines is one line."""
_MOST_ROWS = 256
_BATCH_BYTES = 4 << 20
_MOST_REASONS = 1000
"""Number of different reasons and columns that are counted; the counts of further ones are lost."""
_NOT_ALNUM = re.compile(r"[\W_]+")
_ASKS_FOR_MARK = re.compile(  # not a box that is part of the question
    r"\b(?:in|within|inside|into|between|using|with|after|form|format)\b[^\w\\<#]*"
    r"(?:\\+boxed\b|answer:|####|<answer>)",
    re.IGNORECASE,
)
"""Instruction to mark the final answer, such as `within \\boxed{}` or `of the form Answer: X`."""

Message = Mapping[str, Any]


class Tokens(Protocol):
    """Tokenizer methods that this module calls; `hf.tokenizer.Tokenizer` has them."""

    def encode(self, text: str) -> list[int]: ...

    def min_tokens(self, text: str) -> int: ...

    def render_chat(self, messages: Sequence[Message]) -> str: ...

    def render_chats(self, chats: Sequence[Sequence[Message]]) -> list[str | ConfigError]: ...


class PromptSettings(Protocol):
    """Keys of `DataConfig` that this module reads."""

    @property
    def train(self) -> tuple[str, ...]: ...

    @property
    def val(self) -> tuple[str, ...]: ...

    @property
    def demonstrations(self) -> tuple[str, ...]: ...

    @property
    def weights(self) -> tuple[float, ...]: ...

    @property
    def prompt_field(self) -> str: ...

    @property
    def answer_field(self) -> str: ...

    @property
    def teacher_prompt_field(self) -> str: ...

    @property
    def template(self) -> Literal["auto", "chat", "none"]: ...

    @property
    def system(self) -> str: ...

    @property
    def suffix(self) -> str: ...

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def bad_rows(self) -> Literal["skip", "refuse"]: ...

    @property
    def drop_duplicates(self) -> bool: ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def num_val_prompts(self) -> int: ...


class TaskModule(Protocol):
    """Interface of a module that generates a task, such as `label_task`."""

    NAME: str
    CHARS: str
    """Characters of the task's texts, in the order of their token ids."""

    # A multi-turn task also defines TURNS: the characters that the policy produces.

    def make(self, split: Split, seed: int, index: int) -> TaskRow: ...

    def to_prompt(
        self, row: TaskRow, index: int, encode: Callable[[str], Sequence[int]]
    ) -> Prompt: ...


@runtime_checkable
class ChatTaskModule(TaskModule, Protocol):
    """Interface of a module that generates chats, such as `calc_task`."""

    END: str
    """Token that ends a message."""
    WORDS: Sequence[str]
    """Words that are one token each, after the characters."""
    TEMPLATE: str
    """Chat template."""

    def conversation(self, row: TaskRow) -> list[dict[str, Any]]:
        """Return the messages of a demonstration, in OpenAI's form."""


TASKS: dict[str, TaskModule] = {
    task.NAME: task for task in (label_task, oneline_task, lake_task, cards_task, calc_task)
}
"""Generated tasks by their name in data.train and data.val."""


class PromptSet(Protocol):
    """Set of prompts by row number; if `is_finite` is False, the set is endless, without length."""

    @property
    def is_finite(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


@dataclass(frozen=True)
class TaskSet:
    """Prompt set of a generated task; a row is generated when it is read."""

    task: TaskModule
    split: Split
    seed: int
    num_rows: int
    """Number of rows in the set; 0: endless."""
    encode: Callable[[str], Sequence[int]]

    @property
    def is_finite(self) -> bool:
        return self.num_rows > 0

    def __len__(self) -> int:
        if not self.num_rows:
            raise TypeError("an endless task has no length; check is_finite first")
        return self.num_rows

    def __getitem__(self, index: int) -> Prompt:
        if self.num_rows and index >= self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        row = self.task.make(self.split, self.seed, index)
        return self.task.to_prompt(row, index, self.encode)


@dataclass(frozen=True)
class RowSet:
    """Prompt set in memory, such as the rows of files."""

    rows: Sequence[Prompt]
    is_finite: bool = True
    sizes: tuple[int, ...] = ()
    """Number of rows of each entry of data.train."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        return self.rows[index]


@overload
def load(
    config: PromptSettings, which: Literal["train"], tokenizer: Tokens, seed: int
) -> PromptSet: ...


@overload
def load(
    config: PromptSettings, which: Literal["val"], tokenizer: Tokens, seed: int
) -> list[tuple[str, RowSet]]: ...


def load(
    config: PromptSettings, which: Literal["train", "val"], tokenizer: Tokens, seed: int
) -> PromptSet | list[tuple[str, RowSet]]:
    """Load prompt sets. `train` joins the entries of data.train, in their order, into one set;
    `val` returns (name, set) for each entry of data.val, named by `names_of`. data.num_prompts
    (data.num_val_prompts) limits each entry, after data.drop_duplicates. `seed` does not change a
    task's validation rows.

    Raises ValueError if a file is missing, has an unknown type or no usable row. With data.bad_rows
    `refuse`, an invalid row also raises ValueError.
    """
    sources = entries(config, which)
    if not sources and which == "train":
        raise ConfigError(
            "--data.train: is empty; give .jsonl or .parquet files, data sets on the hub, or a "
            f"task: {', '.join(TASKS)}"
        )
    cap = config.num_prompts if which == "train" else config.num_val_prompts
    names = names_of(sources)
    if which == "train" and TASKS.keys() & set(sources):
        return _train_task(config, tokenizer, seed)
    if which == "train":
        rows, seen = PackedPrompts(), set[int]() if config.drop_duplicates else None
        ends = [0]
        for source, name in zip(sources, names, strict=True):
            read_by_teacher = config.teacher_prompt_field
            _read_into(rows, Path(source), name, config, tokenizer, cap, seen, read_by_teacher)
            ends.append(len(rows))
        return RowSet(rows, sizes=tuple(b - a for a, b in itertools.pairwise(ends)))
    sets = []
    for source, name in zip(sources, names, strict=True):
        if source in TASKS:
            encode = encoder(config, tokenizer)
            task = TaskSet(TASKS[source], "val", 0, cap or NUM_VAL, encode)
            sets.append((name, RowSet([task[i] for i in range(len(task))])))
        else:
            sets.append((name, RowSet(read_file(Path(source), name, config, tokenizer, cap))))
    return sets


def entries(
    config: PromptSettings, which: Literal["train", "val", "demonstrations"]
) -> tuple[str, ...]:
    """Return the entries of data.train, data.val or data.demonstrations. Names on the hub without a
    split get one: `train`, or `test` for validation."""
    split = "test" if which == "val" else "train"
    return tuple(hub.with_split(source, split) for source in getattr(config, which))


def overlap(train: PromptSet, val: Sequence[tuple[str, RowSet]]) -> int:
    """Count the validation prompts that are also in the training files, and warn if there are any.
    The comparison ignores case and all characters except letters and digits."""
    if not isinstance(train, RowSet):
        return 0  # the splits of a generated task share no prompt
    wanted = {_fingerprint(row.text) for _, rows in val for row in rows.rows}
    known: dict[str, Prompt] = {}
    for row in train.rows if wanted else ():
        if (text := _fingerprint(row.text)) in wanted:
            known[text] = row
    total = 0
    for name, rows in val:
        both = [row for row in rows.rows if _fingerprint(row.text) in known]
        if not both:
            continue
        total += len(both)
        twin = known[_fingerprint(both[0].text)]
        log.warning(
            "data.val %s: %d of %d prompts are also in data.train, e.g. row %d (row %d of %s "
            "there), so it is not held-out data",
            name,
            len(both),
            len(rows),
            both[0].index,
            twin.index,
            twin.dataset,
        )
    return total


def read_file(
    path: Path, name: str, config: PromptSettings, tokenizer: Tokens, cap: int = 0
) -> PackedPrompts:
    """Return the usable rows of a file, at most `cap` (0: all), and log the skipped rows."""
    prompts = PackedPrompts()
    _read_into(prompts, path, name, config, tokenizer, cap)
    return prompts


def _read_into(
    prompts: PackedPrompts,
    path: Path,
    name: str,
    config: PromptSettings,
    tokenizer: Tokens,
    cap: int,
    seen: set[int] | None = None,
    read_by_teacher: str = "",
) -> None:
    """Append the usable rows of a file. `seen`: hashes of the prompts so far, which are left out;
    None: keep them. `read_by_teacher`: field with the teacher's prompt."""
    first, report = len(prompts), RowReport(path)
    for asked in _questions(path, config, tokenizer):
        place, row = asked.place, asked.row
        if cap and len(prompts) - first == cap:
            break
        try:
            if asked.error is not None:
                raise asked.error
            if (least := tokenizer.min_tokens(asked.rendered)) > config.max_prompt_tokens:
                report.long(place, least, "at least ")
                continue
            prompt = _prompt(asked, name, config, tokenizer, read_by_teacher)
        except (ValueError, RecursionError) as error:
            report.bad(place, error, row, config)
            continue
        if len(prompt.tokens) > config.max_prompt_tokens:
            report.long(place, len(prompt.tokens))
            continue
        if seen is not None:
            if (key := _hash(prompt.text)) in seen:
                report.duplicate()
                continue
            seen.add(key)
        report.kept(asks_itself=not asked.messages[-1]["content"].endswith(config.suffix))
        prompts.append(prompt)
    report.tell(len(prompts) - first, config)


class RowReport:
    """Report on the skipped rows of one file: invalid rows, too long prompts and duplicates."""

    def __init__(self, path: Path, limit: str = "--data.max_prompt_tokens") -> None:
        """`limit`: keys that give the maximum number of tokens, for messages."""
        self._path, self._limit = path, limit
        self._num_bad = 0
        self._num_long = 0
        self._num_duplicates = 0
        self._num_asking = 0
        self._longest = (0, "", "")
        self._reasons: Counter[str] = Counter()
        self._columns: Counter[str] = Counter()

    def bad(self, place: str, error: Exception, row: Any, config: PromptSettings) -> None:
        """Count an invalid row, and log the first ones with the reason. `place` is `file:line`.

        Raises:
            ConfigError: data.bad_rows is `refuse`.
        """
        if config.bad_rows == "refuse":
            raise ConfigError(
                f"{place}: {error}; fix the row, or skip such rows with --data.bad_rows skip"
            ) from error
        self._num_bad += 1
        _count(self._reasons, [str(error)])
        _count(self._columns, map(str, row) if isinstance(row, dict) else ())
        if self._num_bad <= _SHOWN:
            log.warning("%s: %s; row skipped", place, error)

    def long(self, place: str, num_tokens: int, bound: str = "") -> None:
        """Count a too long prompt; `bound` is "at least " if `num_tokens` is a lower bound."""
        self._num_long += 1
        self._longest = max(self._longest, (num_tokens, bound, place))

    def kept(self, asks_itself: bool) -> None:
        """Count a kept prompt. `asks_itself`: it has an instruction in place of data.suffix."""
        self._num_asking += asks_itself

    def duplicate(self) -> None:
        """Count a prompt that an earlier row has."""
        self._num_duplicates += 1

    def tell(self, num_kept: int, config: PromptSettings) -> None:
        """Log the totals of the file.

        Raises:
            ConfigError: no row was kept.
        """
        if self._num_bad > _SHOWN:
            log.warning("%s: skipped %d bad rows in total", self._path, self._num_bad)
        if self._num_long:
            num_tokens, bound, place = self._longest
            log.warning(
                "%s: dropped %d prompts longer than %s %d; the longest has %s%d tokens (%s)",
                self._path,
                self._num_long,
                self._limit,
                config.max_prompt_tokens,
                bound,
                num_tokens,
                place,
            )
        if num_kept:
            left_out = f", {n} duplicates left out" if (n := self._num_duplicates) else ""
            log.info("%s: %d prompts%s", self._path, num_kept, left_out)
            if self._num_asking:
                log.info(
                    "%s: %d prompts say themselves how to mark the answer, so --data.suffix is not "
                    "appended to them",
                    self._path,
                    self._num_asking,
                )
            return
        if self._num_bad:
            columns = ", ".join(_shown(c) for c, _ in self._columns.most_common(10)) or "none"
            reason, count = self._reasons.most_common(1)[0]
            hint = "; set --data.prompt_field and --data.answer_field" if "field" in reason else ""
            raise ConfigError(
                f"{self._path}: no usable row; {count} of {self._num_bad}: {reason}. The fields "
                f"of the rows are {columns}{hint}"
            )
        if self._num_long:
            raise ConfigError(
                f"{self._path}: every prompt is longer than {self._limit} "
                f"{config.max_prompt_tokens}; raise it"
            )
        if self._num_duplicates:
            raise ConfigError(
                f"{self._path}: every prompt is one of an earlier row; leave the file out, or "
                "unset --data.drop_duplicates"
            )
        raise ConfigError(f"{self._path}: has no rows")


def _count(counts: Counter[str], texts: Iterable[str]) -> None:
    """Count texts of a file, of which each may be another."""
    for text in texts:
        if text in counts or len(counts) < _MOST_REASONS:
            counts[text] += 1


def _shown(name: str) -> str:
    """Return a field's name, shortened and printable."""
    short = name[:_EXAMPLE_CHARS]
    return short if short.isprintable() else ascii(short)


def _train_task(config: PromptSettings, tokenizer: Tokens, seed: int) -> TaskSet:
    if len(config.train) > 1:
        name = next(source for source in config.train if source in TASKS)
        raise ConfigError(
            f"--data.train {' '.join(config.train)}: a generated task cannot be combined; give "
            f"either {name} or files"
        )
    task = TASKS[config.train[0]]
    if config.weights:
        raise ConfigError(
            f"--data.weights {show(config.weights[0])}: has no effect on the generated task "
            f"{task.NAME}; unset it"
        )
    if config.teacher_prompt_field:
        raise ConfigError(
            f"--data.teacher_prompt_field {config.teacher_prompt_field}: the generated task "
            f"{task.NAME} has no second prompt; leave it out"
        )
    if config.drop_duplicates:
        log.warning("--data.drop_duplicates: has no effect on the generated task %s", task.NAME)
    return TaskSet(task, "train", seed, config.num_prompts, encoder(config, tokenizer))


def encoder(config: PromptSettings, tokenizer: Tokens) -> Callable[[str], list[int]]:
    """Return the tokenising function of generated prompts, with a chat template if configured."""
    if config.template != "chat":
        return lambda text: tokenizer.encode(text + config.suffix)
    return lambda text: tokenizer.encode(tokenizer.render_chat(messages_of(text, config)))


def names_of(sources: Sequence[str]) -> list[str]:
    """Return a name per file, task or data set on the hub: the stem or NAME. If two are equal, they
    get the folder, or organisation, configuration and split.

    Raises:
        ConfigError: two files have the same folder and stem.
    """
    labels = [_labels(source) for source in sources]
    shorts = [short for short, _ in labels]
    names = [short if shorts.count(short) == 1 else long for short, long in labels]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"data files {twice[0]}: two files have this name; rename one")
    return names


def _labels(source: str) -> tuple[str, str]:
    """Return the short and the long name of an entry of data.train or data.val."""
    if hub.is_name(source):
        return hub.labels(source)
    path = Path(source).absolute()
    return path.stem, f"{path.parent.name}/{path.stem}"


def rows_of(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield (`file:line`, row, approximate size in bytes) for every row of a .jsonl or .parquet
    file, or of a data set on the hub; an invalid line yields its exception as the row.

    Raises:
        ConfigError: the file is missing, has another type, or cannot be read.
    """
    if hub.is_name(str(path)):
        yield from hub.rows(hub.with_split(str(path), "train"))
        return
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"data file {path}: must end in .jsonl or .parquet, or be a task: {', '.join(TASKS)}; "
            "or a data set on the hub, such as openai/gsm8k:main:train"
        )
    if why := files.fault(path):
        raise ConfigError(f"data file {path}: {why}")
    yield from _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)


def _jsonl(path: Path) -> Iterator[tuple[str, Any, int]]:
    with path.open("rb") as file:
        for number in itertools.count(1):
            if not (line := file.readline(MOST_ROW_BYTES)):
                return
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                if len(line) == MOST_ROW_BYTES and not line.endswith(b"\n"):
                    while (rest := file.readline(MOST_ROW_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    raise ValueError(f"longer than {MOST_ROW_BYTES >> 20} MiB")
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # invalid UTF-8 also raises ValueError
                example = line[:_EXAMPLE_CHARS].decode("utf-8", "replace").strip()
                row = ValueError(f"not JSON ({_first(error)}): {example!r}")
            yield f"{path}:{number}", row, len(line)


def _parquet(path: Path) -> Iterator[tuple[str, Any, int]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        # By default the whole file would stay in memory until it is closed.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            row_bytes = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
            size = max(1, min(_MOST_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
            for batch in file.iter_batches(batch_size=size):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row, row_bytes
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: cannot be read after row {number}: {_first(error)}") from error


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """Row of a file with its question, or with the reason why the row is invalid."""

    place: str
    row: Any
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    """Text of the messages, without the system's."""
    rendered: str = ""
    """Text to tokenise."""
    error: Exception | None = None


def _questions(path: Path, config: PromptSettings, tokenizer: Tokens) -> Iterator[_Question]:
    """Yield every row with its rendered question. Rows are rendered in batches, which are small at
    the start of a file, since a caller may need only the first row."""
    rows, limit = iter(rows_of(path)), 1
    while batch := _batch(rows, limit, config):
        if config.template == "none":
            yield from batch
        else:
            yield from _rendered(batch, tokenizer)
        limit = min(2 * limit, _MOST_ROWS)


def _rendered(batch: Sequence[_Question], tokenizer: Tokens) -> Iterator[_Question]:
    """Render the questions of a batch with the chat template."""
    texts = iter(tokenizer.render_chats([q.messages for q in batch if q.error is None]))
    for question in batch:
        if question.error is not None:
            yield question
        elif isinstance(text := next(texts), str):
            yield replace(question, rendered=text)
        else:
            yield replace(question, error=text)


def _batch(
    rows: Iterator[tuple[str, Any, int]], limit: int, config: PromptSettings
) -> list[_Question]:
    """Read at most `limit` rows; a row after `_BATCH_BYTES` bytes begins the next batch."""
    batch: list[_Question] = []
    total = 0
    while len(batch) < limit and total < _BATCH_BYTES and (found := next(rows, None)):
        place, row, num_bytes = found
        total += num_bytes
        try:
            batch.append(_question(place, row, config))
        except (ValueError, RecursionError) as error:
            batch.append(_Question(place=place, row=row, error=error))
    return batch


def _question(place: str, row: Any, config: PromptSettings) -> _Question:
    """Read the question of a row. Raise ValueError if the row is invalid."""
    if isinstance(row, Exception):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not a JSON object")
    asked, answers = split_answers(field_of(row, config.prompt_field))
    if answers and not asked:
        raise ValueError(f"field {config.prompt_field!r} has only messages of the assistant")
    messages = messages_of(asked, config)
    text = "\n\n".join(str(m["content"]) for m in messages if m["role"] != "system")
    if config.template == "none" and not isinstance(asked, str):
        raise ValueError("a list of messages needs --data.template chat")
    return _Question(place=place, row=row, messages=messages, text=text, rendered=text)


def _prompt(
    asked: _Question,
    name: str,
    config: PromptSettings,
    tokenizer: Tokens,
    read_by_teacher: str = "",
) -> Prompt:
    """Convert a row to a prompt. Raise ValueError if the row is invalid."""
    row, other = asked.row, None
    known = (config.prompt_field, config.answer_field, read_by_teacher)
    fields = {k: v for k, v in row.items() if k not in known}
    if read_by_teacher:
        text = _rendered_field(row, read_by_teacher, config, tokenizer)
        other = np.array(tokenizer.encode(text), np.int32)
    prompt = Prompt(
        index=0,  # `PackedPrompts` numbers its prompts
        dataset=name,
        tokens=np.array(tokenizer.encode(asked.rendered), np.int32),
        answer=_reference(row, config),
        text=asked.text,
        fields=fields,
        teacher_tokens=other,
    )
    try:
        net.encode(prompt)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(f"holds a value that cannot be sent ({_first(error)})") from error
    return prompt


def _rendered_field(
    row: dict[str, Any], name: str, config: PromptSettings, tokenizer: Tokens
) -> str:
    """Return the text to tokenise of a field with a prompt."""
    asked, _ = split_answers(field_of(row, name))
    messages = messages_of(asked, config, name)
    if config.template != "none":
        return tokenizer.render_chat(messages)
    if not isinstance(asked, str):
        raise ValueError("a list of messages needs --data.template chat")
    return str(messages[-1]["content"])


def _reference(row: dict[str, Any], config: PromptSettings) -> str:
    """Return the reference answer of a row as text; "" if data.answer_field is empty."""
    key = config.answer_field
    if key != config.prompt_field:
        return answer_of(row, key)
    _, answers = split_answers(row[key])
    if not answers:
        raise ValueError(f"field {key!r} does not end with the assistant's message, its answer")
    return answer_of(answers[-1], "content")


def field_of(row: dict[str, Any], name: str) -> Any:
    """Return a field of a row. Raise ValueError if the row lacks it, or it is null."""
    """Return a field of a row.

    Raises:
        ValueError: the field is missing or null.
    """
    if row.get(name) is None:
        raise ValueError(f"no field {name!r}" if name not in row else f"field {name!r} is null")
    return row[name]


def answer_of(row: dict[str, Any], name: str) -> str:
    """Return the row's answer (field `name`) as text; "" if `name` is empty.

    Raises:
        ValueError: the field is neither text nor a finite number.
    """
    if not name:
        return ""
    answer = field_of(row, name)
    if not isinstance(answer, str | int | float):
        raise ValueError(f"field {name!r} is a {type(answer).__name__}, not text or a number")
    if isinstance(answer, float) and not isfinite(answer):
        raise ValueError(f"field {name!r} is {answer}, not text or a finite number")
    return str(answer)


def role_of(message: Any) -> str:
    """Return the role of a chat message; "" if it has none or is no message."""
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else ""


def split_answers(asked: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Split a prompt field into the prompt and the messages of the assistant at its end, since the
    policy writes the next one of these itself."""
    if not isinstance(asked, list):
        return asked, []
    end = len(asked)
    while end and role_of(asked[end - 1]) == "assistant":
        end -= 1
    return asked[:end], asked[end:]


def messages_of(asked: Any, config: PromptSettings, name: str = "") -> list[dict[str, Any]]:
    """Return the chat messages in a prompt field; a plain text becomes one user message. The suffix
    is appended to the last message, unless suffix and prompt both say how to mark the answer;
    data.system is added if there is no system message. `name`: field's name for errors; default:
    data.prompt_field.

    Raises:
        ValueError: the value is neither text nor a list of messages, or its last message is empty.
    """
    key = name or config.prompt_field
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise ValueError(f"field {key!r} is neither text nor a list of messages")
    messages = []
    for m in asked:
        if not role_of(m) or not isinstance(m.get("content"), str):
            raise ValueError(f"field {key!r}: a message lacks role or content as text")
        messages.append(dict(m))
    if not messages[-1]["content"].strip():
        raise ValueError(f"field {key!r} is empty")
    asks = any(_ASKS_FOR_MARK.search(m["content"]) for m in messages)
    if not (asks and _ASKS_FOR_MARK.search(config.suffix)):
        messages[-1]["content"] += config.suffix
    if config.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return messages


def _fingerprint(text: str) -> str:
    """Return the letters and digits of a text, in lower case."""
    return _NOT_ALNUM.sub("", text.lower())


def _hash(text: str) -> int:
    """Hash the fingerprint of a text to 8 bytes."""
    digest = hashlib.blake2b(_fingerprint(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
