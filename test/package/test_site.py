"""The documentation site, as `make docs` builds it: its API reference, its links, and its pages in a browser."""

from __future__ import annotations

import functools
import http.server
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from documents import ROOT

import torchext

SITE = ROOT / "build" / "docs" / "html"
NOT_PUBLIC = {
    *("torchext.advice", "torchext.check_init", "torchext.commands", "torchext.descriptions", "torchext.dynamo"),
    *("torchext.installation", "torchext.internals", "torchext.reports", "torchext.version"),
}
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.ci

needs_site = pytest.mark.skipif(not (SITE / "objects.inv").exists(), reason="the site is not built: run `make docs`")


def public_modules() -> list[str]:
    """Return torchext and its modules with an `__all__`, without those that are internal."""
    names = [f"torchext.{found.name}" for found in pkgutil.iter_modules(torchext.__path__) if found.name[0] != "_"]
    public = [name for name in sorted({*names} - NOT_PUBLIC) if getattr(importlib.import_module(name), "__all__", ())]
    return ["torchext", *public, "torchext.testing.plugin"]


def documented_names() -> set[str]:
    _, _, _, _, rest = (SITE / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" py:")[0] for line in zlib.decompress(rest).decode().splitlines() if " py:" in line}


class TestReference:
    @needs_site
    @pytest.mark.parametrize("name", public_modules())
    def test_has_every_public_name(self, name: str) -> None:
        module = importlib.import_module(name)
        public = {f"{name}.{one}" for one in module.__all__ if not isinstance(getattr(module, one), ModuleType)}
        assert public - documented_names() == set()

    @needs_site
    def test_displays_every_public_header(self) -> None:
        page = (SITE / "reference" / "api" / "cpp.html").read_text()
        headers = [path.name for path in (ROOT / "torchext" / "include" / "torchext").glob("*.h")]
        assert headers
        assert [name for name in headers if f"<h2>{name}" not in page] == []

    @pytest.mark.ci
    @pytest.mark.parametrize(
        "script",
        ["docs/sections.py", "docs/reference/command_line.py", "benchmarks/headline.py", "benchmarks/table.py"],
    )
    def test_generated_pages_are_up_to_date(self, script: str) -> None:
        done = subprocess.run([sys.executable, ROOT / script, "--check"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class Links(HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.add(value)
            elif name in ("id", "name") and value is not None:
                self.anchors.add(value)


@functools.cache
def links_of(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


class TestLinks:
    @needs_site
    def test_lead_to_pages_and_anchors_that_exist(self) -> None:
        broken = []
        pages = sorted(SITE.rglob("*.html"))
        for page in pages:
            for target in links_of(page).targets:
                parts = urlsplit(target)
                if parts.scheme or parts.netloc:
                    continue
                path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
                if not path.is_file() or (
                    path.suffix == ".html" and unquote(parts.fragment) not in links_of(path).anchors
                ):
                    broken.append(f"{page.relative_to(SITE)}: {target}")
        assert len(pages) > 30
        assert broken == []


class TestLlmsTxt:
    @needs_site
    def test_lists_pages_that_exist_with_descriptions(self) -> None:
        text = (SITE / "llms.txt").read_text()
        assert text.startswith("# torchext\n\n> ")
        listed = re.findall(r"^- \[.+\]\((.+)\)(: .+)?$", text, re.M)
        assert {name for name, _ in listed if not (SITE / name).exists()} == set()
        assert len(listed) > 20


class Server(http.server.ThreadingHTTPServer):
    """Serves the site on this machine, and records requests that it cannot answer."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        failed = self.failed

        class Handler(http.server.SimpleHTTPRequestHandler):
            def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
                failed.append(f"{code} {self.path}")
                super().send_error(code, message, explain)

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE)))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Browser:
    """A headless Chromium that displays the site."""

    def __init__(self, driver: Any, server: Server) -> None:
        self.driver = driver
        self.server = server

    def open(self, page: str) -> None:
        self.driver.get(f"{self.server.address}/{page}")

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    @property
    def heading(self) -> str:
        text: str = self.driver.find_element("css selector", "h1").text
        return text.rstrip("#¶").strip()

    def wait_for(self, selector: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60).until(lambda driver: driver.find_elements("css selector", selector))

    @property
    def errors(self) -> list[str]:
        """The errors on the console, and the requests without an answer."""
        return [*(entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE")] + [
            failed for failed in self.server.failed if "favicon" not in failed
        ]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and its driver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.page_load_strategy = "eager"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        driver = webdriver.Chrome(options=options, service=service)
        try:
            opened = Browser(driver, server)
            opened.resize(1400, 1000)
            yield opened
        finally:
            driver.quit()
            server.shutdown()


@needs_site
class TestBrowser:
    def test_navigation_leads_from_the_index_to_a_tutorial_and_the_api(self, browser: Browser) -> None:
        browser.open("index.html")
        assert browser.heading == "torchext"
        browser.click(".sd-card")
        assert browser.heading == "Tutorials"
        browser.click("article a[href='quickstart.html']")
        assert browser.heading == "Quickstart"
        browser.click(".sidebar-tree a[href='../reference/index.html']")
        assert browser.heading == "Reference"
        browser.click("article a[href='api/index.html']")
        browser.click("article a[href='deferred_init.html']")
        assert browser.heading == "torchext.deferred_init"
        browser.click("article a[href='#torchext.deferred_init.materialize_module']")
        assert browser.driver.current_url.endswith("#torchext.deferred_init.materialize_module")
        assert browser.errors == []

    @pytest.mark.parametrize(
        ("words", "page"),
        [
            pytest.param("materialize_module", "reference/api/deferred_init.html", id="name"),
            pytest.param("inference tensor", "how_to/inference_mode.html", id="words"),
        ],
    )
    def test_search_finds_pages(self, browser: Browser, words: str, page: str) -> None:
        browser.open("index.html")
        box = browser.driver.find_element("css selector", ".sidebar-search")
        box.send_keys(words + "\n")
        browser.wait_for(f"#search-results a[href*='{page}']")
        assert browser.errors == []

    def test_no_page_is_wider_than_a_phone(self, browser: Browser) -> None:
        width = 390
        browser.resize(width, 844)
        wide = []
        for page in sorted(SITE.glob("*/*.html")) + sorted(SITE.glob("reference/api/*.html")):
            name = page.relative_to(SITE).as_posix()
            if name.startswith(("_", "repository/")):
                continue
            browser.open(name)
            if browser.driver.execute_script("return document.documentElement.scrollWidth") > width:
                wide.append(name)
        assert wide == []
        assert browser.errors == []
