"""The contract of `env_contract.py`, for every environment that comes with rlcore."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.data import cards_task, lake_task
from rlcore.data.generated import SHARES, split_of
from rlcore.envs.alfworld import Alfworld, AlfworldConfig
from rlcore.envs.frozenlake import FrozenLake
from rlcore.envs.kind import EnvKind
from rlcore.envs.latency import Latency, LatencyConfig
from rlcore.envs.openenv import OpenEnv, OpenEnvConfig, SessionStep
from rlcore.envs.registry import ENVS, resolve
from rlcore.envs.swe import Swe, SweConfig, SweTask
from tests.contracts.env_contract import check_env, prompt_of

DESC = ["SFFH", "FFHG", "FFFF"]


def test_single_turn():
    assert check_env("single_turn", prompt_of(), ["21"]) == [("", 0.0, False), ("", 0.0, True)]


def test_frozenlake_walks_to_the_goal():
    turns = ["I go Down", "down", "move: R", "r", "nowhere", "Right then", "Up"]
    told = check_env("frozenlake", prompt_of(desc=DESC), turns)
    assert [reward for _, reward, _ in told] == [0.0] * 7 + [1.0]
    assert told[0] == ("", 0.0, False)  # the prompt shows it
    assert told[1][0] == "...O\nP.OG\n....\n"
    assert told[5][0] == told[4][0] == "...O\n..OG\n..P.\n"  # no move was named
    assert told[-1] == ("...O\n..OP\n....\n", 1.0, True)


def test_frozenlake_ends_in_a_hole_and_without_a_map_shows_its_own():
    told = check_env("frozenlake", prompt_of(desc=DESC), ["R", "R", "R"])
    assert told[-1][1:] == (0.0, True)
    assert check_env("frozenlake", prompt_of(), ["R", "D"])[0][0] == "P.\n.G\n"
    with pytest.raises(ValueError, match="rows of one length with an S and a G"):
        FrozenLake().reset(options={"desc": ["SF", "F"]})


def test_a_slippery_lake_is_one_world_for_one_seed():
    check_env("frozenlake", prompt_of(desc=DESC), ["D"] * 6, settings={"slippery": True})


def test_latency():
    keys = {"turns": 2, "mean_s": 0.0, "std_s": 0.001, "answer": "ok"}
    told = check_env("latency", prompt_of(), ["1", "2"], settings=keys)
    assert told == [("", 0.0, False), ("ok", 0.0, False), ("ok", 0.0, True)]


def test_latencies_have_the_law_that_was_asked_for():
    """10 000 steps: mean and spread of max(0, N), a tenth ten times as long, 1 % for ever."""
    config = LatencyConfig(mean_s=5.0, std_s=1.0, fail_slow=0.1, fail_stop=0.01)
    env = Latency(config)
    env.reset(seed=1, options={"episode": "t0.0"})
    times = [env.next_s() for _ in range(10_000)]
    for_ever = [t for t in times if t > 1e6]
    slow = [t for t in times if 15 < t < 1e6]
    usual = [t for t in times if t <= 15]
    assert len(for_ever) == pytest.approx(100, abs=40)
    assert len(slow) == pytest.approx(990, abs=130)
    assert sum(usual) / len(usual) == pytest.approx(5.0, abs=0.06)
    assert sum(slow) / len(slow) == pytest.approx(50.0, abs=2)


@pytest.mark.parametrize("index", range(4))
def test_blackjack_is_dealt_as_the_prompt_says(index):
    row = cards_task.make("train", 0, index)
    encode = lambda text: [cards_task.CHARS.index(c) + 2 for c in text]  # noqa: E731
    told = check_env("blackjack", cards_task.to_prompt(row, index, encode), ["?", *row_turns(row)])
    assert told[1] == (row.prompt, 0.0, False)  # that was no action
    shown = "".join(
        f"{turn}{seen}" for turn, (seen, _, _) in zip(row_turns(row), told[2:], strict=True)
    )
    assert shown.startswith(row.demonstration) and told[-1][2]
    assert told[-1][1] in (-1.0, 0.0, 1.0, 1.5)


def row_turns(row):
    """The turns of a demonstration: a letter each, behind a hand or at the start."""
    return re.findall(r"(?:^|\n)([hs])", row.demonstration)


def test_blackjack_keeps_its_splits_and_its_characters():
    for split in SHARES:
        for index in range(30):
            row = cards_task.make(split, 1, index)
            assert split_of(row.prompt) == split and row == cards_task.make(split, 1, index)
            assert set(row.prompt + row.demonstration) <= set(cards_task.CHARS)


def test_tools_answer_calls_and_end_with_the_first_turn_without_one():
    turns = [
        "let me see <calc>0.12 * 1347</calc>",
        "<calc>2^10 + sqrt(16)</calc>",
        "<calc>__import__('os')</calc>",
        "<calc>9**9**9</calc> <calc>1/0",
        "<python>print(sum(range(10)))</python>",
        "<python>while True: pass</python>",
        "<python>raise KeyError('x')</python>",
        "so 161.64",
    ]
    # each program is a sandbox's work of milliseconds but the one that loops
    told = check_env("tools", prompt_of("?"), turns, settings={"program_timeout_s": 1.0})
    assert [seen for seen, _, _ in told[1:]] == [
        "<result>161.64</result>\n",
        "<result>1028</result>\n",
        "<result>error: \"__import__('os')\" is not arithmetic</result>\n",
        "<result>error: float division by zero</result>\n",
        "<result>45</result>\n",
        "<result>error: timeout</result>\n",
        "<result>error: KeyError: 'x'</result>\n",
        "",
    ]
    assert told[-1][1:] == (0.0, True)


def test_a_tool_that_is_not_there_and_a_long_result_are_said():
    keys = {"tools": ("calc",), "max_result_chars": 40}
    turns = ["<python>print(1)</python>", "<calc>" + "(" * 90 + "1" + ")" * 90 + "</calc>"]
    told = check_env("tools", prompt_of(), turns, settings=keys)
    assert told[1][0] == "<result>error: there is n ...  use one of: calc</result>\n"
    assert told[2][0] == "<result>1</result>\n"


class House:
    """A game of two rooms."""

    def __init__(self, path: str) -> None:
        assert path == "house.tw-pddl"
        self.room = "hall"

    def reset(self) -> tuple[str, list[str]]:
        return "You are in the hall.", ["go to kitchen", "look"]

    def step(self, command: str) -> tuple[str, bool, bool, list[str]]:
        if command == "go to kitchen":
            self.room = "kitchen"
            return "You are in the kitchen.", True, True, []
        return "Nothing happens.", False, False, ["go to kitchen", "look"]

    def close(self) -> None: ...


def test_alfworld_with_a_stub_of_its_games():
    kind = EnvKind(AlfworldConfig, lambda config: Alfworld(config, House))
    turns = ["I think. Action: dance", "Let me go.\nGo to kitchen."]
    prompt = prompt_of("Cook.", game="house.tw-pddl")
    assert check_env("alfworld", prompt, turns, kind=kind) == [
        ("You are in the hall.\nCommands: go to kitchen, look\n", 0.0, False),
        ("Nothing happens.\nCommands: go to kitchen, look\n", 0.0, False),
        ("You are in the kitchen.\nCommands: \n", 1.0, True),
    ]
    with pytest.raises(ValueError, match="the row has no field game"):
        kind.make(AlfworldConfig()).reset(options={})


class Shell:
    """A workspace of one file."""

    def __init__(self, task: SweTask) -> None:
        assert task == SweTask("image:1", "", "grep -q fixed file", "")
        self.text = "broken"

    def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        if command.startswith("echo "):
            self.text = command[5:].strip()
        if command.startswith("sleep"):
            return 124, ""
        if command.startswith("grep"):
            return int("fixed" not in self.text), ""
        return 0, "x" * 300 if command.startswith("cat") else ""

    def close(self) -> None: ...


def test_swe_with_a_stub_of_its_workspace():
    kind = EnvKind(SweConfig, lambda config: Swe(config, Shell))
    turns = [
        "hm",
        "```bash\ncat file\n```",
        "```sh\nsleep 999\n```",
        "```bash\necho fixed\n```",
        "Done.\nsubmit",
    ]
    prompt = prompt_of("Fix it.", image="image:1", tests="grep -q fixed file")
    told = check_env("swe", prompt, turns, settings={"max_output_chars": 100}, kind=kind)
    assert told[1][0].startswith("Give a command")
    assert told[2][0] == f"{'x' * 50}\n... 200 characters ...\n{'x' * 50}\n[exit 0]\n"
    assert told[3][0] == "\n[killed after 120 s]\n"
    assert told[-1] == ("", 1.0, True)
    assert check_env("swe", prompt, ["submit"], kind=kind)[-1] == ("", 0.0, True)
    with pytest.raises(ValueError, match="no field tests"):
        kind.make(SweConfig()).reset(options={"image": "image:1"})


class Countdown:
    """A session of a server: say a smaller number each time, down to 0."""

    def __init__(self) -> None:
        self.left = 0

    def reset(self, arguments: Mapping[str, Any]) -> SessionStep:
        assert arguments["seed"] == 3 and arguments["episode_id"] == "t0.0"
        self.left = arguments.get("start", 2)
        return SessionStep({"text": f"from {self.left}", "left": self.left}, None, False)

    def step(self, action: Mapping[str, Any]) -> SessionStep:
        if str(action.get("message")) == str(self.left - 1):
            self.left -= 1
            return SessionStep({"text": "yes", "left": self.left}, 0.5, self.left == 0)
        return SessionStep({"text": "no", "left": self.left}, -0.25, False)

    def close(self) -> None: ...


def test_openenv_with_a_stub_of_its_server():
    kind = EnvKind(OpenEnvConfig, lambda config: OpenEnv(config, Countdown))
    keys = {"url": "http://localhost:8000", "observation": "text"}
    prompt = prompt_of("Count.", reset={"start": 2})
    told = check_env("openenv", prompt, ["1", "7", "0"], settings=keys, kind=kind)
    assert told == [("from 2", 0.0, False), ("yes", 0.5, False), ("no", -0.25, False),
                    ("yes", 0.5, True)]  # fmt: skip

    keys |= {"observation": "", "action": ""}
    turns = ['{"message": 1}', "1", "[1]", "[" * 100_000, '{"message": 0}']
    told = check_env("openenv", prompt, turns, settings=keys, kind=kind)
    assert told[1] == ('{"text": "yes", "left": 1}', 0.5, False)
    assert all(seen.startswith("error: the action is not") for seen, _, _ in told[2:5])
    assert told[-1][1:] == (0.5, True)


def test_openenv_names_what_is_wrong():
    kind = EnvKind(OpenEnvConfig, lambda config: OpenEnv(config, Countdown))
    world = kind.make(OpenEnvConfig(url="http://a", observation="txt"))
    with pytest.raises(
        ValueError, match="--env.observation txt: the server's fields are left, text"
    ):
        world.reset(seed=3, options={"episode": "t0.0"})
    with pytest.raises(ValueError, match="field reset of the row: 4 is not an object"):
        world.reset(seed=3, options={"episode": "t0.0", "reset": 4})
    assert "is not the address of a server" in OpenEnvConfig(url="localhost:8000").problems()[0]
    assert not OpenEnvConfig(url="wss://a.b/c").problems()


PROJECT = Path(__file__).resolve().parents[1] / "projects/durations"
IN_SANDBOX = {"workspace": "sandbox", "max_output_chars": 400}


def test_swe_copies_a_repository_into_the_sandbox():
    turns = [
        "```bash\ngrep -c . durations.py; cat /etc/passwd /proc/cpuinfo\n```",
        "```sh\nsed -i 's|= seconds // 60|= seconds % 3600 // 60|' durations.py\n```",
        "```bash\npython3 -m unittest -q checks 2>&1 | tail -n 1; exit 7\n```",
        "submit",
    ]
    tests = "python3 -m unittest -q checks"
    before = {path.name: path.read_bytes() for path in PROJECT.glob("*.py")}
    prompt = prompt_of("Fix it.", repo=str(PROJECT), tests=tests)
    told = check_env("swe", prompt, turns, settings=IN_SANDBOX)
    assert told[1][0].startswith("17\n") and told[1][0].endswith("[exit 1]\n")
    assert told[2][0] == "\n[exit 0]\n" and told[3][0] == "OK\n[exit 7]\n"
    assert told[4] == ("", 1.0, True)
    assert before == {path.name: path.read_bytes() for path in PROJECT.glob("*.py")}
    assert _submitted(repo=str(PROJECT), tests=tests) == 0.0
    assert _submitted(repo=str(PROJECT), tests="test -f checks.py", workdir="") == 1.0


def _submitted(**row: str) -> float:
    env = resolve("swe").make(SweConfig(**IN_SANDBOX))
    env.reset(options=row)
    _, score, is_over, _, info = env.step("submit")
    env.close()
    assert is_over and info == {"success": score}
    return score


@pytest.mark.parametrize(
    ("workspace", "row", "match"),
    [
        ("sandbox", {"image": "i", "tests": "t"}, "no field repo, which .* needs with the sandbox"),
        ("auto", {"image": "i", "tests": "t"}, "no field repo"),
        ("sandbox", {"repo": "/nowhere", "tests": "t"}, "/nowhere: no such folder or tar archive"),
        ("sandbox", {"repo": str(PROJECT), "tests": "t", "workdir": "src"}, "No such file .*src"),
        ("sandbox", {"repo": str(PROJECT)}, "no field tests"),
    ],
)
def test_swe_says_what_a_row_lacks(workspace, row, match, monkeypatch):
    monkeypatch.setattr("rlcore.envs.swe.has_docker", lambda: False)
    with pytest.raises(ValueError, match=match):
        resolve("swe").make(SweConfig(workspace=workspace)).reset(options=row)


@pytest.mark.parametrize("row", [{"image": "i", "repo": "r"}, {"image": "i"}, {"repo": "r"}])
@pytest.mark.parametrize("workspace", ["auto", "docker"])
def test_swe_takes_docker_where_it_is_there_for_rows_with_an_image(workspace, row, monkeypatch):
    opened = []
    monkeypatch.setattr("rlcore.envs.swe.has_docker", lambda: True)
    monkeypatch.setattr("rlcore.envs.swe.Container", lambda task, args: opened.append(task.image))
    env = resolve("swe").make(SweConfig(workspace=workspace))
    if "image" in row:
        env.reset(options=row | {"tests": "t"})
        assert opened == ["i"]
    else:
        wrong = "r: no such folder" if workspace == "auto" else "no field image.* with docker"
        with pytest.raises(ValueError, match=wrong):
            env.reset(options=row | {"tests": "t"})


@pytest.mark.parametrize(
    ("name", "keys"), [("alfworld", {}), ("openenv", {}), ("swe", {"workspace": "docker"})]
)
def test_what_is_optional_says_what_it_lacks(name, keys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises((ModuleNotFoundError, RuntimeError), match="install"):
        resolve(name).make(resolve(name).config(**keys))


def test_every_environment_has_its_test_here():
    tested = {"single_turn", "frozenlake", "blackjack", "latency", "tools", "alfworld", "swe"}
    tested.add("openenv")
    tested.add("endpoint")  # tests/unit/test_train_endpoint.py
    assert ENVS.keys() == tested


def test_the_prompt_of_a_lake_has_its_map():
    row = lake_task.make("train", 0, 5)
    told = check_env("frozenlake", _to_prompt(row), list(row.answer))
    assert told[-1][1:] == (1.0, True)


def _to_prompt(row):
    return lake_task.to_prompt(row, 5, lambda text: [lake_task.CHARS.index(c) + 2 for c in text])
