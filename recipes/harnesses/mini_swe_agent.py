"""Harness for `--env endpoint`: mini-swe-agent on a copy of a repository, scored by its tests.

    bash tools/setup.sh --mini-swe-agent     # an environment of its own, .venvs/mini-swe-agent
    bash recipes/RECIPE.sh --env endpoint --data.template chat --data.answer_field "" \
      --env.command "python $PWD/recipes/harnesses/mini_swe_agent.py -c agent.step_limit=50"

A row has the fields `repo`, a folder, and `tests`, a command that exits with 0 if the task is done;
the prompt is the issue. The score is 1 if the tests pass after the agent's end, else 0. Further
words of the command are mini-swe-agent's.

Commands of the agent and the tests run in bubblewrap: without network, without the variables of the
episode, and with no files but the system's and the copy. Memory is not limited.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

MINI = Path(__file__).resolve().parents[2] / ".venvs/mini-swe-agent/bin/mini"
SETTINGS = {
    "MSWEA_CONFIGURED": "true",  # else mini-swe-agent asks for a model and a key
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",  # an episode without turns left must end
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download
}
TESTS_S = 600
TMP = "/tmp"  # noqa: S108, a folder of the isolation alone


def main() -> None:
    """Play the episode in the working directory, which is empty at first, and write the score."""
    task = json.loads(Path(os.environ["RLCORE_TASK"]).read_text())
    for needed, remedy in ((MINI, "bash tools/setup.sh --mini-swe-agent"), ("bwrap", "bubblewrap")):
        if shutil.which(needed) is None:
            sys.exit(f"{needed} is missing; install it: {remedy}")
    if not _passes("true"):
        sys.exit("bubblewrap does not start here; allow user namespaces (rlcore/sandbox/README.md)")
    for field in ("repo", "tests"):
        if not task.get(field):
            sys.exit(f"the row has no field {field}; mini-swe-agent needs repo and tests")
    shutil.copytree(task["repo"], ".", symlinks=True, dirs_exist_ok=True)
    _run_agent(task["prompt"], sys.argv[1:])
    Path(os.environ["RLCORE_SCORE"]).write_text(str(int(_passes(task["tests"]))))


def _run_agent(issue: str, more: list[str]) -> None:
    """Let the agent work on an issue. However it ends, the tests decide."""
    settings = {
        "environment.environment_class": "bubblewrap",
        "environment.wrapper_args": _isolation(),
        "environment.cwd": os.getcwd(),
    }
    words = [str(MINI), "-m", "openai/policy", f"--task={issue}", "-y", "--exit-immediately"]
    words += ["-l", "0", "-o", f"{os.environ['TMPDIR']}/trajectory.json", "-c", "mini.yaml"]
    for key, value in settings.items():
        words += ["-c", f"{key}={json.dumps(value)}"]
    private = {"RLCORE_SCORE", "RLCORE_SCORE_URL", "RLCORE_TASK"}
    env = {name: value for name, value in os.environ.items() if name not in private}
    env |= {"MSWEA_GLOBAL_CONFIG_DIR": env["TMPDIR"], **SETTINGS}
    subprocess.run([*words, *more], env=env, stdin=subprocess.DEVNULL, check=False)


def _passes(tests: str) -> bool:
    """Return whether the tests pass."""
    box = ["bwrap", *_isolation(), "--bind", os.getcwd(), os.getcwd(), "--chdir", os.getcwd()]
    try:
        return not subprocess.run([*box, "bash", "-c", tests], timeout=TESTS_S).returncode
    except subprocess.TimeoutExpired:
        return False


def _isolation() -> list[str]:
    """Return the arguments of bubblewrap: the system's files, this Python, and nothing else."""
    words = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for path in ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"):
        words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", TMP]
    words += ["--ro-bind-try", sys.base_prefix, sys.base_prefix]
    words += ["--setenv", "PATH", f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"]
    return [*words, "--setenv", "HOME", TMP, "--setenv", "LANG", "C.UTF-8"]


if __name__ == "__main__":
    main()
