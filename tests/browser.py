"""A headless Chromium for tests, spoken to over two pipes (DevTools protocol): no port, no driver.

with Browser(tmp_path) as browser:
    browser.open(page)
    assert browser.js("document.title") == "run"
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "no chromium here: bash tools/setup.sh --browser"
FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, in a container; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. TimeoutError where the browser does not answer, RuntimeError for what it refuses
    and for errors of the page's script."""

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 800), timeout_s: float = 60.0):
        assert PROGRAM, MISSING
        self._timeout_s, self._number, self._buffer = timeout_s, 0, b""
        self.requests: list[str] = []
        """Addresses that the page has asked for."""
        self.errors: list[str] = []
        """What the page's script has thrown."""
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [PROGRAM, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
        command.append(f"--window-size={size[0]},{size[1]}")
        pipes = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        with open(folder / "browser.log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", pipes, "browser", *command],
                pass_fds=(to_read, to_write),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_read)
        os.close(to_write)
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, page: Path) -> None:
        """Load a file and wait until it has drawn."""
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState == 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page, a promise's when it is kept."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until the expression is true."""
        end = time.monotonic() + self._timeout_s
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {self._timeout_s:g} s: {condition}")
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        """What is in sight, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._timeout_s
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))

    def _next(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"{method}: no answer within {self._timeout_s:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError(f"{method}: the browser has ended, see browser.log")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
