"""A browser for tests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

CHROMIUM = Path("/usr/bin/chromium")

AT_3_AND_4 = (
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]\n"
    "for number, end in zip((3, 4), ends):\n"
    "    os.dup2(end, number)\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
"""Chromium talks over the file descriptors 3 and 4, which may be taken in this process."""


class Browser:
    """A headless Chromium that is told what to do over a pipe, in its DevTools protocol."""

    def __init__(self, folder):
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-sync",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        ends = (read_commands, write_answers)
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_3_AND_4, *map(str, ends), str(CHROMIUM), *options],
            pass_fds=ends,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._received = b""
        self._number = 0
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = None

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next_message()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next_message(self, timeout_seconds=60):
        until = time.monotonic() + timeout_seconds
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            self._received += os.read(self._answers, 1 << 20)
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, path, *, width=1280, scheme="light"):
        self.events.clear()
        self.resize(width)
        self.prefer(scheme)
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next_message())

    def resize(self, width, height=900):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def hover(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start, end):
        self.hover(*start)
        for kind, (x, y) in (("Pressed", start), ("Moved", end), ("Released", end)):
            self.call(
                "Input.dispatchMouseEvent",
                type=f"mouse{kind}",
                x=x,
                y=y,
                button="left",
                buttons=0 if kind == "Released" else 1,
                clickCount=0 if kind == "Moved" else 1,
            )

    def complaints(self):
        """Exceptions, and what the browser has logged as errors."""
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event["method"] in bad]

    def requests(self):
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]
