"""Ownership by load: the counts, their tokens, and the map in a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from planetary.core.configuration.schema import Config, DataConfig, ModelConfig, TrainConfig
from planetary.core.errors import UserError
from planetary.data.prepare import prepare
from planetary.data.reader import read_slice
from planetary.models.initial import filled
from planetary.models.latent_moe import PRESETS, LatentMoeConfig, expert_loads, parameters
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.methods.ownership import load_aware, round_robin
from planetary.runs.mixture.preparation import plan_of
from planetary.runs.mixture.training import initial as initial_training
from planetary.runs.mixture.training.initial import drawn_model, owners_by_load

MODEL = LatentMoeConfig(**{**PRESETS["tiny"], "n_expert": 6, "n_layer": 2})
TOKENS = np.random.default_rng(1).integers(0, MODEL.vocab_size, (2, MODEL.sequence_length)).astype(np.int32)


def skewed(model: dict[str, np.ndarray], scores: list[float]) -> dict[str, np.ndarray]:
    """The model with routers that choose by a fixed order of the experts: by these scores, whatever the token."""
    made = dict(model)
    for layer in range(MODEL.n_layer):
        # The first feature is the same for all tokens, because RMSNorm scales what the others are: make it large.
        made[f"layers.{layer}.router.weight"] = np.outer(scores, np.eye(MODEL.n_embd)[0]).astype(np.float32)
    made["embedding.weight"] = made["embedding.weight"].copy()
    made["embedding.weight"][:, 0] = 10.0
    return made


@pytest.mark.slow
def test_a_load_is_the_number_of_tokens_that_choose_an_expert() -> None:
    model = skewed(drawn_model(MODEL), [0, 1, 2, 3, 4, 5])
    loads = np.asarray(expert_loads(filled(parameters(MODEL), model), TOKENS, MODEL))
    assert loads.tolist() == [[0, 0, 0, 0, TOKENS.size, TOKENS.size]] * MODEL.n_layer


@pytest.mark.slow
def test_every_token_chooses_as_many_experts_as_are_active() -> None:
    loads = np.asarray(expert_loads(filled(parameters(MODEL), drawn_model(MODEL)), TOKENS, MODEL))
    assert (loads.sum(axis=1) == TOKENS.size * MODEL.n_active).all()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    source = tmp_path / "tokens.u16"
    np.random.default_rng(7).integers(0, MODEL.vocab_size, 9 * 900).astype("<u2").tofile(source)
    options = {name: getattr(MODEL, name) for name in PRESETS["tiny"] if name not in ("batch_size", "sequence_length")}
    base = Config()
    return replace(
        base,
        model=ModelConfig("planetary.models.latent_moe:build", options),
        data=DataConfig(source=str(source)),
        train=TrainConfig(rounds=2, inner_steps=4, batch_size=2, sequence_length=MODEL.sequence_length),
        fabric=replace(base.fabric, workers=3),
        optimizer=replace(base.optimizer, warmup_steps=0),
    ).having(MoeConfig(composers=3, rank=2, ownership="load-aware"))


@pytest.mark.slow
def test_run_is_planned_with_first_loads_or_its_journals(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is planned with the loads of its first tokens unless its journal knows better."""
    monkeypatch.setattr(initial_training, "LOAD_TOKENS", 300)
    data = prepare(config, tmp_path / "cache")
    plan = plan_of(config, data)
    loads = np.zeros((MODEL.n_layer, MODEL.n_expert))
    params = filled(parameters(MODEL), drawn_model(MODEL))
    for step in range(6):  # of 6 sequences of 8 tokens and the one after them
        for shard in range(3):
            tokens = read_slice(plan.tokens_of(shard, step)).reshape(2, -1)[:, :-1]
            loads += np.asarray(expert_loads(params, tokens.astype(np.int32), MODEL))
    assert (plan.owner_map == load_aware(loads, 3)).all()
    assert (plan.owner_map != round_robin(MODEL.n_layer, MODEL.n_expert, 3)).any()
    earlier = ((0, 0, 1, 1, 2, 2), (2, 2, 1, 1, 0, 0))
    assert plan_of(config, data, earlier).owners == earlier


def test_parameters_of_another_model_are_refused(config: Config, tmp_path: Path) -> None:
    order = plan_of(config, prepare(config, tmp_path / "cache"), ((0,) * 6,) * 2).order
    other = replace(MODEL, n_embd=32)
    with pytest.raises(UserError, match=r"embedding\.weight with the shape \[32, 32\], found \[32, 16\]"):
        owners_by_load(drawn_model(MODEL), other, order, 3)
