"""Mixtures of transformers as the start of composers, and their folders at the end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import planetary
from planetary.core.config import Config, config_from_tables
from planetary.core.errors import UserError
from planetary.data.reader import batches, read_slice
from planetary.data.tokenizer import ByteTokenizer
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_trained
from planetary.runs.mixture.checks import check_mixture
from planetary.runs.mixture.plan import model_of
from planetary.runs.mixture.preparation import PreparedMixture, prepare_mixture
from planetary.runs.mixture.results.inference import MixtureLosses, mixture_losses
from planetary.runs.mixture.training.participant_states import Surrogates
from planetary.runs.mixture.training.saved import SavedTraining

needs_transformers = pytest.mark.doors("torch", "transformers")

HIDDEN = 24
SIZES = {
    **{"hidden_size": 16, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "num_experts_per_tok": 2},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "sliding_window": 9}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, "num_experts": 4, "moe_intermediate_size": HIDDEN, "head_dim": 6}),
}


def published(folder: Path, kind: str) -> Any:
    """Write a folder with a random model of transformers, and tokens that it says; return that model."""
    import torch
    import transformers

    name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, eos_token_id=None, bos_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 * (1.5 if "experts" in name else 1.0))
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    theirs.generate(torch.arange(64)[:, None], do_sample=True, max_length=32, top_k=0).numpy().astype("<u2").tofile(
        folder / "tokens.u16"
    )
    return theirs


def config_of(folder: Path, **moe: Any) -> Config:
    return config_from_tables(tables(folder, **moe))


def tables(folder: Path, **moe: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(folder)},
        "data": {"source": str(folder / "tokens.u16")},
        "train": {"batch_size": 2, "sequence_length": 16, "rounds": 1, "inner_steps": 4},
        "optimizer": {"warmup_steps": 0, "learning_rate": 0.01},
        "fabric": {"workers": 2},
        "eval": {"batches": 2},
        "moe": {"composers": 2, "refresh_every": 2, **moe},
    }


def begun(prepared: PreparedMixture) -> SavedTraining:
    plan = prepared.plan
    return SavedTraining(plan.model, plan.training, plan.owner_map, prepared.initial())


def losses_of(theirs: Any, prepared: PreparedMixture, saved: SavedTraining) -> tuple[float, MixtureLosses]:
    """Return the loss that transformers has on some of the run's tokens, and those of the composers."""
    import torch

    some = [next(batches(read_slice(prepared.plan.order.locate(i)), 4, 16)) for i in range(8)]
    tokens, targets = (torch.from_numpy(np.concatenate(part)).long() for part in zip(*some, strict=True))
    with torch.no_grad():
        found = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    return float(found), mixture_losses(saved, some)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_composers_start_with_the_losses_of_transformers(tmp_path: Path, kind: str) -> None:
    """With copies they are equal; narrow surrogates lose less than random ones."""
    theirs = published(tmp_path, kind)
    prepared = prepare_mixture(config_of(tmp_path, rank=HIDDEN), tmp_path / "cache", lambda _: None)
    expected, whole = losses_of(theirs, prepared, begun(prepared))
    assert [*whole.mixed, *whole.alone] == pytest.approx([expected] * 4, rel=1e-5)
    assert (whole.real, whole.surrogates) == pytest.approx((expected, expected), rel=1e-5)
    narrow = msgspec.structs.replace(prepared.plan.training, rank=8)
    prepared = dataclasses.replace(prepared, plan=msgspec.structs.replace(prepared.plan, training=narrow))
    saved = begun(prepared)
    bank, rng = saved.state.surrogates, np.random.default_rng(0)
    assert bank is not None

    def drawn(matrix: np.ndarray) -> np.ndarray:
        return (rng.standard_normal(matrix.shape) * matrix.std()).astype(np.float32)

    def with_bank(other: Surrogates) -> SavedTraining:
        return msgspec.structs.replace(saved, state=msgspec.structs.replace(saved.state, surrogates=other))

    random = msgspec.structs.replace(bank, a=tuple(map(drawn, bank.a)), b=tuple(map(drawn, bank.b)))
    _, fitted = losses_of(theirs, prepared, saved)
    _, worse = losses_of(theirs, prepared, with_bank(random))
    assert fitted.real == pytest.approx(expected, rel=1e-5)
    assert all(expected < mine < other for mine, other in zip(fitted.mixed, worse.mixed, strict=True))


@pytest.mark.slow
@needs_transformers
def test_a_pretrained_mixture_is_trained_and_goes_back(tmp_path: Path) -> None:
    """A whole run of two composers from a folder, and the folder it exports: equal scores in transformers."""
    import torch
    import transformers

    published(tmp_path / "theirs", "qwen3_moe")
    planetary.train(tables(tmp_path / "theirs", rank=8), run_dir=tmp_path / "run")
    own, tokens = load_trained(tmp_path / "run"), np.arange(24, dtype=np.int32).reshape(2, 12)
    export_pretrained(tmp_path / "run", tmp_path / "ours")
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("theirs", "ours"))
    with torch.no_grad():
        scores, old = (model(torch.from_numpy(tokens).long()).logits.numpy() for model in (after, before))
    assert type(after) is type(before)
    np.testing.assert_allclose(np.asarray(own.logits(own.params, tokens)), scores, rtol=1e-4, atol=2e-5)
    assert np.abs(scores - old).max() > 1e-2
    for name, value in after.named_parameters():
        assert (value != before.get_parameter(name)).any(), name


def test_folders_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())

    def given(kind: str, **changed: Any) -> dict[str, Any]:
        found = {**KINDS["mixtral"][1], "model_type": kind, "tie_word_embeddings": False, "hidden_act": "silu"}
        (tmp_path / "config.json").write_text(json.dumps({**found, **changed}))
        return tables(tmp_path)

    check_mixture(config_from_tables(given("mixtral")))
    dense = config_from_tables(given("qwen3", num_local_experts=None, sliding_window=None))
    with pytest.raises(UserError, match=r"experts can be divided; found .*llama:build., the model of "):
        model_of(dense)
    five = {**tables(tmp_path, composers=5), "fabric": {"workers": 5}}
    given("mixtral")
    with pytest.raises(UserError, match="but the model has 4 experts per layer"):
        check_mixture(config_from_tables(five))
    slots = given("mixtral")
    slots["model"]["options"] = {"capacity": 1.5}
    with pytest.raises(UserError, match="capacity"):
        model_of(config_from_tables(slots))
    with pytest.raises(UserError, match="router_jitter_noise"):
        config_from_tables(given("mixtral", router_jitter_noise=0.1))
    with pytest.raises(UserError, match="mlp_only_layers"):
        config_from_tables(given("qwen3_moe", num_experts=4, moe_intermediate_size=HIDDEN, mlp_only_layers=[0]))
