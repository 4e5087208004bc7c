"""docs/targets.md says what the compiler does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from planetary.compiler.backends.pipeline import compiler_version
from planetary.models.zoo import ZOO

SCRIPT = Path(__file__).parents[3] / "bench" / "targets.py"
AGAIN = "run `python bench/targets.py` and commit what it writes"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("targets_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_every_model_on_every_target(table: ModuleType) -> None:
    results = table.load()
    assert results.iree == compiler_version(), AGAIN
    assert set(results.outcomes) == set(ZOO), AGAIN
    assert all(set(row) == set(table.TARGETS) for row in results.outcomes.values()), AGAIN
    assert table.PAGE.read_text() == table.page(results), "run `python bench/targets.py --page`"


@pytest.mark.compiles
def test_a_part_of_the_table_compiled_again(table: ModuleType) -> None:
    """One model on three targets; all of them take minutes."""
    recorded = table.load().outcomes["nanochat"]
    step = table.zoo_step("nanochat")
    for target in ("cpu:baseline:aarch64", "cuda:sm_80", "metal"):
        found = table.try_target(step, target)
        assert bool(found.complaint) == bool(recorded[target].complaint), f"{target}: {found.complaint}; {AGAIN}"
