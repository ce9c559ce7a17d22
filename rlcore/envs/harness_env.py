"""`--env endpoint`: episodes that a harness plays through the endpoint of its rank.

    harness (a process) <-- HTTP --> endpoint (a thread) --- turns ---> EpisodeEngine

Every request becomes a turn of the policy, in the context that `Branches` keeps token by token. At
the end of the harness its rows become one `Sample`: they share the score and the advantage.
"""

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import structs

from rlcore.config.schema import EnvConfig
from rlcore.envs.branches import Answer, Branches
from rlcore.envs.chat_api import ApiError, ChatAnswer, ChatCall, TokenLogProb, TurnRequest
from rlcore.envs.endpoint import Endpoint, EndpointLimits, EndpointServer
from rlcore.envs.episode import PlayedEpisode, Policy, Transcript
from rlcore.envs.harness import Harness, HarnessLog, HarnessRun
from rlcore.envs.kind import EnvKind, TextEnv
from rlcore.envs.pool import EnvError
from rlcore.hf.tokenizer import Tokenizer
from rlcore.hf.tool_calls import family_of
from rlcore.records import (
    CUT,
    Branch,
    Finish,
    Prompt,
    Request,
    RequestId,
    Sample,
    Sampling,
    turn_of,
)
from rlcore.utils.bounds import above, at_least
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(EnvConfig):
    """Keys of `--env endpoint`. `max_turns` is the number of requests of an episode."""

    max_turns: int = 256
    max_running_episodes: int = 64
    command: str = ""
    """Command of the harness, for a shell; `{task}` is the path of the task's JSON file."""
    function: str = ""
    """Dotted path of a Python function, instead of a command. It takes the task as a dict and may
    return the score."""
    image: str = ""
    """Image of a container that runs the command; needs docker."""
    score: Literal["harness", "reward"] = "harness"
    """Source of the score. `harness`: the harness gives it. `reward`: that score, if any, plus that
    of `--reward` for the text of the last turn."""
    reuse: Literal["keep", "template"] = "keep"
    """What continues a row: `keep`: equal messages, even without their reasoning; `template`: a
    conversation that the chat template renders as it was sampled."""
    max_branches: Annotated[int, above(0)] = 64
    """Maximum number of rows of an episode."""
    max_parallel_requests: Annotated[int, above(0)] = 16
    """Maximum number of requests of an episode at a time."""
    allow_sampling: bool = False
    """Whether temperature and top_p of requests replace those of the run."""
    episode_timeout_s: Annotated[float, above(0)] = 800.0
    """Seconds after which a harness is ended. The default lets an episode and its restart work
    without requests within rollout.stall_timeout_s; for a longer one raise both."""
    turn_timeout_s: Annotated[float, above(0)] = 600.0
    """Seconds after which a request is answered with an error."""
    grace_s: Annotated[float, at_least(0)] = 5.0
    """Seconds between SIGTERM and SIGKILL for a harness."""
    host: str = "127.0.0.1"
    """Address at which the endpoint of a rank listens. Beyond loopback it is open to the network,
    guarded by the keys of the episodes alone."""
    public_host: str = ""
    """Name or address of a rank's machine in the URLs that harnesses get. Empty: that of env.host;
    the host name if env.host is 0.0.0.0 or `::`."""

    def longest_silence(self) -> tuple[float, str]:
        """Return the longest time of all attempts of an episode (`EnvConfig.longest_silence`)."""
        silence_s = (1 + self.retries) * (self.episode_timeout_s + self.grace_s)
        return silence_s, (
            f"--env.episode_timeout_s {self.episode_timeout_s:g}: the {silence_s:g} s that an "
            f"episode may take without a request, with env.retries {self.retries} and env.grace_s "
            f"{self.grace_s:g},"
        )

    def problems(self) -> list[str]:
        """Return errors for conflicting keys (`EnvConfig.problems`)."""
        out = []
        if bool(self.command) == bool(self.function):
            out.append(
                "--env.command, --env.function: give one of them, the harness of the episodes"
            )
        if self.image and not self.command:
            out.append(f"--env.image {self.image}: a container runs --env.command; give that")
        return out


class HarnessHost:
    """Endpoint and harnesses of a rank. `play` is called in the loop of the episodes; requests are
    answered in the endpoint's own thread."""

    def __init__(
        self,
        config: EndpointConfig,
        tokenizer: Tokenizer,
        *,
        num_tokens: int,
        max_tokens: int,
        log_file: Path | None = None,
    ) -> None:
        """Start the endpoint. `num_tokens`: size of the vocabulary. `max_tokens`: tokens of a row,
        prompt included."""
        self._config, self._tokenizer = config, tokenizer
        self._num_tokens, self._max_tokens = num_tokens, max_tokens
        self._family = _family(tokenizer)
        self._harness = Harness(
            command=config.command,
            function=config.function,
            image=config.image,
            timeout_s=config.episode_timeout_s,
            grace_s=config.grace_s,
        )
        self._log = HarnessLog(log_file)
        self._endpoint = Endpoint(
            EndpointLimits(
                max_parallel_requests=config.max_parallel_requests,
                turn_timeout_s=config.turn_timeout_s,
                allow_sampling=config.allow_sampling,
            )
        )
        self._server = EndpointServer(self._endpoint, config.host, public_host=config.public_host)
        self._threads = ThreadPoolExecutor(config.max_running_episodes, "harness")
        self._running: set[HarnessRun] = set()

    async def play(
        self, so_far: Transcript, policy: Policy, sampling: Sampling, prompt: Prompt, name: str
    ) -> PlayedEpisode:
        """Play an episode to the end of its harness. `policy` samples a turn in this loop; turn ids
        are derived from `name`. Score, text and statistics go to `so_far`. Raises EnvError."""
        served = self.open(so_far, policy, sampling, name)
        task = {**prompt.fields, "prompt": prompt.text, "answer": prompt.answer, "episode": name}
        run = HarnessRun(
            self._harness,
            name,
            task,
            root_url=self.root_url,
            key=served.key,
            sink=self._log.sink(name),
            posted=lambda: self._endpoint.score(name),
        )
        self._running.add(run)
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, run.run)
        except asyncio.CancelledError:
            run.cancel()
            raise
        finally:
            self._running.discard(run)
            self._endpoint.close(name)
        if result.error:
            raise EnvError("error", result.error)
        if result.score is None and self._config.score == "harness":
            raise EnvError("error", "the harness gave no score")
        so_far.rewarded(result.score or 0.0, result.numbers)
        with served.lock:
            counts, sample = served.branches.counts, sample_of(served.branches, so_far.id)
        numbers = {
            "env/branches": float(counts.branches),
            "env/reused_tokens": float(counts.reused_tokens),
            "env/new_tokens": float(counts.new_tokens),
        }
        return PlayedEpisode(sample, numbers)

    @property
    def root_url(self) -> str:
        """Address of the endpoint, without a path."""
        return self._server.root_url

    def open(
        self, so_far: Transcript, policy: Policy, sampling: Sampling, name: RequestId
    ) -> "EpisodeRequests":
        """Let the endpoint serve an episode whose turns are sampled in the caller's loop."""
        branches = Branches(
            self._tokenizer,
            family=self._family,
            num_tokens=self._num_tokens,
            max_tokens=self._max_tokens,
            max_branches=self._config.max_branches,
            reuse=self._config.reuse,
        )
        return EpisodeRequests(self, self._endpoint, branches, so_far, policy, sampling, name)

    def close(self) -> None:
        """End the endpoint and all harnesses."""
        for run in list(self._running):
            run.cancel()
        self._endpoint.close_all()
        self._server.close()
        self._threads.shutdown(wait=True)

    def limited(self, asked: TurnRequest, sampling: Sampling, room: int) -> Sampling:
        """Return the sampling of a turn that has room for so many tokens."""
        wanted = asked.sampling
        limits = (room, wanted.max_tokens, self._config.max_turn_tokens)
        found = structs.replace(sampling, max_tokens=min(n for n in limits if n))
        if wanted.temperature is not None:
            found = structs.replace(found, temperature=wanted.temperature)
        if wanted.top_p is not None:
            found = structs.replace(found, top_p=wanted.top_p)
        return found

    @property
    def max_turns(self) -> int:
        return self._config.max_turns

    def logprobs(self, sample: Sample, count: int) -> tuple[TokenLogProb, ...]:
        """Return the first tokens of a sample with their log-probs, for the harness."""
        pieces = self._tokenizer.pieces(sample.tokens[:count].tolist())
        return tuple(map(TokenLogProb, pieces, sample.logps[:count].tolist()))

    def text(self, sample: Sample, count: int) -> str:
        """Return the text of the first tokens of a sample, without special tokens."""
        return self._tokenizer.decode(sample.tokens[:count].tolist())


class EpisodeRequests:
    """Requests of one episode, answered in the endpoint's thread."""

    def __init__(
        self,
        host: HarnessHost,
        endpoint: Endpoint,
        branches: Branches,
        so_far: Transcript,
        policy: Policy,
        sampling: Sampling,
        name: RequestId,
    ) -> None:
        self._host, self.branches, self._so_far = host, branches, so_far
        self._policy, self._sampling, self._name = policy, sampling, name
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self.lock = threading.Lock()
        """Held while the branches are used: a turn may be cancelled while its harness has ended."""
        self.key = endpoint.open(name, self.complete)

    async def complete(self, asked: TurnRequest) -> ChatAnswer:
        """Sample the turn of a request. Raises ApiError."""
        number = next(self._numbers)
        if number >= self._host.max_turns:
            raise ApiError(
                400, f"the episode has had {number} requests, the most that --env.max_turns allows"
            )
        with self.lock:
            turn = self.branches.begin(
                asked.messages if asked.prompt is None else asked.prompt, asked.tools or None
            )
        request = Request(
            id=turn_of(self._name, number),
            prompt=turn.context,
            sampling=self._host.limited(asked, self._sampling, self.branches.room(turn)),
        )
        try:
            sampled = asyncio.run_coroutine_threadsafe(self._sample(request), self._loop)
            sample = await asyncio.wrap_future(sampled)
        except BaseException:
            with self.lock:
                self.branches.cancel(turn)
            raise
        with self.lock:
            answer = self.branches.end(turn, sample, asked.sampling.stop_texts)
        self._so_far.took_turn(self._host.text(sample, answer.num_tokens), turn.finish)
        count = answer.num_tokens if asked.sampling.logprobs else 0
        shown = _shown(answer, len(turn.context), self._host.logprobs(sample, count))
        ids = tuple(turn.tokens.tolist()) if asked.sampling.token_ids else ()
        return structs.replace(shown, token_ids=ids)

    async def _sample(self, request: Request) -> Sample:
        return await self._policy(request)


def _family(tokenizer: Tokenizer) -> str:
    """Return the format of calls; "" if the template has none, so that requests have no tools."""
    try:
        return family_of(tokenizer.chat_template)
    except ConfigError as error:
        announce("tool calls", f"refused in requests: {error}")
        return ""


def _shown(answer: Answer, context: int, logprobs: tuple[TokenLogProb, ...]) -> ChatAnswer:
    message: dict[str, Any] = dict(answer.message)
    calls = tuple(
        ChatCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return ChatAnswer(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content"),
        calls=calls,
        finish=answer.finish_reason,
        prompt_tokens=context,
        completion_tokens=answer.num_tokens,
        logprobs=logprobs,
    )


def sample_of(branches: Branches, id: RequestId) -> Sample:
    """Return the rows of an episode as one sample. Raises EnvError if there are none."""
    rows = branches.rows()
    if not rows:
        raise EnvError("error", "the harness has ended without a turn of the policy")
    finish: Finish = next((row.finish for row in rows if row.finish in CUT), rows[0].finish)
    first, *further = rows
    return Sample(
        id=id,
        prompt=first.prompt,
        tokens=first.tokens,
        logps=first.logps,
        versions=first.versions,
        routes=first.routes,
        finish=finish,
        branches=tuple(
            Branch(
                prompt=r.prompt,
                tokens=r.tokens,
                logps=r.logps,
                versions=r.versions,
                routes=r.routes,
            )
            for r in further
        ),
    )


def _no_environment(config: EndpointConfig) -> TextEnv:
    raise ConfigError("--env endpoint: harnesses play its episodes; it has no environment process")


KIND = EnvKind(
    EndpointConfig, _no_environment, scored_by=lambda config: config.score, host=HarnessHost
)
