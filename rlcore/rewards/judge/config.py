"""Config section `--reward.*` of `--reward judge`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rlcore.config.schema import RewardConfig, Share
from rlcore.utils.bounds import above, at_least


@dataclass(frozen=True, kw_only=True)
class JudgeRewardConfig(RewardConfig):
    """Keys of `--reward judge`."""

    timeout_s: float = 60.0
    """Seconds after which a batch of the judge fails: its samples score reward.on_error, and the
    judge restarts. With reward.url, seconds per request."""
    model: str = ""
    """Hugging Face folder of the judge, or its name on the hub; with reward.url the model's name at
    that server."""
    url: str = ""
    """OpenAI-compatible server of the judge, such as http://judge0:8000/v1; empty: a model on the
    run's own devices. With a server, reward.workers is the number of concurrent requests."""
    retries: Annotated[int, at_least(0)] = 4
    """Number of retries of a failed request to reward.url, within reward.timeout_s."""
    backoff_s: Annotated[float, at_least(0)] = 0.25
    """Seconds before the first retry; each further pause is twice as long."""
    api_key_env: str = ""
    """Name of the environment variable with the API key for reward.url; empty: no key."""
    rubric: str = ""
    """File with the judge's prompt as a Jinja template; empty:
    rlcore/rewards/judge/rubric.jinja."""
    template: Literal["auto", "chat", "none"] = "auto"
    """Form of the judge's prompt. `chat`: a user message in the judge's chat template. `none`:
    plain text. `auto`: `chat` if the tokenizer has a template."""
    method: Literal["prefill", "generate"] = "prefill"
    """Source of the score. `prefill`: probability of a reward.good token relative to a reward.bad
    one as the next token. `generate`: the verdict that reward.pattern finds in the judge's text."""
    good: tuple[str, ...] = ("Yes",)
    """Verdicts that score 1; with reward.method prefill each must be one token of the judge."""
    bad: tuple[str, ...] = ("No",)
    """Verdicts that score 0; with reward.method prefill each must be one token of the judge."""
    pattern: str = r"Verdict:\s*(\S+)"
    """Regular expression for the verdict, with reward.method generate. Its one group must match a
    word of reward.good or reward.bad, or a number of points; the last match counts."""
    max_points: Annotated[float, above(0)] = 10.0
    """Number of points that gives a score of 1, with reward.method generate."""
    max_new_tokens: Annotated[int, at_least(1)] = 128
    """Maximum number of tokens that the judge writes, with reward.method generate."""
    max_tokens: Annotated[int, at_least(1)] = 8192
    """Maximum number of tokens in the judge's prompt; a longer response loses its beginning."""
    batch_rows: Annotated[int, at_least(1)] = 32
    """Maximum number of requests in a batch."""
    batch_tokens: Annotated[int, at_least(1)] = 32768
    """Maximum number of tokens in a batch, with padding; a longer request is a batch of its own."""
    batch_wait_s: Annotated[float, at_least(0)] = 0.02
    """Maximum seconds that a batch waits for further requests while not full."""
    cache_entries: Annotated[int, at_least(0)] = 65536
    """Number of verdicts that a rank caches by prompt and response; 0: none."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the judge."""
    resident_ratio: Share = 0.5
    """Maximum share of the judge's layers that stay on the device; fewer stay if memory is short.
    The others stream through two buffers; embedding, final norm and head always stay."""
    device_memory_gb: Annotated[float, at_least(0)] = 0.0
    """Maximum device memory of the judge in GB (10^9 bytes); 0: the free memory."""
    threads: Annotated[int, at_least(1)] = 1
    """Number of CPU threads of the judge."""
    start_timeout_s: Annotated[float, above(0)] = 900.0
    """Maximum seconds for loading the judge."""
    mps: Literal["auto", "on", "off"] = "auto"
    """Use of CUDA MPS, which lets judge and engines compute on one GPU at the same time. `auto`: if
    possible, else report why not. `on`: end the run if not possible. `off`: never."""
    mps_percent: Annotated[int, at_least(0, at_most=100, note="; 0: no limit")] = 0
    """Maximum share in percent of a GPU's multiprocessors for the judge, with MPS; 0: no limit."""
    mps_gb: Annotated[float, at_least(0)] = 0.0
    """Maximum device memory in GB for the judge, enforced by MPS; 0: no limit."""

    def problems(self, key: str) -> list[str]:
        """Return errors for conflicting keys (`RewardConfig.problems`)."""
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
