"""The optimizer's state on a worker's disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planetary.core.errors import ResourceError
from planetary.core.tensors import TensorSpec
from planetary.runs.rounds.worker.inner_state import InnerStates

SPECS = (TensorSpec("m.a/b", "f32", (3, 2)), TensorSpec("count", "i32", ()))


def state(value: float) -> dict[str, np.ndarray]:
    return {"m.a/b": np.full((3, 2), value, np.float32), "count": np.array(int(value), np.int32)}


def test_the_newest_state_from_before_a_round_is_taken(tmp_path: Path) -> None:
    states = InnerStates(tmp_path / "w", SPECS)
    assert states.load(5) is None
    for round_ in (1, 2, 3):
        states.save(round_, state(round_))
    assert states.rounds() == [3, 2]  # the two newest are kept
    found = states.load(3)  # round 3 is to be trained again
    assert found is not None
    assert found[0] == 2
    np.testing.assert_array_equal(found[1]["m.a/b"], state(2)["m.a/b"])
    assert found[1]["count"] == 2
    assert states.load(2) is None


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:200] + b"\xff" + b[201:], lambda _: b""])
def test_a_damaged_file_is_reported_removed_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    states = InnerStates(tmp_path, SPECS)
    states.save(1, state(1))
    states.save(2, state(2))
    path = tmp_path / "after-round-2.npz"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    found = states.load(9)
    assert found is not None
    assert found[0] == 1
    assert "unusable" in caplog.text
    assert not path.exists()


def test_a_state_of_another_model_is_not_used(tmp_path: Path) -> None:
    InnerStates(tmp_path, SPECS).save(1, state(1))
    other = (TensorSpec("m.a/b", "f32", (2, 3)), SPECS[1])
    assert InnerStates(tmp_path, other).load(9) is None


def test_an_unwritable_folder_is_an_error_that_says_what_follows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="fresh moments"):
        InnerStates(tmp_path / "file" / "w", SPECS).save(1, state(1))
