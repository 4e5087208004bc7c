"""Several sources with weights: shares, passes, and what is never repeated or lost."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import ResourceError, UserError
from planetary.data.prepare import blocks_of_mixture, chosen_blocks, prepare
from planetary.data.prepared_data import PreparedData

BLOCK = 8


def test_shares_are_those_of_the_weights_under_random_sizes() -> None:
    rng = random.Random(1)
    for _ in range(300):
        counts = [rng.randint(1, 5000) for _ in range(rng.randint(1, 5))]
        weights = [rng.uniform(0.05, 9) for _ in counts]
        more = blocks_of_mixture(counts, weights, repeat=True)
        less = blocks_of_mixture(counts, weights, repeat=False)
        assert all(n >= count for n, count in zip(more, counts, strict=True)), "all of every source"
        assert all(1 <= n <= count for n, count in zip(less, counts, strict=True)), "nothing twice"
        assert any(n == count for n, count in zip(more, counts, strict=True)), "no more than is needed"
        for found in (more, less):
            for n, weight in zip(found, weights, strict=True):
                exact = weight / sum(weights) * sum(found)
                assert abs(n - exact) <= 1 + len(counts), (counts, weights, found)  # rounded, and at least one


def test_one_source_is_taken_as_it_is() -> None:
    assert blocks_of_mixture([7], [0.3], repeat=True) == blocks_of_mixture([7], [0.3], repeat=False) == [7]
    assert chosen_blocks(7, 7, 1).tolist() == list(range(7))


def test_a_block_is_there_as_often_as_any_other_or_once_more() -> None:
    for count, wanted in ((5, 5), (5, 13), (4, 8), (3, 100), (9, 4)):
        times = np.bincount(chosen_blocks(count, wanted, 3), minlength=count)
        assert times.sum() == wanted
        assert times.max() - times.min() <= 1
    assert chosen_blocks(50, 70, 1).tolist() != chosen_blocks(50, 70, 2).tolist(), "which ones is drawn"


def config_of(sources: list[dict[str, Any]], **data: Any) -> Config:
    return config_from_tables(
        {
            "data": {"sources": sources, **data},
            "train": {"batch_size": 2, "sequence_length": BLOCK - 1, "inner_steps": 2},
            "eval": {"batches": 1},
        }
    )


def texts(folder: Path) -> dict[str, Path]:
    """Write three sources whose blocks can be told apart: of letters `a`, `b`, and records of `c`."""
    (folder / "a.txt").write_text("a" * 8000)
    (folder / "b.txt").write_text("b" * 800)
    records = [json.dumps({"body": "c" * 79}) for _ in range(25)]
    (folder / "c.jsonl").write_text("\n".join(records))
    return {name: folder / f"{name}.{'jsonl' if name == 'c' else 'txt'}" for name in "abc"}


def blocks(data: PreparedData, which: str = "train") -> np.ndarray:
    file = getattr(data, which)
    return np.fromfile(file.url, np.uint8).reshape(-1, BLOCK)


def shares(data: PreparedData, which: str = "train") -> dict[str, float]:
    found = blocks(data, which)
    assert all(len(set(block.tolist()) - {0}) == 1 for block in found), "no block is of two sources"
    kinds = found.max(axis=1)
    return {chr(kind): float((kinds == kind).mean()) for kind in sorted(set(kinds.tolist()))}


def test_the_prepared_files_have_the_shares_and_every_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = texts(tmp_path)
    sources = [
        {"source": str(found["a"]), "weight": 5},
        {"source": str(found["b"]), "weight": 3},
        {"source": str(found["c"]), "weight": 2, "text_key": "body"},
    ]
    with caplog.at_level(logging.INFO):
        data = prepare(config_of(sources), tmp_path / "cache")
    assert shares(data) == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=0.02)
    assert shares(data, "held_out") == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=0.15)
    passes = {line.split(":")[0][-5:]: line for line in caplog.messages if "of the training sequences" in line}
    assert "30.0% of the training sequences, each 6.00 times in a pass; above about 4 times" in passes["b.txt"]
    assert "50.0% of the training sequences, each 1.00 times in a pass" in passes["a.txt"]
    # Everything of the source that decides is there, and what is held out is nowhere else.
    count = 8000 // BLOCK
    assert (blocks(data).max(axis=1) == ord("a")).sum() in range(round(0.9 * count), count)
    kinds = blocks(data)[:40].max(axis=1)
    assert len(set(kinds.tolist())) == 3, "they are shuffled together"


def test_equal_sources_and_weights_give_equal_files(tmp_path: Path) -> None:
    found = texts(tmp_path)
    sources = [{"source": str(found["a"])}, {"source": str(found["b"])}]
    first = prepare(config_of(sources), tmp_path / "cache")
    again = prepare(config_of(sources), tmp_path / "elsewhere")
    assert (first.key, first.train.digest) == (again.key, again.train.digest)
    heavier = prepare(config_of([{**sources[0], "weight": 2}, sources[1]]), tmp_path / "cache")
    assert heavier.key != first.key
    assert heavier.train.digest != first.train.digest


def test_what_is_held_out_of_a_source_is_never_trained_on(tmp_path: Path) -> None:
    numbered = "".join(f"{i:07d}\n" for i in range(1000))
    (tmp_path / "n.txt").write_text(numbered)
    found = texts(tmp_path)
    sources = [{"source": str(tmp_path / "n.txt"), "weight": 9}, {"source": str(found["b"]), "weight": 1}]
    data = prepare(config_of(sources), tmp_path / "cache")
    train = {block.tobytes() for block in blocks(data)}
    held = [block.tobytes() for block in blocks(data, "held_out") if block[0] != ord("b")]
    assert len(set(held)) == len(held) > 0
    assert not train & set(held)


def test_token_files_are_mixed_and_texts_with_tokens_are_not(tmp_path: Path) -> None:
    np.full(800, 7, np.uint8).tofile(tmp_path / "x.u8")
    np.full(800, 300, np.uint16).tofile(tmp_path / "y.u16")
    data = prepare(config_of([{"source": str(tmp_path / name)} for name in ("x.u8", "y.u16")]), tmp_path / "cache")
    tokens = np.fromfile(data.train.url, np.uint16)
    assert data.vocab_size == 301
    assert (tokens == 7).mean() == pytest.approx(0.5, abs=0.02)
    mixed = [{"source": str(tmp_path / "x.u8")}, {"source": "stdlib"}]
    with pytest.raises(UserError, match=r"texts \(stdlib\) and tokens beside each other"):
        prepare(config_of(mixed), tmp_path / "cache")


def test_a_source_that_is_too_short_is_named(tmp_path: Path) -> None:
    found = texts(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    for name, text in (("empty.txt", r"empty\.txt is empty"), ("short.txt", r"part of .*short\.txt has fewer than 8")):
        sources = [{"source": str(found["a"])}, {"source": str(tmp_path / name)}]
        with pytest.raises(UserError, match=text):
            prepare(config_of(sources), tmp_path / "cache")


def test_mixture_too_large_for_the_disk_is_refused_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture that is too large for the disk is refused before it is written."""
    found = texts(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=1000, used=900, free=100))
    with pytest.raises(ResourceError, match="weights that are nearer to the sources' sizes"):
        prepare(config_of([{"source": str(found["a"])}, {"source": str(found["b"])}]), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"sources": [{"weight": 1.0}]}, "data.sources: expected an array whose values are tables with source, weight"),
        ({"sources": [{"source": "a", "weight": 0}]}, "data.sources: expected"),
        ({"sources": [{"source": "a", "weights": 1}]}, "data.sources: expected"),
        ({"sources": [{"source": "a"}, {"source": "a"}]}, "names .*/a twice"),
        ({"sources": [{"source": "a", "weight": float("inf")}]}, "finite numbers"),
        ({"sources": [{"source": "a"}], "source": "b"}, "data.source and data.sources are both given"),
        ({"sources": [{"source": "a"}], "sampling": "fifo"}, 'data.sampling: expected "random" with data.sources'),
    ],
)
def test_wrong_sources_are_refused(data: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        config_from_tables({"data": data})


def test_paths_are_relative_to_the_file_and_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[data]\nsources = [{ source = "stdlib", weight = 0.7 }, { source = "notes/*.md", text_key = "b" }]\n'
    )
    config = load_config(tmp_path / "run.toml")
    assert [one.source for one in config.data.sources] == ["stdlib", str(tmp_path / "notes" / "*.md")]
    assert [one.text_key for one in config.data.parts] == ["text", "b"]
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config
    given = load_config(tmp_path / "run.toml", ['data.sources=[{source = "stdlib"}]'])
    assert [one.source for one in given.data.parts] == ["stdlib"]


def test_the_tables_that_were_given_are_left_as_they_are() -> None:
    tables = {"data": {"sources": [{"source": "notes.md"}]}}
    config_from_tables(tables)
    assert tables == {"data": {"sources": [{"source": "notes.md"}]}}
