"""Which flags win, where the choice is kept, and that compilations go by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends import iree
from planetary.compiler.backends.flag_choice import (
    DEFAULT,
    FlagChoice,
    FlagSet,
    FlagTrial,
    candidates_for,
    choose_flags,
    finalists,
    keep_choice,
    read_choice,
    structure_digest,
)
from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target, compiler_flags
from planetary.compiler.frontend.export import export_model
from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step
from planetary.core.errors import UserError

FAST, FASTER = FlagSet("fast", ("--fast",)), FlagSet("faster", ("--faster", "--still"))
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8}
HOST = Target("cpu", "baseline", "x86_64")


@pytest.mark.parametrize(
    ("trials", "chosen", "why"),
    [
        ([FlagTrial(DEFAULT, 100.0), FlagTrial(FAST, 90.0), FlagTrial(FASTER, 80.0)], FASTER, "20.0% faster"),
        ([FlagTrial(DEFAULT, 100.0), FlagTrial(FAST, 98.0)], DEFAULT, "only 2.0% faster"),
        ([FlagTrial(DEFAULT, 100.0), FlagTrial(FAST, 101.0)], DEFAULT, "no candidate is faster"),
        ([FlagTrial(DEFAULT, 100.0), FlagTrial(FAST, failure="crashed")], DEFAULT, "no candidate is faster"),
        ([FlagTrial(DEFAULT, failure="crashed"), FlagTrial(FAST, 90.0)], FAST, "the default flags fail (crashed)"),
        ([FlagTrial(DEFAULT, failure="crashed"), FlagTrial(FAST, failure="too")], DEFAULT, "no candidate works"),
    ],
)
def test_the_fastest_that_works_is_chosen_if_it_gains_enough(
    trials: list[FlagTrial], chosen: FlagSet, why: str
) -> None:
    choice = choose_flags(trials)
    assert choice.flags == chosen
    assert why in choice.why
    assert choice.trials == tuple(trials)


def test_finalists_are_the_default_and_the_fastest_other() -> None:
    assert finalists([FlagTrial(DEFAULT, 100.0), FlagTrial(FAST, 90.0), FlagTrial(FASTER, 80.0)]) == [DEFAULT, FASTER]
    assert finalists([FlagTrial(DEFAULT, 70.0), FlagTrial(FAST, 90.0), FlagTrial(FASTER, failure="x")]) == [
        DEFAULT,
        FAST,
    ]
    assert finalists([FlagTrial(DEFAULT, failure="x"), FlagTrial(FAST, 90.0)]) == [FAST]
    assert finalists([FlagTrial(DEFAULT, failure="x")]) == []


def test_without_the_default_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(UserError, match="needs a trial of the default"):
        choose_flags([FlagTrial(FAST, 1.0)])


def test_a_backend_without_candidates_is_named() -> None:
    assert candidates_for("cpu")[0] == DEFAULT
    with pytest.raises(UserError, match="no flags to try for backend 'cuda'; known candidates: cpu"):
        candidates_for("cuda")


def tiny_step(batch_size: int = 2, **options: float) -> TrainStep:
    model = export_model("planetary.models.nanochat:build", TINY | {"batch_size": batch_size})
    return build_train_step(model, StepOptions(**options))  # pyright: ignore[reportArgumentType]


def test_compilations_use_the_choice_whatever_the_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[list[str]] = []

    def record(text: str, flags: list[str]) -> bytes:
        used.append(flags)
        return f"module {len(used)}".encode()

    monkeypatch.setattr(iree, "run_compiler", record)
    store = BlobStore(tmp_path)
    slow, quick = tiny_step(beta1=0.8), tiny_step(beta1=0.9)
    assert slow.spec.stablehlo_digest != quick.spec.stablehlo_digest
    assert structure_digest(slow.portable) == structure_digest(quick.portable)
    before = compile_artifact(quick, HOST, store)
    choice = FlagChoice(FASTER, "measured", ())
    keep_choice(store, iree.choice_key(slow, HOST), choice)
    assert read_choice(store, iree.choice_key(quick, HOST)) == choice
    after = compile_artifact(quick, HOST, store)
    assert used == [compiler_flags(HOST), [*compiler_flags(HOST), *FASTER.flags]]
    assert (before.data, after.data) == (b"module 1", b"module 2")
    assert "--faster" in after.key
    assert compile_artifact(quick, HOST, store).cached
    # Another batch is another graph, and another target another choice; flags that are given stand above a choice.
    assert structure_digest(tiny_step(batch_size=4).portable) != structure_digest(slow.portable)
    compile_artifact(slow, Target("cpu", "x86-64-v3", "x86_64"), store)
    assert used[-1] == compiler_flags(Target("cpu", "x86-64-v3", "x86_64"))
    assert compile_artifact(quick, HOST, store, further_flags=()).data == b"module 1"
