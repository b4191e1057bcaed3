"""The page in a real browser: headless Chromium, driven like a person would, by its keyboard."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-background-timer-throttling", "--window-size=1280,800",
    # Nothing but the server can be reached, whatever asks for it.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip


@dataclass
class Browser:
    """One tab.

    Attributes:
        excused: parts of console messages that a test brings about on purpose.
    """

    driver: Any
    url: str = ""
    excused: list[str] = field(default_factory=list)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def js(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def module(self, code: str, *args: Any) -> Any:
        """What an async function's body returns; it may import the page's modules."""
        wrapped = "const done = arguments[arguments.length - 1]; const args = [...arguments].slice(0, -1);"
        wrapped += f"(async () => {{ {code} }})().then(done, (error) => done({{ failed: String(error) }}));"
        return self.driver.execute_async_script(wrapped, *args)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """As the document holds it, shown or not."""
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def shown(self, selector: str) -> bool:
        return any(element.is_displayed() for element in self.all(selector))

    def focused(self) -> str:
        """The id of what has the focus, or its tag and text."""
        return self.js("const e = document.activeElement; return e.id || `${e.tagName} ${e.textContent}`.trim()")

    def wait(self, condition: Callable[[], Any], what: str = "it", seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"{what} did not come true; the log says {self.text('#log')[-300:]!r}"
            time.sleep(0.03)
        return found

    # ---- acting ----------------------------------------------------------------------------------------------------

    def open(self, server: Any, view: str = "") -> None:
        """A page without a past, with its model chosen."""
        self.url = server.url
        self.driver.get("about:blank")
        self.driver.get(f"{server.url}/{view}")
        self.wait(lambda: self.js("return document.readyState") == "complete")

    def open_ready(self, server: Any, view: str = "") -> None:
        self.open(server, view)
        self.wait(lambda: self.js("return document.getElementById('model').options.length"), "the list of models")

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def set(self, element_id: str, value: str) -> None:
        element = self.one(f"#{element_id}")
        element.clear()
        element.send_keys(value)

    def go(self, view: str) -> None:
        self.js("location.hash = arguments[0]", view)
        self.wait(lambda: self.shown(f"#view-{view}"))

    def size(self, width: int, height: int) -> None:
        wanted = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", wanted)

    def prefers(self, **features: str) -> None:
        """``prefers(color_scheme="dark")``."""
        given = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": given})

    # ---- what must hold after every test ---------------------------------------------------------------------------

    def check(self) -> None:
        """No error in the console, and no request to anybody but the server."""
        errors = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert [text for text in errors if not any(part in text for part in self.excused)] == []
        asked = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = {event["params"]["request"]["url"] for event in asked if event["method"] == "Network.requestWillBeSent"}
        assert urls, "the page asked for nothing: this check is blind"
        # The browser's first page asks for parts of itself; what stands in an address itself is asked of nobody.
        own = (f"{self.url}/", "about:blank", "chrome://", "data:")
        assert {url for url in urls if not url.startswith(own)} == set()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.set_script_timeout(30)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(driver: Any) -> Iterator[Browser]:
    """A tab of its own, at the size of a desktop, light."""
    before = driver.current_window_handle
    driver.switch_to.new_window("tab")
    driver.get_log("browser"), driver.get_log("performance")
    browser = Browser(driver)
    browser.size(1280, 800)
    browser.prefers(color_scheme="light")
    try:
        yield browser
        browser.check()
    finally:
        browser.js("try { localStorage.clear(); sessionStorage.clear(); } catch {}")
        driver.close()
        driver.switch_to.window(before)


class Pace:
    """Holds an engine's steps: each needs a ticket, until it is set free."""

    def __init__(self, server: Any) -> None:
        self._tickets = threading.Semaphore(0)
        self._free = False
        server.on_engine(self._hold)

    def _hold(self, llm: Any) -> None:
        step = llm.engine.step

        def held() -> Any:
            if not self._free:
                self._tickets.acquire(timeout=60)
            return step()

        llm.engine.step = held

    def steps(self, number: int) -> None:
        self._tickets.release(number)

    def free(self) -> None:
        self._free = True
        self._tickets.release(2)


@pytest.fixture
def pace() -> Iterator[Callable[[Any], Pace]]:
    """``pace(server)``: its engine computes as many steps as the test allows, and all once the test is over."""
    made: list[Pace] = []

    def hold(server: Any) -> Pace:
        made.append(Pace(server))
        return made[-1]

    yield hold
    for each in made:
        each.free()


@pytest.fixture(scope="module")
def page_server(tiny: Path, serving_in_module: Callable[..., Any]) -> Iterator[Any]:
    with serving_in_module((tiny, "tiny")) as server:
        yield server
