"""The report in a real browser: no error, no request, every view drawn, everything that is drawn says what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from anyfit.showing.report import Elsewhere, Recorded, Source, Speed, html
from anyfit.values.answers import Refused, ranked
from anyfit.values.no_plan import NoPlan
from anyfit.values.plan import Plan
from anyfit.values.prices import Price
from tests import browser as browsers
from tests.browser import Browser

PLANS = Path(__file__).parent.parent / "golden" / "plans"
# What is drawn with some room around its middle, so that the mouse comes to it and not to its neighbour.
FIRST_WIDE = """return [...document.querySelectorAll(arguments[0])].find(each => {
    const box = each.getBoundingClientRect();
    return each.tagName !== "path" && box.width > 8 && box.height > 8;
}) || null"""
VIEWS = ["overview", "memory", "lanes", "blocks", "alternatives", "machines"]

pytestmark = pytest.mark.skipif(None in (browsers.CHROMIUM, browsers.DRIVER), reason=browsers.MISSING)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsers.browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def plan(name: str) -> Plan:
    return Plan.load(PLANS / f"{name}.json")


def metrics(steps: int) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "loss": float("nan") if step == 7 else 5.0 / step,
            "gradient_norm": 1.0 + step % 3,
            "seconds": 2.5,
            "tokens_per_second": 3000.0 + 10 * step,
            "peak_bytes": {"device": 2 * 10**10, "host": 3 * 10**10, "disk": 0},
            "rescues": int(step > 9),
            "clipped_share": 0.1,
            "alarms": ["step 7: the loss is nan"] if step == 7 else [],
        }
        for step in range(1, steps + 1)
    ]


def everywhere(made: Plan) -> Elsewhere:
    """As if it had been planned for other machines."""
    lacking = NoPlan("it needs 3 GiB more", 3 * 2**30)
    outcomes = {"h100": made, "h200": made, "l4": lacking, "t4": Refused("a Tesla T4 does not compute in bfloat16")}
    prices = {"h100": Price(3.5, "a list", "2026-11-01"), "h200": Price(4.6, "a list", "2026-11-01")}
    found = ranked(outcomes, dict.fromkeys(outcomes, 1), 10**10, prices)
    sizes = [Speed(10 * 2**30, lacking), Speed(24 * 2**30, made), Speed(48 * 2**30, made)]
    return Elsewhere(sizes, found, 10**10)


PAGES = {
    "demo": lambda: html(plan("demo"), Source("plan.json")),
    "tight": lambda: html(plan("tight"), Source("plan.json", "gpt2-4b"), elsewhere=everywhere(plan("tight"))),
    "cluster": lambda: html(plan("cluster"), Source("plan.json")),
    "run": lambda: html(plan("tight"), Source("run"), Recorded("run", metrics(40), [("Again:", "anyfit fit --plan plan.json")])),
    "old": lambda: html(Plan.from_json(_without_picture()), Source("plan.json")),
}


def _without_picture() -> dict[str, object]:
    document = json.loads((PLANS / "tight.json").read_text())
    return {**document, "picture": None}


def opened(browser: Browser, tmp_path: Path, name: str) -> Path:
    page = tmp_path / f"{name}.html"
    page.write_text(PAGES[name]())
    browser.console()
    browser.requests()
    browser.open(page.as_uri())
    return page


def tip(browser: Browser) -> str:
    said: str = browser.run("const t = document.getElementById('tip'); return t.style.display === 'block' ? t.textContent : ''")
    return said


@pytest.mark.parametrize("name", PAGES)
def test_every_view_opens_and_what_is_drawn_says_what_it_is(browser: Browser, tmp_path: Path, name: str) -> None:
    browser.resize(1200, 900)
    page = opened(browser, tmp_path, name)
    tabs = browser.all("[role=tab]")
    views = ["overview", "run", *VIEWS[1:]] if name == "run" else VIEWS
    assert len(tabs) == len(views)
    hits = 0
    for tab, view in zip(tabs, views, strict=True):
        browser.click(tab)
        shown = "return [...document.querySelectorAll('[role=tabpanel]')].filter(p => p.offsetParent).map(p => p.id)"
        assert browser.run(shown) == [f"panel-{view}"]
        drawn = browser.all(f"#panel-{view} .hit")
        hits += len(drawn)
        for each in dict.fromkeys([*drawn[:2], *drawn[len(drawn) // 2 :][:1], *drawn[-1:]]):
            browser.run("arguments[0].scrollIntoView({block: 'center'})", {browsers.ELEMENT: each})
            browser.run("document.activeElement.blur(); document.getElementById('tip').style.display = 'none'")
            browser.run("arguments[0].focus()", {browsers.ELEMENT: each})
            by_focus = tip(browser)
            assert len(by_focus) > 3
            browser.run("document.activeElement.blur()")
            assert tip(browser) == ""
        wide = browser.run(FIRST_WIDE, f"#panel-{view} .hit")
        if wide is not None:
            browser.run("arguments[0].scrollIntoView({block: 'center'})", wide)
            browser.point_at(wide[browsers.ELEMENT])
            assert len(tip(browser)) > 3
    assert hits > (0 if name == "old" else 10)
    assert browser.console() == []
    assert [url for url in browser.requests() if url != page.as_uri() and not url.startswith("data:")] == []


def test_tabs_are_walked_with_the_keys(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, "demo")
    browser.click(browser.all("[role=tab]")[0])
    right, end, chosen = "\ue014", "\ue010", "return document.querySelector('[aria-selected=true]').id"
    browser.press(right)
    assert browser.run(chosen) == "tab-memory"
    browser.press(end)
    assert browser.run(chosen) == "tab-machines"
    browser.press(right)
    assert browser.run(chosen) == "tab-overview"
    assert browser.run("return document.activeElement.id") == "tab-overview"


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_follows_the_system_and_has_a_switch(browser: Browser, tmp_path: Path, scheme: str) -> None:
    browser.prefer(scheme)
    opened(browser, tmp_path, "demo")
    theme, paper = "return document.documentElement.dataset.theme", "return getComputedStyle(document.body).backgroundColor"
    assert browser.run(theme) == scheme
    before = browser.run(paper)
    browser.click(browser.all("#theme")[0])
    assert browser.run(theme) == {"dark": "light", "light": "dark"}[scheme]
    assert browser.run(paper) != before


@pytest.mark.parametrize("name", ["tight", "cluster", "run"])
def test_it_is_read_at_the_width_of_a_phone(browser: Browser, tmp_path: Path, name: str) -> None:
    browser.resize(390, 844)
    opened(browser, tmp_path, name)
    for tab in browser.all("[role=tab]"):
        browser.run("arguments[0].click()", {browsers.ELEMENT: tab})
        assert browser.run("return document.documentElement.scrollWidth") <= 390
    assert browser.console() == []
