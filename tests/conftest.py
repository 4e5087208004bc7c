"""Rules for all tests: their order (quick ones, then slow ones: processes, compiling, others), which of them are slow,
the profile of generated cases, and that no test's log handlers outlive it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# JAX is the oracle here, for programs that run once: a fifth of the tests' time went into optimising them. Set before
# anything imports JAX, and inherited by the processes that tests start. The project's own compilers do not read it.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# A shell starts what it runs in the background with SIGINT ignored, and every process started from there inherits it:
# programs that tests interrupt would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine must not fail a test: neither an example nor its generation has a time limit. The examples are the
# same in every run, so that a failure can be repeated.
settings.register_profile("planetary", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("planetary")


def _tier(item: pytest.Item) -> int:
    if item.get_closest_marker("processes"):
        return 2
    return 1 if item.get_closest_marker("compiles") else 0


def _order(item: pytest.Item) -> tuple[bool, int]:
    """Quick tests that fail are to be seen early; of both, those that last longest are not to begin last."""
    return item.get_closest_marker("slow") is not None, -_tier(item)


def _close_doors(item: pytest.Item) -> None:
    """Skip a test whose library is missing; with PLANETARY_DOORS set, a missing library is an error."""
    wanted = {name for mark in item.iter_markers("doors") for name in mark.args}
    absent = ", ".join(sorted(name for name in wanted if importlib.util.find_spec(name) is None))
    if not absent:
        return
    if os.environ.get("PLANETARY_DOORS"):
        raise pytest.UsageError(f"{item.nodeid} needs {absent}: pip install -e '.[test-doors]'")
    item.add_marker(pytest.mark.skip(reason=f"{absent} not installed; `make test-doors`"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _close_doors(item)
        elsewhere = item.get_closest_marker("doors") is not None  # `make test-doors` runs it
        if elsewhere or (_tier(item) and not item.get_closest_marker("essential")):
            item.add_marker(pytest.mark.slow)
    items.sort(key=_order)  # stable: the order within a tier stays


@pytest.fixture(autouse=True)
def _own_log_handlers() -> Iterator[None]:
    """Remove what a test's role attached: pytest closes the captured stderr that such a handler writes to."""
    loggers = [logging.getLogger(name) for name in ("planetary", "asyncio")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Prepared data and compiled steps of all tests that start processes: compiling is most of their time.

    One for both of pytest's processes: a cache may be used by several at once.
    """
    base = tmp_path_factory.getbasetemp()
    cache = (base if worker_id == "master" else base.parent) / "cache"
    cache.mkdir(exist_ok=True)
    return cache
