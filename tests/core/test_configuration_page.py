"""The reference page of the configuration is the schema's, and every key has a meaning."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from planetary.core.configuration.keys import FIELDS, SECTIONS
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError

MAKE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_configuration.py"))


def test_the_page_is_current() -> None:
    assert MAKE["PAGE"].read_text() == MAKE["page"](), "run `python docs/make_configuration.py`"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_meaning(section: str) -> None:
    said = MAKE["meanings"](SECTIONS[section])
    assert set(FIELDS[section]) <= set(said)
    assert [key for key in FIELDS[section] if len(said[key]) < 4] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta1": 1.0}, "beta1: expected a finite number >= 0 and < 1, found 1.0"),
        ({"epsilon": 0.0}, "epsilon: expected a finite number > 0"),
        ({"clip_norm": float("nan")}, "clip_norm: expected a finite number >= 0"),
        ({"micro_batches": 0}, "micro_batches: expected a whole number >= 1"),
        ({"optimizer": "adam"}, "optimizer: unknown inner optimizer 'adam'; did you mean adamw?"),
    ],
)
def test_options_made_in_python_are_checked_as_a_file_is(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        StepOptions(**options)  # type: ignore[arg-type]
    assert words in str(caught.value)
