"""A window of Chromium for tests; only `make test-web` has the packages that this needs."""

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SIZES = {"desktop": (1100, 1400), "phone": (390, 900)}


class Browser:
    """A window of Chromium on a page; a page's own class says when it is ready."""

    def __init__(self, chromium: str, address: str, size: str, dark: bool) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which(chromium) or chromium
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
        self.driver = webdriver.Chrome(options=options, service=service)
        self.width, height = SIZES[size]
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(height)
        self.driver.get(address)
        self.wait(self.is_ready)

    def is_ready(self) -> bool:
        raise NotImplementedError

    def cdp(self, command: str, **values: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, values)

    def resize(self, height: int) -> None:
        metrics = {"width": self.width, "height": height, "deviceScaleFactor": 1, "mobile": self.width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, done: Callable[[], Any], seconds: float = 60) -> Any:
        return WebDriverWait(self.driver, seconds, 0.1).until(lambda _: done())

    def js(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def point_at(self, element: Any) -> None:
        ActionChains(self.driver).move_to_element(element).perform()

    def shoot(self, path: Path) -> Image.Image:
        self.resize(max(600, self.js("return document.documentElement.scrollHeight")))
        time.sleep(1)
        path.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot", format="png")["data"]))
        return Image.open(path)

    def requests(self) -> list[str]:
        """Addresses of everything that the page asked for, data and blobs left out."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        asked = [one["request"]["url"] for one in sent]
        return [url for url in asked if urlsplit(url).scheme not in ("data", "blob")]

    def faults(self) -> list[str]:
        """What the console calls severe."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def windows(kind: type[Browser], request: pytest.FixtureRequest, address: str) -> Iterator[Callable[..., Any]]:
    """Gives a function that opens windows, which are closed in the end."""
    opened: list[Browser] = []

    def browse(size: str = "desktop", dark: bool = False) -> Browser:
        opened.append(kind(request.config.getoption("--chromium"), address, size, dark))
        return opened[-1]

    try:
        yield browse
    finally:
        for browser in opened:
            browser.driver.quit()
