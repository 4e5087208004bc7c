"""How far composers agree about routing."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import LocalProtocolError
from planetary.runs.mixture.training.routing import routing_agreement


def test_overlap_and_divergence_of_a_case_worked_by_hand() -> None:
    one = np.array([[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]], np.float32)
    two = np.array([[0.5, 0.125, 0.25, 0.125], [0.125, 0.125, 0.25, 0.5]], np.float32)
    found = routing_agreement([one, two], 2)
    assert found.overlap == pytest.approx((1 / 2 + 1) / 2)  # {0, 1} against {0, 2}; the second token alike
    assert found.divergence == pytest.approx((0.25 - 0.125) * np.log(2) / 2)
    same = routing_agreement([one, one, one], 2)
    assert (same.overlap, same.divergence) == (1.0, 0.0)


def test_unchosen_expert_gives_a_finite_divergence() -> None:
    """An expert that one composer never chooses gives a finite divergence."""
    found = routing_agreement([np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])], 1)
    assert found.overlap == 0
    assert 50 < found.divergence < 100


def test_agreement_needs_two_composers_over_the_same_tokens() -> None:
    with pytest.raises(LocalProtocolError, match="found 1"):
        routing_agreement([np.ones((2, 3))], 1)
    with pytest.raises(LocalProtocolError, match="same tokens"):
        routing_agreement([np.ones((2, 3)), np.ones((3, 3))], 1)
