from __future__ import annotations

import pytest
from real_ring import forbid_reading

from planetary.collectives import Quantization, ReduceOp
from planetary.collectives.reduction import quantise


@pytest.fixture(scope="session")
def compiled_loops() -> None:
    """Compile before a deadline runs: without a cache, on a busy machine, that takes longer than peers wait here."""
    for bits in (4, 8):
        quantise.check(Quantization(bits), "f32", ReduceOp.AVG)


@pytest.fixture(params=["direct", "slots", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once for every way that pieces can take."""
    if request.param == "slots":
        forbid_reading(monkeypatch)
    return "tcp" if request.param == "tcp" else "auto"
