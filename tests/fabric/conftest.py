from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data and compiled steps of all tests that start processes: compiling is most of their time."""
    return tmp_path_factory.mktemp("cache")
