"""A report in a real browser: on a phone and a desktop, light, dark and printed."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from fedmerge.report import render
from fedmerge.values import Array
from tests.reports import HOSTILE, REPORT

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="there is no chromium with chromedriver to look at the page with",
    ),
]

WIDTHS = (400, 1280)  # a phone, a desktop
HEIGHT = 900
DARK, LIGHT = "dark", "light"
SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    "--hide-scrollbars",  # they would take from the width
)
PAGE_WIDTH = "return document.documentElement.scrollWidth"


class Browser:
    """A page in a headless chromium that has no network."""

    def __init__(self, driver: webdriver.Chrome, page: Path) -> None:
        self.driver, self.page = driver, page

    def open(self, width: int = 1280, scheme: str = LIGHT, media: str = "screen") -> None:
        """Show the page anew at a width, in a colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", media=media, features=features)
        screen = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **screen)
        self.driver.get(self.page.as_uri())

    def command(self, name: str, **values: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, values)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def screenshot(self) -> Array:
        """Return the pixels (height, width, 3) of what is seen."""
        data = self.command("Page.captureScreenshot", format="png")["data"]
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            return np.asarray(picture.convert("RGB"))

    @property
    def complaints(self) -> list[str]:
        """What the console was told since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


def colours(pixels: Array) -> int:
    """Return how many colours a picture (height, width, 3) has."""
    return len(np.unique(pixels.astype(np.int64) @ (1 << 16, 1 << 8, 1)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    page = tmp_path_factory.mktemp("report") / "report.html"
    page.write_text(render(REPORT), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield Browser(driver, page)
    finally:
        driver.quit()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_the_page_fits_and_complains_of_nothing(browser: Browser, width: int, scheme: str) -> None:
    browser.open(width, scheme)
    assert browser.complaints == []
    assert browser.run(PAGE_WIDTH) == width
    wide = """return [...document.querySelectorAll("body *")].filter(e =>
        !e.closest(".scroll, svg") && e.getBoundingClientRect().right > innerWidth + 0.5)
        .map(e => e.outerHTML.slice(0, 80))"""
    assert browser.run(wide) == []


def test_what_does_not_fit_would_be_noticed(browser: Browser) -> None:
    browser.open(400)
    browser.run("document.querySelector('#verdict').style.minWidth = '500px'")
    assert browser.run(PAGE_WIDTH) > 500


@pytest.mark.parametrize("width", WIDTHS)
def test_every_picture_has_a_place_and_text_that_can_be_read(browser: Browser, width: int) -> None:
    browser.open(width)
    browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
    boxes = browser.run(
        """return [...document.querySelectorAll("svg, img")].map(e => {
        const b = e.getBoundingClientRect(); return [e.tagName, b.width, b.height]})"""
    )
    assert len(boxes) > 12
    for name, wide, high in boxes:
        assert wide >= (200 if name == "svg" else 50), (name, wide, high)
        assert high >= 50
    heights = browser.run(
        """return [...document.querySelectorAll("svg text")].filter(e => e.textContent.trim())
        .map(e => Math.min(e.getBoundingClientRect().height, e.getBoundingClientRect().width + 9))
        """
    )
    assert len(heights) > 60
    assert min(heights) > 9  # pixels


def test_a_screenshot_shows_ink_on_paper_in_both_schemes(browser: Browser) -> None:
    shots = {}
    for scheme in (LIGHT, DARK):
        browser.open(1280, scheme)
        shots[scheme] = browser.screenshot()
        assert shots[scheme].shape == (HEIGHT, 1280, 3)
        assert colours(shots[scheme]) > 100  # a blank page has one
    paper = {scheme: shot[-1, 0].tolist() for scheme, shot in shots.items()}
    assert paper == {LIGHT: [255, 255, 255], DARK: [0x14, 0x18, 0x1D]}
    assert shots[LIGHT].mean() > 200 > 80 > shots[DARK].mean()


def test_pictures_follow_the_scheme(browser: Browser) -> None:
    colour = """const bar = document.querySelector("#plan svg path[style*='series-0']");
        return getComputedStyle(bar).stroke + getComputedStyle(bar).fill"""
    browser.open(scheme=LIGHT)
    light = browser.run(colour)
    browser.open(scheme=DARK)
    assert "rgb(0, 114, 178)" in light
    assert "rgb(86, 180, 233)" in browser.run(colour)


def test_the_plan_is_seen_in_a_screenshot(browser: Browser) -> None:
    browser.open(1280)
    browser.run("document.querySelector('#plan').scrollIntoView()")
    blue = (browser.screenshot() == (0x00, 0x72, 0xB2)).all(axis=2)
    assert blue.sum() > 500  # of the bars of merged widths


def test_a_click_on_a_heading_sorts_and_another_one_turns_it(browser: Browser) -> None:
    browser.open()
    column = """return [...document.querySelectorAll("#sources tbody tr")].slice(0, 2)
        .map(row => row.cells[2].textContent)"""
    assert browser.run(column) == ["1,234", "999"]
    click = "document.querySelectorAll('#sources th button')[2].click();"
    assert browser.run(click + column) == ["999", "1,234"]
    assert browser.run(click + column) == ["1,234", "999"]
    heading = "return document.querySelectorAll('#sources th')[2].getAttribute('aria-sort')"
    assert browser.run(heading) == "descending"


def test_a_headings_arrow_stays_with_its_last_word(browser: Browser) -> None:
    browser.open(400)
    arrow = """const button = document.querySelectorAll("#sources th button")[2];
        return getComputedStyle(button, "::after").content"""
    assert browser.run(arrow) == '"\u00a0↕"'
    browser.run("document.querySelectorAll('#sources th button')[2].click()")
    assert browser.run(arrow) == '"\u00a0↑"'


def test_on_a_phone_no_short_name_over_feature_maps_is_broken(browser: Browser) -> None:
    browser.open(400)
    lines = """return [...document.querySelectorAll("#features thead bdi")]
        .map(e => [e.textContent, e.getClientRects().length])"""
    found = dict(browser.run(lines))
    assert found["merged"] == 1
    assert max(found.values()) > 1  # the hostile name is


def test_every_heading_sorts_without_a_complaint(browser: Browser) -> None:
    browser.open()
    clicked = browser.run(
        """const buttons = [...document.querySelectorAll("th button")];
        for (const button of buttons) { button.click(); button.click(); }
        return buttons.length"""
    )
    assert clicked > 20
    assert browser.complaints == []


def test_a_hostile_name_runs_nothing(browser: Browser) -> None:
    browser.open()
    assert browser.run("return document.title").startswith("global.pt of <script>")
    shown = browser.run("return document.querySelector('#verdict').textContent")
    assert HOSTILE.replace("\x00", "�") in shown


def test_a_foreign_script_or_address_would_be_refused_and_noticed(
    browser: Browser, tmp_path: Path
) -> None:
    text = browser.page.read_text(encoding="utf-8")
    bad = tmp_path / "bad.html"
    intruder = "<script>document.title = 'owned'</script><img src='http://localhost:9/x.png'>"
    bad.write_text(text.replace("<main>", f"<main>{intruder}"), encoding="utf-8")
    intruded = Browser(browser.driver, bad)
    intruded.open()
    assert intruded.run("return document.title") != "owned"
    complaints = " ".join(intruded.complaints)
    assert "script" in complaints
    assert "x.png" in complaints


def test_print_opens_everything_on_white_paper(browser: Browser) -> None:
    browser.open(scheme=DARK, media="print")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("return [...document.querySelectorAll('details')].every(d => d.open)")
    pdf = base64.b64decode(browser.command("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 2


def test_without_scripts_the_page_still_tells_everything(browser: Browser) -> None:
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open()
        rows = browser.run("return document.querySelectorAll('tbody tr').length")
        buttons = browser.run("return document.querySelectorAll('th button').length")
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)
    assert rows > 15
    assert buttons == 0
