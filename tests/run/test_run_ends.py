"""What is told when a run ends: what ended it comes first, with the way to go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from planetary.core.errors import NumericsError, PlanetaryError, ResourceError
from planetary.fleet.protocol.events import Finish
from planetary.run import results
from planetary.run.results import results_after
from saved_parameters import save_parameters

FULL = "cannot append to events.jsonl: No space left on device"


def begun(folder: Path) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_text('{"event": "run_started"}\n')
    return folder


def checkpoint(folder: Path, round_: int) -> None:
    save_parameters(folder, {"w": np.zeros(2, np.float32)}, round_, keep=3)


def ended_by(error: BaseException, folder: Path) -> BaseException:
    async def fails() -> Finish:
        raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(results_after(fails(), folder))
    return caught.value


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise ResourceError(f"cannot write {folder}/loss.png: No space left on device")

    monkeypatch.setattr(results, "write_results", refuse)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("error", [ResourceError(FULL), NumericsError("a loss is NaN"), KeyError("internal")])
def test_run_error_outranks_an_unwritable_picture(tmp_path: Path, error: BaseException) -> None:
    """What ended a run is told and not that its picture could not be written."""
    folder = begun(tmp_path / "run")
    assert str(ended_by(error, folder)).startswith(str(error))


@pytest.mark.usefixtures("full_disk")
def test_a_finished_run_whose_picture_cannot_be_written_says_so(tmp_path: Path) -> None:
    async def finishes() -> Finish:
        return Finish(ok=True, reason="all rounds are done", kind="done")

    with pytest.raises(PlanetaryError, match=r"loss\.png: No space left"):
        asyncio.run(results_after(finishes(), begun(tmp_path / "run")))


def test_a_full_disk_names_the_newest_checkpoint_and_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "write_results", lambda folder: None)
    folder = begun(tmp_path / "run")
    assert str(ended_by(ResourceError(FULL), folder)) == (
        f"{FULL}. No round has a checkpoint yet. Mend that, then run: planetary train --resume {folder}"
    )
    for round_ in (3, 7):
        checkpoint(folder, round_)
    assert "The newest checkpoint is of round 7. Mend that" in str(ended_by(ResourceError(FULL), folder))
    absent = tmp_path / "not-begun"
    assert str(ended_by(ResourceError(FULL), absent)) == FULL, "there is nothing to go on with"
