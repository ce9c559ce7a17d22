"""Config section `--reward.*` of `--reward judge`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rlcore.config.schema import RewardConfig, Share
from rlcore.utils.bounds import above, at_least


@dataclass(frozen=True, kw_only=True)
class JudgeRewardConfig(RewardConfig):
    timeout_s: float = 60.0
    """A batch of the judge that takes longer is given up: its samples score `on_error`, and the
    judge starts again. With `url`, of a request."""
    model: str = ""
    """Hugging Face folder of the judge; with `url` the model's name at that server."""
    url: str = ""
    """An OpenAI-compatible server, such as http://judge0:8000/v1, instead of a model on our own
    devices; `workers` is then how many requests are under way at a time."""
    retries: Annotated[int, at_least(0)] = 4
    """Further tries of a request to `url` after the first one, within timeout_s."""
    backoff_s: Annotated[float, at_least(0)] = 0.25
    """Pause before the second try; each further one is twice as long."""
    api_key_env: str = ""
    """Environment variable that holds the key for `url`; empty: none is sent."""
    rubric: str = ""
    """File with the judge's prompt, a Jinja template; empty: rewards/judge/rubric.jinja."""
    template: Literal["auto", "chat", "none"] = "auto"
    """`chat` renders the rubric as a user message with the judge's chat template; `none` takes it
    as it is; `auto` is chat where the tokenizer has a template."""
    method: Literal["prefill", "generate"] = "prefill"
    """`prefill`: the score is the probability of a `good` token to come next, against that of a
    `bad` one. `generate`: the judge writes up to `max_new_tokens`, and `pattern` finds the verdict.
    """
    good: tuple[str, ...] = ("Yes",)
    """Verdicts that score 1. Each is one token of the judge, with `prefill`."""
    bad: tuple[str, ...] = ("No",)
    """Verdicts that score 0."""
    pattern: str = r"Verdict:\s*(\S+)"
    """Of `generate`: the last match's group is a word of `good` or `bad`, or a number of points."""
    max_points: Annotated[float, above(0)] = 10.0
    """Points that score 1."""
    max_new_tokens: Annotated[int, at_least(1)] = 128
    max_tokens: Annotated[int, at_least(1)] = 8192
    """Longest prompt of the judge; a longer response loses its beginning."""
    batch_rows: Annotated[int, at_least(1)] = 32
    """Most requests in a batch."""
    batch_tokens: Annotated[int, at_least(1)] = 32768
    """Most tokens in a batch, padding included, unless a request alone has more."""
    batch_wait_s: Annotated[float, at_least(0)] = 0.02
    """A batch that is not full waits so long for more."""
    cache_entries: Annotated[int, at_least(0)] = 65536
    """Verdicts that a rank remembers, by prompt and response; 0: none."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    resident_ratio: Share = 0.5
    """Share of the judge's layers that may stay on the device; the others stream through two
    buffers. Embedding, last norm and head always stay. Fewer stay where memory is short."""
    device_memory_gb: Annotated[float, at_least(0)] = 0.0
    """What the judge may take of its device in GB (10^9 bytes); 0: what is free there."""
    threads: Annotated[int, at_least(1)] = 1
    """CPU threads of the judge."""
    start_timeout_s: Annotated[float, above(0)] = 900.0
    """How long the judge may take to load."""
    mps: Literal["auto", "on", "off"] = "auto"
    """CUDA MPS, which lets the judge and the engines compute at the same time on one GPU. `auto`
    says where it cannot be; `on` then ends the run."""
    mps_percent: Annotated[int, at_least(0, at_most=100, note="; 0: no limit")] = 0
    """Share of a GPU's multiprocessors that the judge may use, in percent; 0: no limit."""
    mps_gb: Annotated[float, at_least(0)] = 0.0
    """Device memory that MPS lets the judge take, in GB; 0: no limit."""

    def problems(self, key: str) -> list[str]:
        """See `RewardConfig`."""
        out = []
        if not self.model:
            what = (
                "the model's name at the server"
                if self.url
                else "the Hugging Face folder of the judge"
            )
            out.append(f"--{key}.model: is empty; give {what}")
        if self.url and not self.url.startswith(("http://", "https://")):
            out.append(f"--{key}.url {self.url}: must begin with http:// or https://")
        if not self.good or not self.bad or set(self.good) & set(self.bad):
            out.append(
                f"--{key}.good {' '.join(self.good)}: good and bad need words, and none in common"
            )
        return out
