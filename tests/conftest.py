"""The order of all tests: the quick ones first, then those that compile, then those that start processes."""

from __future__ import annotations

import pytest


def _tier(item: pytest.Item) -> int:
    if item.get_closest_marker("processes"):
        return 2
    return 1 if item.get_closest_marker("compiles") else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_tier)  # stable: the order within a tier stays
