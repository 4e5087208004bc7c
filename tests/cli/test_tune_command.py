"""`planetary tune`: candidates that fail are shown as failed, the winner is verified and used by later compilations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planetary.cli.main import main
from planetary.compiler.backends import flag_choice
from planetary.compiler.backends.flag_choice import DEFAULT, FlagSet, FlagTrial

MODEL = ["nanochat", "--preset", "tiny"]


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.compiles
def test_failing_candidate_is_shown_and_the_winner_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that fails is shown and the winner is compiled from then on."""
    broken = FlagSet("broken", ("--there-is-no-such-flag",))
    other = FlagSet("distribution-32", ("--iree-llvmcpu-distribution-size=32",))
    monkeypatch.setattr(flag_choice, "CANDIDATES", {"cpu": (DEFAULT, broken, other)})
    monkeypatch.setattr(flag_choice, "MIN_GAIN", -1000.0)  # whatever is fastest here

    def prefer_other(trials: list[FlagTrial]) -> flag_choice.FlagChoice:
        return chosen([t if t.flags == other or t.failure else FlagTrial(t.flags, t.least_ms + 1e6) for t in trials])

    chosen = flag_choice.choose_flags
    monkeypatch.setattr(flag_choice, "choose_flags", prefer_other)  # the machine's times are not the test's subject
    given = [*MODEL, f"--cache={tmp_path}"]
    assert main(["tune", *given, "--rounds", "1", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flags"]["name"] == "distribution-32"
    trials = {trial["flags"]["name"]: trial for trial in found["trials"]}
    assert "there-is-no-such-flag" in trials["broken"]["failure"]
    assert 0 < trials["distribution-32"]["least_ms"] < 1e6
    assert main(["compile", *given, "--json"]) == 0
    compiled = json.loads(capsys.readouterr().out)
    assert compiled["cached"]
    assert main(["artifact", "show", compiled["digest"], f"--cache={tmp_path}"]) == 0
    assert "--iree-llvmcpu-distribution-size=32" in said(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*MODEL, "--target", "cuda", "--threads", "2"], "only CPU devices have threads"),
        ([*MODEL, "--target", "cuda"], "there are no flags to try for backend 'cuda'"),
        ([*MODEL, "--target", "cpu:moon"], "unknown cpu target 'moon'"),
        ([*MODEL, "--steps", "0"], "--steps expects at least 1, found 0"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_what_cannot_be_tuned_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments, f"--cache={tmp_path}"]) == 2
    assert says in said(capsys.readouterr().err)
