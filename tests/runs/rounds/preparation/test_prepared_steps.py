"""A model is exported once; what decides its training step makes it anew, and a run keeps its own."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planetary
from planetary.artifacts.store import BlobStore
from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.runs.rounds.preparation.preparation import Prepared, prepare_run
from planetary.runs.rounds.preparation.prepared_steps import DECIDING, find_record
from planetary.runs.rounds.preparation.run_step import step_news
from planetary.runs.rounds.preparation.training_options import step_options

MODEL = """
from pathlib import Path

import jax.numpy as jnp
import numpy as np

FACTOR = float((Path(__file__).parent / "factor.txt").read_text())


def build(batch_size, sequence_length, seed):
    rng = np.random.default_rng(seed)
    params = {"table": rng.standard_normal((256, 256), np.float32)}

    def loss(p, x, y):
        logits = FACTOR * p["table"][x]
        hit = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
        return jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) - hit)

    batch = np.zeros((batch_size, sequence_length), np.int32)
    return loss, params, (batch, batch)
"""


class Folder:
    """A model, data and a cache; `prepare` returns what was prepared and which stages that took."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model, self.factor, self.cache = root / "model.py", root / "factor.txt", root / "cache"
        self.model.write_text(MODEL)
        self.factor.write_text("1.0")
        (root / "corpus.txt").write_text("the cat sat on the mat\n" * 800)

    def config(self, *overrides: str) -> Config:
        small = ["train.inner_steps=2", "train.rounds=2", "optimizer.warmup_steps=1", "eval.batches=1"]
        shape = ["train.batch_size=2", "train.sequence_length=16"]
        places = [f"data.source={self.root / 'corpus.txt'}", f"model.source={self.model}:build"]
        return apply_overrides(Config(), [*places, *small, *shape, *overrides])

    def prepare(self, *overrides: str, own: Prepared | None = None) -> tuple[Prepared, bool]:
        """Return what was prepared, and whether the model was exported for it."""
        stages: list[str] = []
        record = None if own is None else own.record
        made = prepare_run(self.config(*overrides), self.cache, stages.append, record)
        return made, "exporting the model to StableHLO" in stages


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.slow
def test_the_same_step_is_read_back_for_any_length_and_rate(folder: Folder) -> None:
    first, exported = folder.prepare()
    assert exported
    again, exported = folder.prepare("train.rounds=7", "optimizer.learning_rate=0.1", "optimizer.schedule=linear")
    assert not exported
    assert again.step.portable == first.step.portable
    assert again.record == first.record
    np.testing.assert_array_equal(again.params["table"], first.params["table"])
    for other in ("optimizer.beta1=0.8", "run.seed=1", "train.batch_size=1"):
        assert folder.prepare(other)[1], other


@pytest.mark.slow
def test_changed_model_is_exported_anew_and_runs_keep_their_own(folder: Folder) -> None:
    first, _ = folder.prepare()
    assert str(folder.model) in first.record.sources
    folder.model.write_text(MODEL.replace("FACTOR * p", "-FACTOR * p"))
    resumed, exported = folder.prepare(own=first)
    assert not exported
    assert resumed.step.portable == first.step.portable
    assert step_news(first.record, resumed.record).startswith(
        "model.py changed since the run began; it goes on with its own"
    )
    fresh, exported = folder.prepare()
    assert exported
    assert fresh.step.portable != first.step.portable
    assert "differs from the one that this run began with" in step_news(first.record, fresh.record)


@pytest.mark.slow
def test_a_file_that_the_model_reads_counts(folder: Folder) -> None:
    first, _ = folder.prepare()
    assert str(folder.factor) in first.record.sources
    folder.factor.write_text("2.0")
    second, exported = folder.prepare()
    assert exported
    assert second.step.portable != first.step.portable
    folder.factor.touch()  # another time, the same bytes
    assert not folder.prepare()[1]


@pytest.mark.slow
def test_damaged_blobs_are_made_again(folder: Folder) -> None:
    first, _ = folder.prepare()
    store = BlobStore(folder.cache / "blobs")
    params, module = first.record.params, first.record.spec.stablehlo_digest
    for damaged in ((params,), (module,), (params, module)):
        for digest in damaged:
            path = store.path(digest)
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        again, exported = folder.prepare(own=first)
        assert exported
        assert again.record == first.record
        assert step_news(first.record, again.record) == ""


@pytest.mark.slow
def test_a_death_at_any_write_leaves_no_record(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    whole, writes = folder.prepare()[0], 0
    found = None
    while found is None:
        folder.cache, left = folder.root / f"cache-{writes}", writes
        store = BlobStore(folder.cache / "blobs")

        def dying(*arguments: Any, real: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            for name in ("put", "link"):
                real = getattr(BlobStore, name)
                patch.setattr(BlobStore, name, lambda *a, _real=real, **o: dying(*a, real=_real, **o))
            try:
                folder.prepare()
            except Killed:
                config = folder.config()
                assert find_record(store, config, step_options(config)) is None, writes
            else:
                found = find_record(store, folder.config(), step_options(folder.config()))
        writes += 1
    assert writes > 3
    assert found == whole.record


def test_every_deciding_part_of_the_package_is_there() -> None:
    for part in DECIDING:
        assert any((Path(planetary.__file__).parent / part).rglob("*.py")), part


def test_compiler_counts_among_the_sources_and_fleet_does_not(folder: Folder) -> None:
    """In a checkout; an installed package counts by its version alone."""
    sources = {Path(path) for path in folder.prepare()[0].record.sources}
    package = Path(planetary.__file__).parent
    is_installed = package.is_relative_to(sysconfig.get_path("purelib"))
    assert (package / "compiler" / "autodiff" / "differentiate.py" in sources) is not is_installed
    assert not any(path.is_relative_to(package / "fleet") for path in sources)
