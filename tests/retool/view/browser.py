"""A headless Chromium for the tests of the page, spoken to in its own protocol over a WebSocket."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_SECONDS = 60


class PageError(AssertionError):
    """The page's script raised, or what was waited for did not come."""


class Browser:
    """One process of Chromium with one tab. What the page logs, raises, asks for and is refused is kept."""

    def __init__(self) -> None:
        from websockets.sync.client import connect

        assert CHROMIUM
        self._folder = tempfile.mkdtemp(prefix="retool-chromium-")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--hide-scrollbars", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={self._folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._number = 0
            self._session: str | None = None
            self.messages: list[str] = []  # errors and warnings of the console, and exceptions
            self.requests: list[str] = []  # addresses that were asked for
            self._open = contextlib.ExitStack()
            connection = connect(self._address(), max_size=None, open_timeout=START_SECONDS, proxy=None)
            self._socket = self._open.enter_context(connection)
            [target] = [t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
            attached = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self._send(f"{domain}.enable")
            self.size(1400, 860)
        except BaseException:
            self._process.kill()
            raise

    def _address(self) -> str:
        file = Path(self._folder, "DevToolsActivePort")
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise PageError(f"Chromium ended with {self._process.returncode} while it started")
            lines = file.read_text().split() if file.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            time.sleep(0.05)
        raise PageError("Chromium did not start")

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def size(self, width: int, height: int) -> None:
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, page: Path, link: str = "") -> float:
        """Open the page and wait until its table and its first sample are painted; gives the seconds it took."""
        self.messages.clear()
        self.requests.clear()
        started = time.monotonic()
        self._send("Page.navigate", url="about:blank")  # else another link to the same page would not load it
        self._send("Page.navigate", url=page.resolve().as_uri() + link)
        self.wait("document.querySelector('.body') && document.querySelectorAll('#rows tr[data-row]').length")
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - started

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; PageError if it raises."""
        result = self._send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.evaluate(f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"):
                return
            time.sleep(0.02)
        raise PageError(f"never true: {condition}")

    def press(self, key: str) -> None:
        """A key of the keyboard: a character, "Enter", "Escape", "Tab", "ArrowDown"."""
        if len(key) == 1:
            self._send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        else:
            codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38}
            text = {"text": "\r"} if key == "Enter" else {}
            self._send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes[key], **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self._send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def texts(self, selector: str) -> list[str]:
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
