"""Headless Chromium, with a profile of its own that is gone afterwards."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser whose `profile` is an empty folder."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and driver):
        raise FileNotFoundError("the tests need Debian's packages chromium and chromium-driver")
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, Service(driver))
    try:
        yield started
    finally:
        started.quit()


def complaints(browser: webdriver.Chrome) -> list[dict[str, Any]]:
    """What the page's scripts and styles gave the console to say since the last call; no failed fetches."""
    return [entry for entry in browser.get_log("browser") if entry["source"] != "network"]  # type: ignore[no-untyped-call]
