"""Drives the system's headless Chromium over a pipe, by the DevTools protocol: what the browser test needs of it."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
"""Seconds to wait for an answer."""


def find_browser() -> str | None:
    """Return a Chromium of this machine that runs, if there is one; some packages are only hints to install others."""
    return next((path for name in NAMES if (path := shutil.which(name)) and _runs(path)), None)


def _runs(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=PATIENCE).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Page:
    """A tab. ``events`` holds everything that it reported."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.events: list[dict[str, Any]] = []
        self.waiting, self.number, self.session = b"", 0, None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file anew, at a fragment (``#...``) if one is given, and wait until it has loaded."""
        self._load("about:blank")  # or another fragment of the same file would load nothing
        self._load(path.as_uri() + fragment)

    def _load(self, url: str) -> None:
        before = len(self.events)
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[before:]):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression holds in the page."""
        end = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < end, f"never true in {PATIENCE:.0f} seconds: {script}"
            time.sleep(0.02)

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the screen and the theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a screenshot, of the whole page or of what is on screen."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def seen(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.waiting:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no answer from the browser in {PATIENCE:.0f} seconds"
            piece = os.read(self.answers, 1 << 20)
            assert piece, "the browser ended"
            self.waiting += piece
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """Run a browser with one tab that reports console messages, exceptions, requests and security problems."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', executable, *flags],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        page = Page(commands, answers)
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(commands)
        os.close(answers)
