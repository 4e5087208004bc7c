"""Named sets and metrics of a run: every version's values, bad metrics, restarts, and sets that do not fit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from fault_schedules import LIMIT_S
from small_training import small_training

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.errors import UserError
from planetary.fleet.gateway.run_files import METRICS
from planetary.fleet.protocol.records import RunFinished
from planetary.monitor.sinks.scalars import scalars_of
from planetary.runs.rounds.metrics import RoundMetrics, figures_of
from planetary.runs.rounds.records import EvalFinished
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster

OWN = """
from planetary.extend import Metric

class Excess(Metric):
    def sums(self, rows):
        import numpy as np
        return np.stack([rows.nats - 1.5 * rows.targets, rows.targets], axis=1)

class Fragile(Excess):
    def value(self, sums):
        if super().value(sums) < 100:
            raise RuntimeError("too good")
        return 1.0

class Wrong(Metric):
    def sums(self, rows):
        return rows.nats[1:]

class Nan(Excess):
    def value(self, sums):
        return float("nan")

class Greedy(Metric):
    reads_logits = True
    def sums(self, rows):
        return rows.logits.sum((1, 2))[:, None]
"""


def settings(folder: Path, *metrics: str, count: int = 3000, top: int = 250) -> tuple[str, ...]:
    (folder / "own.py").write_text(OWN)
    (np.arange(count) % top).astype("<u2").tofile(folder / "notes.u16")
    names = [name if name.islower() else f"{folder}/own.py:{name}" for name in metrics]
    return f"eval.sets={{notes = '{folder}/notes.u16'}}", f"eval.metrics={names}"


def trained(given: tuple[str, ...], *faults: Fault, seed: int = 1) -> SimCluster:
    cluster = SimCluster(seed, small_training(rounds=5, workers=2, given=given), 2, faults)
    assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    [end] = [record for record in cluster.journal if isinstance(record, RunFinished)]
    assert end.ok
    return cluster


def evaluations(cluster: SimCluster) -> dict[int, EvalFinished]:
    return {record.version: record for record in cluster.journal if isinstance(record, EvalFinished)}


def lines(cluster: SimCluster) -> dict[int, RoundMetrics]:
    return {line.round: line for line in read_json_lines(cluster.folder / "run" / METRICS, RoundMetrics)}


@pytest.mark.parametrize("mode", [(), ("sync.topology=ring",), ("data.delivery=gateway",)], ids=" ".join)
def test_every_version_has_the_values_of_every_set(tmp_path: Path, mode: tuple[str, ...]) -> None:
    cluster = trained((*settings(tmp_path, "perplexity", "Excess"), *mode))
    found, shown = evaluations(cluster), lines(cluster)
    assert found.keys() == shown.keys() == {1, 2, 3, 4, 5}
    for version, record in found.items():
        loss = record.values["notes"]["loss"]
        assert record.values == {
            "held_out": {
                "perplexity": pytest.approx(math.exp(record.loss)),
                "Excess": pytest.approx(record.loss - 1.5),
            },
            "notes": {
                **{"loss": loss, "perplexity": pytest.approx(math.exp(loss)), "Excess": pytest.approx(loss - 1.5)}
            },
        }
        assert (shown[version].evaluated, shown[version].eval_loss) == (record.values, record.loss)
        assert scalars_of(shown[version])["eval/notes/Excess"] == record.values["notes"]["Excess"]
    figures = {figure.name: dict(figure.points) for figure in figures_of(shown.values())}
    assert figures["notes loss"] == {version: record.values["notes"]["loss"] for version, record in found.items()}
    assert figures.keys() == {f"{s} {m}" for s, m in found[1].values["notes"].items() for s in ()} | {
        *("held_out perplexity", "held_out Excess", "notes loss", "notes perplexity", "notes Excess")
    }


def test_a_bad_metric_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    cluster = trained(settings(tmp_path, "perplexity", "Fragile", "Wrong", "Nan"))
    found = evaluations(cluster)
    assert found.keys() == {1, 2, 3, 4, 5}
    for record in found.values():
        assert {"loss", "perplexity"} <= record.values["notes"].keys() <= {"loss", "perplexity", "Fragile"}
        assert "set notes: metric Wrong: sums() returned an array" in record.news
        assert "set held_out: metric Nan: the value is nan" in record.news
    assert any("metric Fragile fails: RuntimeError: too good (<own.py@" in record.news for record in found.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_values_outlast_the_gateway(tmp_path: Path, seed: int) -> None:
    faults = tuple(Fault(at_s=4.0 + 2.0 * i + 0.4 * seed, kind="kill_gateway", seconds=1.0) for i in range(3))
    cluster = trained(settings(tmp_path, "Excess"), *faults, seed=seed)
    found, shown = evaluations(cluster), lines(cluster)
    for version, line in shown.items():
        assert line.eval_loss is None or line.evaluated == found[version].values
    assert shown[5].evaluated.keys() == {"held_out", "notes"}


@pytest.mark.parametrize(
    ("options", "metrics", "words"),
    [
        ({}, ("Greedy",), "Greedy reads logits, and workers send losses alone; `planetary evaluate RUN"),
        ({}, ("bits_per_byte",), "bits_per_byte counts bytes of text, and the data is tokens"),
        ({}, ("perplexity", "perplexity"), "there is another perplexity already"),
        ({}, ("perplexty",), "eval.metrics.*unknown metric 'perplexty'; did you mean perplexity"),
        ({"count": 3}, (), r"the set notes \(.*notes.u16\) has 0 rows of \d+ tokens, and a batch takes"),
        ({"count": 0}, (), "the set notes .* has 0 tokens: expected two at least"),
        ({"top": 2000}, (), r"the set notes .* has token 1999, and the model knows \d+: it was made with another"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(
    tmp_path: Path, options: dict[str, int], metrics: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        trained(settings(tmp_path, *metrics, **options))


def test_sets_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.u16").write_bytes(bytes(200))
    for name in ("held_out", "a b"):
        with pytest.raises(UserError, match=f"eval.sets: '{name}' is no name of a set"):
            small_training(rounds=1, workers=1, given=(f"eval.sets={{'{name}' = '{tmp_path}/a.u16'}}",))


def test_a_set_of_chats_needs_data_with_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step made for data of which every token is a target would train -100 as a token."""
    monkeypatch.setattr("planetary.data.evaluation_sets.read_set", lambda *given: np.resize([1, ~2], 3000))
    with pytest.raises(UserError, match="some tokens are no targets, and the run's data has none"):
        small_training(rounds=1, workers=1, given=settings(tmp_path))
