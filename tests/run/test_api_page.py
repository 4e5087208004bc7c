"""docs/api.md is what the docstrings say now, and the examples in it run."""

from __future__ import annotations

import asyncio
import doctest
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from serving_run import write_run

import planetary
from planetary.fleet.protocol.kind_reader import FORMAT

ROOT = Path(__file__).parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_examples(*names: str) -> None:
    """Run the examples of these names, one after the other in one namespace."""
    globs = {"planetary": planetary, "asyncio": asyncio}
    for name in names:
        text = getattr(planetary, name).__doc__
        test = doctest.DocTestParser().get_doctest(text, globs, f"planetary.{name}", None, 0)
        assert test.examples, f"planetary.{name} has no example"
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        said: list[str] = []
        failed = runner.run(test, out=said.append, clear_globs=False).failed
        assert not failed, "".join(said)
        globs = test.globs


@pytest.fixture
def here(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANETARY_CACHE", str(shared_cache))


def test_the_page_is_current() -> None:
    make_api = generator()
    assert make_api.PAGE.read_text() == make_api.page(), "run: python docs/make_api.py"


@pytest.mark.usefixtures("here")
def test_the_examples_of_export_and_vjp_run() -> None:
    run_examples("export", "vjp")


@pytest.mark.compiles
@pytest.mark.usefixtures("here")
def test_the_example_of_compile_runs() -> None:
    run_examples("compile")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_example_of_simulate_runs() -> None:
    run_examples("simulate")


@pytest.mark.processes
@pytest.mark.compiles
@pytest.mark.usefixtures("here")
def test_the_examples_of_train_and_run_run() -> None:
    run_examples("train", "Run", "train_async")


@pytest.mark.processes
@pytest.mark.compiles
@pytest.mark.usefixtures("here")
def test_the_example_of_rl_runs() -> None:
    run_examples("rl")


@pytest.mark.processes
@pytest.mark.compiles
@pytest.mark.usefixtures("here")
def test_the_example_of_serve_runs() -> None:
    """With a run of random parameters in place of a trained one; its processes end with the block."""
    Path("runs").mkdir()
    write_run(Path("runs/tiny"), 1, seed=1)
    started = {
        "kind": "rounds",
        "format": FORMAT,
        "run": "tiny",
        "rounds": 1,
        "config_hash": "",
        "model": "",
        "params": 8,
    }
    Path("runs/tiny/events.jsonl").write_text(json.dumps(started) + "\n")
    run_examples("serve")
    assert not [
        child for child in psutil.Process().children(recursive=True) if "planetary.cli.child" in child.cmdline()
    ]
