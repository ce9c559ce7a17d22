"""Find models that are given by their names on the Hugging Face hub, such as `Qwen/Qwen3-8B`, and
download them into the hub's cache (`HF_HOME`). A folder of that name comes first."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_SETTINGS = (
    "*.json",
    "*.jinja",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "tokenization_*.py",
)
_WEIGHTS = ("*.safetensors",)


def is_name(path: str) -> bool:
    """Return whether `path` is no folder here but may be a name on the hub: ORG/NAME, or
    ORG/NAME@REVISION with a branch, tag or commit."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def is_download(folder: str) -> bool:
    """Return whether the folder is one of the hub's cache, as `folder_of` returns."""
    return Path(folder).parent.name == "snapshots"


def folder_of(path: str, key: str, *, weights: bool = True) -> str:
    """Return `path` if it is a folder; else download the model of this name, and return its folder
    in the cache, whose last part is the commit. Ranks of a node share the cache and wait for each
    other's files. Without a network, use what an earlier call has downloaded.

    Args:
        key: setting that names the model, for errors.
        weights: whether weights are needed, or only settings and tokenizer.

    Raises:
        ConfigError: the hub cannot be reached, or has no such model for this user.
    """
    if not is_name(path):
        return path
    name, _, revision = path.partition("@")
    found = _download(path, name, revision or None, key, _SETTINGS + _WEIGHTS * weights)
    if weights and not any(Path(found).glob("*.safetensors")):
        raise ConfigError(
            f"{key} {path}: the model on the hub has no *.safetensors; give one that has"
        )
    return found


def _download(
    path: str, name: str, revision: str | None, key: str, patterns: "Sequence[str]"
) -> str:
    # imported here: takes a second, and folders do not need it
    import httpx
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if os.environ.get("RANK", "0") != "0":
        disable_progress_bars()
    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except errors.GatedRepoError:
        why = "its owner grants access on the hub, after which `hf auth login` is needed here"
    except errors.RevisionNotFoundError:
        why = f"it has no branch, tag or commit {revision} on the hub"
    except errors.RepositoryNotFoundError:
        why = "there is neither such a folder here nor, for this user, such a model on the hub"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            "there is no such folder here, and the hub cannot be reached; with a network, "
            f"`hf download {name}` fills the cache"
        )
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        why = f"cannot download it from the hub ({str(error).strip().splitlines()[0]})"
    raise ConfigError(f"{key} {path}: {why}")
