"""The dashboard in a real browser without a window: its script runs, its own policy lets it, and it can be operated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_story import status

from browser import Browser, start_browser
from planetary.monitor.dashboard import Dashboard
from planetary.runs.rounds.training_status import TrainingStatus
from planetary.site.placement.status import HubSiteStatus, HubStatus, PlacedJobStatus

pytestmark = pytest.mark.processes
SHOWN = "document.getElementById('state')?.textContent === 'training'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start_browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


def long_run() -> TrainingStatus:
    points = tuple((n, 6.0 / n + 2.0) for n in range(1, 201))
    return status(rounds=240, round=201, rounds_finished=200, loss=points, eval_loss=points[9::10], bigram_loss=2.5)


def rounds(browser: Browser) -> list[str]:
    texts = "[...document.querySelectorAll('#chart text[text-anchor=middle]')].map(t => t.textContent)"
    return browser.evaluate(texts)


def test_the_page_draws_the_run_and_its_policy_stops_nothing(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[train]\nrounds = 7\n[[sinks]]\nkind = "webhook"\nurl = "https://hooks.example/T0/secret"\n'
    )
    with Dashboard(long_run, config_file=tmp_path / "config.toml") as board:
        browser.open(board.url, SHOWN)
        assert browser.evaluate("document.title") == "demo · training"
        assert rounds(browser) == ["1", "20", "40", "60", "80", "100", "120", "140", "160", "180", "200", "220", "240"]
        assert browser.evaluate("document.querySelectorAll('#chart polyline').length") == 2
        assert browser.evaluate("getComputedStyle(document.querySelector('.card')).borderRadius") == "10px"
        assert browser.box("#chart")[2] > 600
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.click("summary")
        browser.wait("document.getElementById('config').textContent.length > 0")
        config = browser.text("config")
        assert "rounds = 7" in config
        assert "secret" not in config


def test_drag_zooms_double_click_resets_button_toggles_log(browser: Browser) -> None:
    """A drag zooms a double click shows all and a button makes the axis logarithmic."""
    with Dashboard(long_run) as board:
        browser.open(board.url, SHOWN)
        x, y, width, height = browser.box("#chart")
        at = lambda r: x + width * (52 + (r - 1) / 239 * (920 - 52 - 64)) / 920  # noqa: E731 - where a round is
        browser.mouse("mousePressed", at(50), y + height / 2)
        browser.mouse("mouseMoved", at(60), y + height / 2)
        browser.mouse("mouseMoved", at(70), y + height / 2)
        assert browser.evaluate("document.querySelectorAll('#chart rect').length") == 1
        browser.mouse("mouseReleased", at(70), y + height / 2)
        shown = [int(text) for text in rounds(browser)]
        assert 48 <= shown[0] <= 52
        assert 68 <= shown[-1] <= 72
        assert "from=" in browser.evaluate("location.hash")
        browser.click("#log")
        assert browser.evaluate("location.hash").startswith("#log&from=")
        assert browser.evaluate("document.getElementById('log').getAttribute('aria-pressed')") == "true"
        browser.open(board.url + browser.evaluate("location.hash"), SHOWN)  # it survives a reload
        assert [int(text) for text in rounds(browser)] == shown
        browser.click("#all")
        assert rounds(browser)[-1] == "240"
        assert browser.evaluate("location.hash") == "#log"


def test_a_hubs_page_shows_jobs_with_their_sites(browser: Browser) -> None:
    job = PlacedJobStatus(
        job_id="tiny",
        controller="training",
        kind="rounds",
        state="placed",
        site="paris",
        why="it has 2 idle workers that fit; tokyo has 0" + ", and more" * 40,
        reason="",
        attempt=2,
        state_there="running",
        name_there="tiny",
        strays={"tokyo": "away"},
        priority=None,
        by="a person",
        submitted_at=1.0,
        placed_at=2.0,
        ended_at=None,
    )
    site = HubSiteStatus(
        name="paris",
        connected=True,
        address="10.0.0.7",
        jobs=("tiny",),
        controllers={"training": "1 of 2 jobs"},
        workers=("2 × cpu:host, 2 idle",),
        data_sets=("notes",),
        policy="all roles, patience 120 s",
        gb_today=0.25,
    )
    hub = HubStatus(run="hub", state="waiting", hub="hub-1", sites=(site,), jobs=(job,))
    with Dashboard(lambda: hub) as board:
        browser.open(board.url, "document.getElementById('placed')?.children.length === 1")
        row = browser.text("placed")
        for text in ("tiny", "● placed", "paris", "running, tiny", "it has 2 idle workers that fit"):
            assert text in row
        assert "250 MB" in browser.text("sites")
        assert browser.evaluate("document.getElementById('crew').hidden && document.getElementById('losses').hidden")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_phone_shows_the_whole_page(browser: Browser) -> None:
    """Wide tables scroll inside their cards; the page itself is as wide as the screen."""
    with Dashboard(long_run) as board:
        browser.open(board.url, SHOWN)
        narrow = "document.documentElement.style.width = '360px'; document.querySelector('main').scrollWidth <= 360"
        assert browser.evaluate(narrow)
        wide = "[...document.querySelectorAll('main > section')].every(s => s.getBoundingClientRect().right <= 360)"
        assert browser.evaluate(wide)
