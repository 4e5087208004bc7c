"""A trained mixture that runs with its real experts, with surrogates, or as a composer has it: from a run's folder, a
saved training, an exported model.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from lockstep_trainer import MoeTrainer
from mixture_stage import MixtureStage
from moe_support import BASE, TINY, train
from msgspec.structs import replace

from planetary.artifacts.payload_store import PayloadStore
from planetary.cli.main import main
from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.schema import Config, DataConfig, ModelConfig, TrainConfig
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import TrustError, UserError
from planetary.data.prepare import prepare
from planetary.fleet.gateway.run_files import PAYLOADS
from planetary.models.context import WholeText
from planetary.run.model.served import load_served, load_trained
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.gateway.gateway import KEPT_KINDS
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.preparation import plan_of
from planetary.runs.mixture.results.inference import (
    ExpertSelection,
    MixtureLosses,
    Reported,
    RunEvaluation,
    evaluate_run,
    experts_named,
    losses_table,
    model_with,
)
from planetary.runs.mixture.results.run_state import read_mixture, read_run
from planetary.runs.mixture.start import owners_of_run
from planetary.runs.mixture.training.saved import SavedTraining, write_training
from planetary.runs.serve.program.traced_model import TracedModel

STEPS, PER_ROUND = 8, 4
# Nothing is merged or refreshed after the last step: composers judge what they save, with the newest surrogates.
CADENCE = Cadence(router=3, latent=3, backbone=6, refresh=3)
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, TINY.vocab_size, (1, TINY.sequence_length)), jnp.int32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run in lock step; `cache` beside it has its data."""
    folder = tmp_path_factory.mktemp("runs") / "mixture"
    folder.mkdir()
    source = folder.parent / "tokens.u16"
    np.random.default_rng(7).integers(0, TINY.vocab_size, 9 * 900).astype("<u2").tofile(source)
    batch = BASE.batch_size // BASE.composers
    elsewhere = {"batch_size", "sequence_length", "seed"}
    every = msgspec.to_builtins(TINY).items()
    options = {name: value for name, value in every if name not in elsewhere and value is not None}
    base = Config()
    config = replace(
        base,
        model=ModelConfig("planetary.models.latent_moe:build", options),
        data=DataConfig(source=str(source)),
        train=TrainConfig(
            rounds=STEPS // PER_ROUND,
            inner_steps=PER_ROUND,
            batch_size=batch,
            sequence_length=TINY.sequence_length,
        ),
        fabric=replace(base.fabric, workers=BASE.composers),
        eval=replace(base.eval, batches=3),
        optimizer=replace(base.optimizer, warmup_steps=0),
    ).having(MoeConfig(composers=BASE.composers, rank=BASE.rank, pace="lockstep"))
    (folder / "config.toml").write_text(to_toml(config))
    plan = plan_of(config, prepare(config, folder.parent / "cache" / "data"))
    cluster = MixtureStage(folder, replace(plan, training=replace(BASE, cadence=CADENCE)))
    for name in "ab":
        cluster.start(name)
    assert cluster.finish().ok
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).write_bytes((cluster.run_folder / name).read_bytes())
    store = PayloadStore(folder / PAYLOADS, dict.fromkeys(KEPT_KINDS, 60.0))
    for payload in cluster.store.payloads():
        store.put(payload.name.partition("/")[0], cluster.store.get(payload.name))
    return folder


@pytest.fixture(scope="module")
def saved(run: Path) -> SavedTraining:
    return read_run(run, load_config(run / "config.toml"))


def logits(saved: SavedTraining, experts: ExpertSelection) -> np.ndarray:
    model = model_with(saved, experts)
    whole = jax.jit(lambda params, tokens: model.decode(params, tokens, WholeText(tokens)))
    return np.asarray(whole(model.params, TOKENS))  # compiled, as in `scores`: equal bits


def scores(model: TracedModel) -> np.ndarray:
    return np.asarray(jax.jit(model.logits)(model.params, TOKENS))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_losses_per_choice_of_experts_are_the_reported_ones(run: Path) -> None:
    """Losses with every choice of experts are those that the run reported."""
    found = evaluate_run(run, run.parent / "cache")
    assert (found.steps, found.round, found.tokens) == (STEPS, 2, (3, 2, TINY.sequence_length))
    assert found.losses.real == pytest.approx(found.reported.real, rel=1e-6)
    assert found.losses.mixed == pytest.approx(found.reported.mixed, rel=1e-6)
    assert found.losses.alone == pytest.approx(found.reported.alone, rel=1e-6)
    different = {round(loss, 6) for loss in (found.losses.real, *found.losses.mixed, *found.losses.alone)}
    assert len(different) == 5
    head, _, *rows = losses_table(found)
    assert head.startswith("mixture after round 2, step 8: held-out loss in nats per token, 3 batches of 2 × 8 tokens")
    assert [row.split()[0] for row in rows] == ["real", "surrogates", "composer:0", "composer:1"]
    assert rows[0].split()[1] == rows[0].split()[2] == f"{found.losses.real:.4f}"
    assert rows[3].split()[1:] == [*[f"{found.losses.mixed[1]:.4f}"] * 2, *[f"{found.losses.alone[1]:.4f}"] * 2]


@pytest.mark.parametrize(
    "experts", ["real", *(pytest.param(one, marks=pytest.mark.slow) for one in ("surrogates", "composer:1"))]
)
def test_every_choice_of_experts_can_be_served(run: Path, saved: SavedTraining, experts: str) -> None:
    model = model_with(saved, experts_named(experts))
    found = jax.jit(lambda params: model.decode(params, TOKENS, WholeText(TOKENS)))(model.params)
    np.testing.assert_allclose(found, logits(saved, experts_named(experts)), rtol=1e-5, atol=1e-6)
    if experts != "real":  # it is loaded, and its test data's tokens are no text
        config = config_from_tables({"serve": {"model": str(run), "experts": experts}})
        with pytest.raises(UserError, match=f"has 256 tokens, and the model knows {TINY.vocab_size}"):
            load_served(config)


def test_ownership_is_read_from_the_journal(run: Path, saved: SavedTraining) -> None:
    config = load_config(run / "config.toml")
    otherwise = config.having(replace(config.of(MoeConfig), ownership="hashed"))
    assert (ownership.hashed(TINY.n_layer, TINY.n_expert, 2) != saved.owners).any()
    assert (read_run(run, otherwise).owners == saved.owners).all()
    assert owners_of_run(run) == tuple(tuple(row) for row in saved.owners.tolist())
    assert owners_of_run(run.parent) is None


def test_table_of_an_unfinished_run_notes_missing_surrogates() -> None:
    found = RunEvaluation("mine", 7, 0, (1, 2, 8), MixtureLosses(2.5), Reported(None, (None, None), (None, None)))
    head, _, *rows = losses_table(found)
    assert head.startswith("mine after step 7: held-out loss")
    assert [row.split() for row in rows[:1]] == [["real", "2.5000", "-"]]
    assert rows[1:] == ["there are no surrogates: moe.rank is 0"]


@pytest.mark.slow
def test_run_generates_with_real_surrogate_or_composed_experts(
    run: Path, saved: SavedTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run generates with real experts with surrogates and as a composer has it."""
    loaded = {which: load_trained(run, experts=which) for which in ("surrogates", "composer:0", "composer:1")}
    found = {which: scores(model) for which, model in loaded.items()}
    for which, expected in (
        ("surrogates", ExpertSelection("surrogates")),
        ("composer:1", ExpertSelection("composer", 1)),
    ):
        np.testing.assert_array_equal(found[which], logits(saved, expected))
    assert len({float(value.sum()) for value in [*found.values(), logits(saved, ExpertSelection())]}) == 4
    assert all(model.version == 2 and model.window == TINY.sequence_length for model in loaded.values())
    assert main(["generate", str(run), "--experts", "composer:0", "--prompt", "\t\n", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("\t\n")


@pytest.mark.slow
def test_exported_run_has_surrogates_beside_the_model(
    run: Path, saved: SavedTraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = tmp_path / "merged"
    assert main(["moe", "export", str(run), "-o", str(merged)]) == 0
    assert "after 8 steps" in capsys.readouterr().out
    assert load_config(merged / "config.toml").data == load_config(run / "config.toml").data
    weights = merged / "merged.safetensors"
    for which, experts in (("real", ExpertSelection()), ("surrogates", ExpertSelection("surrogates"))):
        model = load_trained(merged, weights, which)
        np.testing.assert_array_equal(scores(model), logits(saved, experts))
    with pytest.raises(UserError, match="what a composer has is in its run's folder only"):
        load_trained(merged, weights, "composer:0")
    with pytest.raises(UserError, match="name these with --checkpoint"):
        load_trained(merged, None, "surrogates")
    assert main(["moe", "export", str(run), "-o", str(merged), "--force", "--tokenizer", "byte"]) == 2
    assert "has its own: leave it out" in said(capsys)
    wider = tmp_path / "wider.toml"
    wider.write_text((merged / "config.toml").read_text().replace("n_latent = 8", "n_latent = 16"))
    (tmp_path / "config.toml").write_text(wider.read_text())
    with pytest.raises(UserError, match=r"expected layers\.0\.latent\.down with the shape \[16, 16\], found \[16, 8\]"):
        load_trained(tmp_path, weights, "surrogates")


@pytest.mark.slow
def test_a_saved_training_runs_in_the_same_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, states, _ = train(3)
    saved = SavedTraining(TINY, trainer.training, trainer.owners, states[-1])
    write_training(tmp_path / "step", saved)
    for which in ("real", "surrogates", "composer:1"):
        model = load_trained(tmp_path / "step", None, which)
        np.testing.assert_array_equal(scores(model), logits(saved, experts_named(which)))
    assert main(["moe", "evaluate", str(tmp_path / "step")]) == 2
    assert "it names no held-out tokens" in said(capsys)
    with pytest.raises(UserError, match="is a single state"):
        load_trained(tmp_path / "step", tmp_path)
    words = replace(saved, config=replace(TINY, vocab_size=300))
    write_training(tmp_path / "words", words)
    with pytest.raises(UserError, match="which tokenizer its 300 tokens come from"):
        load_trained(tmp_path / "words")


@pytest.mark.slow
def test_a_composer_that_owns_every_expert_has_the_real_model() -> None:
    training = replace(BASE, replicas=2)  # of two composers
    trainer = MoeTrainer(TINY, training, optimise=False)
    saved = SavedTraining(TINY, training, trainer.owners, trainer.initial())
    assert all((composer.slots >= 0).all() for composer in saved.state.composers)
    np.testing.assert_array_equal(logits(saved, ExpertSelection("composer", 1)), logits(saved, ExpertSelection()))
    assert np.abs(logits(saved, ExpertSelection("surrogates")) - logits(saved, ExpertSelection())).max() > 1e-4


def test_models_that_cannot_run_are_refused_with_the_reason(
    run: Path, saved: SavedTraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(run), "--prompt", "\t", "--experts"]
    assert main([*command, "mixed"]) == 2
    assert "expected real, surrogates or composer:N" in said(capsys)
    assert main([*command, "composer:2"]) == 2
    assert "there is no composer 2: this training has the composers 0 to 1" in said(capsys)
    assert main([*command, "surrogates", "--checkpoint", str(run)]) == 2
    assert f"Leave it out and name the run {run}, whose newest state has the surrogates" in said(capsys)
    without = replace(saved, state=replace(saved.state, surrogates=None))
    for experts in (ExpertSelection("surrogates"), ExpertSelection("composer", 0)):
        with pytest.raises(UserError, match="was trained with rank 0"):
            model_with(without, experts)
    with pytest.raises(UserError, match="no run folder and no saved training"):
        read_mixture(tmp_path)
    (tmp_path / "config.toml").write_text("")
    assert main(["moe", "evaluate", str(tmp_path)]) == 2
    assert "trains the whole model (moe.composers = 0)" in said(capsys)
    config = load_config(run / "config.toml")
    with pytest.raises(UserError, match=r"expected events\.jsonl with the start of its composers"):
        read_run(tmp_path, config)


def test_lost_or_damaged_payload_is_named_with_its_composer(run: Path, tmp_path: Path) -> None:
    config = load_config(run / "config.toml")
    store = PayloadStore(tmp_path / PAYLOADS, dict.fromkeys(KEPT_KINDS, 60.0))
    whole = PayloadStore(run / PAYLOADS, {})
    (tmp_path / "events.jsonl").write_bytes((run / "events.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"saved state of composer 0 of the run .*: payload shard/.* is not in"):
        read_run(tmp_path, config)
    for payload in whole.payloads():
        store.put(payload.name.partition("/")[0], whole.get(payload.name))
    assert read_run(tmp_path, config).state.steps == STEPS
    for path in (tmp_path / PAYLOADS / "surrogate").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(TrustError, match=r"saved state of composer 0 of the run .* surrogate/.* is damaged"):
        read_run(tmp_path, config)
