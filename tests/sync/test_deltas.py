from __future__ import annotations

import numpy as np
import pytest

from planetary.core.quantisers import to_bfloat16
from planetary.core.tensors import TensorSpec
from planetary.sync import contributions as blocks_module
from planetary.sync.contributions import Contribution
from planetary.sync.deltas import table_of

SPECS = (TensorSpec("w", "f32", (3, 50)), TensorSpec("h", "bf16", (70,)))


@pytest.mark.parametrize("block", [7, 1 << 16])
def test_the_table_has_the_inner_products_of_all_pairs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK", block)
    random = np.random.default_rng(0)
    masters = {"w": random.standard_normal((3, 50), np.float32), "h": random.standard_normal(70, np.float32)}
    parts, deltas = [], []
    for task in (9, 2, 5):
        ends = {"w": random.standard_normal((3, 50), np.float32), "h": random.standard_normal(70, np.float32)}
        low = to_bfloat16(ends["h"])
        rounded = (low.astype(np.uint32) << 16).view(np.float32)
        parts.append(Contribution(task, 1, {"w": ends["w"], "h": low}))
        wide = [(masters[k] - e).astype(np.float64).ravel() for k, e in (("w", ends["w"]), ("h", rounded))]
        deltas.append((task, np.concatenate(wide)))
    table = table_of(SPECS, masters, parts)
    deltas.sort(key=lambda pair: pair[0])
    gram = np.array([[left @ right for _, right in deltas] for _, left in deltas])
    assert table.tasks == (2, 5, 9)
    assert table.size == 220
    np.testing.assert_allclose(np.array(table.products), gram, rtol=1e-6, atol=1e-5)
    start = np.concatenate([masters["w"].ravel(), masters["h"]]).astype(np.float64)
    assert table.start_norm == pytest.approx(float(np.linalg.norm(start)))


def test_the_largest_numbers_do_not_overflow() -> None:
    spec = (TensorSpec("w", "f32", (4,)),)
    start = {"w": np.full(4, -3e38, np.float32)}
    table = table_of(spec, start, [Contribution(1, 1, {"w": np.full(4, 3e38, np.float32)})])
    assert table.products[0][0] == pytest.approx(4 * (6e38) ** 2, rel=1e-5)
