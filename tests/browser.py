"""A headless Chromium, driven over chromedriver's HTTP interface with the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with chromedriver is installed (Debian: apt-get install chromium chromium-driver)"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1"),
)
START_SECONDS = 60
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element, by the WebDriver standard


class Browser:
    def __init__(self, address: str, session: str) -> None:
        self._address = f"{address}/session/{session}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return _call(method, f"{self._address}{path}", body)

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def all(self, selector: str) -> list[str]:
        found = self.call("POST", "/elements", {"using": "css selector", "value": selector})
        return [each[ELEMENT] for each in found]

    def click(self, element: str) -> None:
        self.call("POST", f"/element/{element}/click", {})

    def point_at(self, element: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {ELEMENT: element}}
        away = {"type": "pointerMove", "duration": 0, "x": 1, "y": 1}
        self.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [away, move]}]})

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        """Of the page, whatever a window may be at least."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        self.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def devtools(self, command: str, parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def console(self) -> list[str]:
        """Errors and warnings that the page has caused since it was last asked."""
        return [f"{each['level']}: {each['message']}" for each in self.call("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses that were asked for since it was last asked."""
        messages = (json.loads(each["message"])["message"] for each in self.call("POST", "/se/log", {"type": "performance"}))
        return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(line.split("port ")[1].split(".")[0].strip() for line in driver.stdout if "successfully on port" in line)
        address = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = _call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        made = Browser(address, session)
        try:
            yield made
        finally:
            made.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(START_SECONDS)
        assert driver.stdout is not None
        driver.stdout.close()


def _call(method: str, url: str, body: Any) -> Any:
    request = urllib.request.Request(url, method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    began = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {url}: {json.load(error)['value']['message']}") from None
        except urllib.error.URLError:
            if time.monotonic() - began > START_SECONDS:
                raise
            time.sleep(0.1)
