"""The page of a site in a real browser: every job has a link to its own page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from site_support import Running, run, toy_kinds  # noqa: F401

from browser import start_browser

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("toy_kinds")]


def test_page_of_a_site_lists_its_jobs_with_links(tmp_path: Path) -> None:
    browser = start_browser(tmp_path / "browser")

    async def test(site: Running) -> None:
        await site.submit("toy")
        await site.submit("toy-two")
        shown = "document.querySelectorAll('#submitted a').length === 2"
        await asyncio.to_thread(browser.open, site.url, shown)
        links = "[...document.querySelectorAll('#submitted a')].map(a => [a.textContent, a.getAttribute('href')])"
        assert await asyncio.to_thread(browser.evaluate, links) == [["toy-two", "?job=toy-two"], ["toy", "?job=toy"]]
        assert not await asyncio.to_thread(browser.evaluate, "document.getElementById('jobs').hidden")
        own = "document.getElementById('run')?.textContent === 'toy-two'"
        await asyncio.to_thread(browser.open, f"{site.url}/?job=toy-two", own)

    try:
        run(tmp_path / "site", test)
    finally:
        browser.close()
