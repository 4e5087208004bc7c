from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Prepared data and compiled steps of all tests that start processes: compiling is most of their time.

    One for both of pytest's processes: a cache may be used by several at once.
    """
    base = tmp_path_factory.getbasetemp()
    cache = (base if worker_id == "master" else base.parent) / "cache"
    cache.mkdir(exist_ok=True)
    return cache
