"""A headless Chromium, driven over its DevTools protocol."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One tab. ``complaints``: what was written to the console, or failed."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._count = 0
        self.complaints: list[str] = []
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        self._connection.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(60))
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"])[:500])

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, width: int = 1400, height: int = 950, scheme: str = "light") -> None:
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.body.childElementCount > 1")

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def wait(self, condition: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; skips the test if there is none."""
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        pytest.skip(f"no browser: one of {', '.join(NAMES)} would open the page")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--hide-scrollbars")
    process = subprocess.Popen(
        [program, *options, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.DEVNULL
    )
    try:
        port_file = profile / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        tabs = httpx.get(f"http://127.0.0.1:{port}/json").json()
        url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(url, max_size=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait(30)
