"""Find data sets that are given by their names on the Hugging Face hub, such as
`openai/gsm8k:main:train`, with the library `datasets`. A file of that name comes first.

The library's cache (`HF_HOME`) is used if the hub cannot be reached. Each revision that is named
has a cache of its own, since without a network the library takes the newest of a cache.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.waits import waiting

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/(?P<last>[A-Za-z0-9][\w.-]*))(@(?P<revision>[\w./-]+))?"
    r"((:(?P<config>[^:/]+))?:(?P<split>[\w.-]+))?"
)
_BATCH_ROWS = 256
_BATCH_BYTES = 4 << 20


class UnreachableError(ConfigError):
    """The hub cannot be reached, and the cache lacks the data set."""


def is_name(source: str) -> bool:
    """Return whether `source` is no file here but may be a name on the hub:
    ORG/NAME[@REVISION][:CONFIG]:SPLIT, or without a split."""
    is_file = source.endswith((".jsonl", ".parquet")) or Path(source).exists()
    return not is_file and _NAME.fullmatch(source) is not None


def with_split(source: str, split: str) -> str:
    """Return `source` with a split, if it is a name on the hub without one."""
    return f"{source}:{split}" if is_name(source) and not _parts(source)["split"] else source


def labels(source: str) -> tuple[str, str]:
    """Return the short and the long label of a name on the hub: NAME, ORG/NAME/CONFIG/SPLIT."""
    parts = _parts(source)
    long = [parts["name"], parts["config"], parts["split"]]
    return parts["last"], "/".join(filter(None, long))


def rows(source: str) -> Iterator[tuple[str, Any, int]]:
    """Yield (`source:row`, row, approximate size in bytes) for every row of the data set of this
    name, which has a split; a row with values that are not JSON yields an exception as the row.

    Raises:
        ConfigError: the hub has no such data set, configuration or split for this user.
        UnreachableError: the hub cannot be reached, and the cache lacks the data set.
    """
    with waiting(f"loading {source} from the Hugging Face hub"):
        found = _load(source, **_parts(source))
    row_bytes = found.data.nbytes // max(len(found), 1)
    size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
    number = 0
    for table in found.with_format("arrow").iter(batch_size=size):
        for row in table.to_pylist():
            number += 1
            try:
                json.dumps(row)
            except (TypeError, ValueError) as error:  # an image, audio or a date
                row = ValueError(f"holds a value that is not JSON ({error})")
            yield f"{source}:{number}", row, row_bytes


def _parts(source: str) -> dict[str, Any]:
    found = _NAME.fullmatch(source)
    assert found is not None, source
    return found.groupdict()


def _load(
    source: str, name: str, last: str, revision: str | None, config: str | None, split: str
) -> Any:
    """Return the split as a `datasets.Dataset`; files that the cache lacks are downloaded."""
    # imported here: takes two seconds, and files do not need it
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        builder = datasets.load_dataset_builder(
            f"hf://datasets/{name}",
            config,
            revision=revision,
            cache_dir=str(cache / "revisions" / quote(revision, safe="") if revision else cache),
        )
        builder.download_and_prepare()
        found = builder.as_dataset(split=split)
    except DatasetNotFoundError as error:
        if "gated" in str(error):
            why = "its owner grants access on the hub, after which `hf auth login` is needed here"
        elif str(error).startswith("Revision"):
            why = f"it has no branch, tag or commit {revision} on the hub"
        else:
            why = "there is neither such a file here nor, for this user, such a data set on the hub"
    except Exception as error:  # the library raises what its many parts raise
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        why = " ".join((str(error).partition("Example of usage")[0] + cause).split())
        if isinstance(error, ConnectionError) or why.startswith("Couldn't find cache"):
            raise UnreachableError(
                f"data set {source}: there is no such file here, and the hub cannot be reached "
                f"({why}); start once with a network, which fills the cache (--dry-run suffices)"
            ) from error
    else:
        log.info("%s: configuration %s, commit %s", source, builder.config.name, builder.hash)
        return found
    raise ConfigError(f"data set {source}: {why}")
