"""Ternary experts in two bits: an export computes the bits of the trained model, and damage is refused."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep_trainer import MoeTrainer
from moe_support import BASE, TINY
from msgspec.structs import replace

from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.artifacts.ternary_matrices import TernaryMatrices, pack_ternary, read_weights, unpack_ternary
from planetary.cli.main import main
from planetary.core.config import load_config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import LocalProtocolError, TrustError, UserError
from planetary.core.tensors import DTYPE_NAMES, Tensors, TensorSpec
from planetary.models.latent_experts import straight_through_ternary
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.models.layers import cross_entropy
from planetary.run.model.served import load_trained
from planetary.runs.mixture.preparation import model_values
from planetary.runs.mixture.training.participant_states import ternary
from planetary.runs.mixture.training.saved import SavedTraining, write_training

WEIGHTS, UP = "merged.safetensors", "layers.0.experts.up"
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, TINY.vocab_size, (2, TINY.sequence_length)), jnp.int32)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 4, 4), (64, 32)])
def test_packing_keeps_every_bit_and_takes_two_a_weight(shape: tuple[int, ...]) -> None:
    values = ternary(normal(*shape))
    packed = pack_ternary(values)
    assert (unpack_ternary(packed) == values).all()
    matrices, size = int(np.prod(shape[:-2])), shape[-2] * shape[-1]
    assert packed.nbytes == matrices * (-(-size // 4) + 4)  # four weights a byte, and a scale a matrix
    zeros = np.zeros((2, 2), np.float32)
    assert (unpack_ternary(pack_ternary(zeros)) == zeros).all()


def test_only_ternary_weights_are_packed() -> None:
    values = ternary(normal(3, 7, 5))
    values[1, 2, 3] *= 1.5
    with pytest.raises(LocalProtocolError, match="not ternary"):
        pack_ternary(values)
    with pytest.raises(LocalProtocolError, match="not ternary"):
        pack_ternary(np.full((2, 2), np.nan, np.float32))
    with pytest.raises(LocalProtocolError, match="float32 matrices"):
        pack_ternary(np.zeros(4, np.float32))


@pytest.mark.slow
def test_computed_experts_are_ternary_with_master_gradients() -> None:
    weights = normal(4, 24, 40)
    found = np.asarray(jax.jit(straight_through_ternary)(weights))
    for matrix in found:
        assert len(np.unique(np.abs(matrix))) == 2  # 0 and γ
    np.testing.assert_allclose(found, ternary(weights), rtol=1e-6)
    gradient = jax.grad(lambda w: jnp.sum(straight_through_ternary(w) * weights))(weights)
    np.testing.assert_array_equal(gradient, weights)


# --- exported models ----------------------------------------------------------------------------------------------


def saved_training(folder: Path, config: LatentMoeConfig) -> Path:
    """A training that has not begun, saved; its export is the drawn model."""
    trainer = MoeTrainer(config, BASE, optimise=False)
    write_training(folder, SavedTraining(config, BASE, trainer.owners, trainer.initial()))
    return folder


@pytest.fixture(scope="module", params=["relu2", "swiglu"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of one model with float masters, and packed."""
    folder = tmp_path_factory.mktemp("exported")
    config = replace(TINY, ternary=True, activation=request.param, vocab_size=256)
    training = saved_training(folder / "step", config)
    assert main(["moe", "export", str(training), "-o", str(folder / "float")]) == 0
    assert main(["moe", "export", str(training), "-o", str(folder / "packed"), "--packed"]) == 0
    return folder / "float", folder / "packed"


def loss(folder: Path) -> tuple[np.ndarray, float]:
    model = load_trained(folder, folder / WEIGHTS)
    logits = jax.jit(model.logits)(model.params, TOKENS)
    return np.asarray(logits), float(cross_entropy(logits, TOKENS))


@pytest.mark.slow
def test_packed_model_equals_the_float_one_bit_for_bit(exported: tuple[Path, Path]) -> None:
    (expected, wanted), (found, got) = (loss(folder) for folder in exported)
    np.testing.assert_array_equal(found, expected)
    assert got == wanted


@pytest.mark.slow
def test_a_packed_model_generates_the_same_text(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for folder in exported:
        command = ["generate", str(folder), "--checkpoint", str(folder / WEIGHTS), "--prompt", "def ", "--tokens", "4"]
        assert main(command) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    for folder in exported:  # dense parameters and surrogates are the same
        model = load_trained(folder, folder / WEIGHTS, "surrogates")
        said.append(np.asarray(model.logits(model.params, TOKENS)))
    np.testing.assert_array_equal(said[2], said[3])


def test_the_file_has_two_bits_a_weight_and_a_scale_a_matrix(exported: tuple[Path, Path]) -> None:
    sizes = []
    for folder in exported:
        _, tensors = read_safetensors(folder / WEIGHTS)
        experts = {name: value for name, value in tensors.items() if ".experts." in name}
        sizes.append(sum(value.nbytes for name, value in experts.items() if not name.endswith(".shape")))
        others = {name: value for name, value in tensors.items() if name not in experts}
        assert all(value.dtype == np.float32 for value in others.values())
    matrices = sizes[0] // (4 * TINY.n_latent * TINY.n_hidden)
    assert sizes[1] == matrices * (TINY.n_latent * TINY.n_hidden // 4 + 4)


@pytest.mark.slow
def test_packed_weights_are_not_made_ternary_again(exported: tuple[Path, Path]) -> None:
    """A run starts from packed weights without making them ternary again."""
    plain, packed = (load_config(folder / "config.toml") for folder in exported)
    assert plain.model.options["ternary"] is True
    assert packed.model.options["ternary"] is False
    values = model_values(packed)
    computed = np.asarray(jax.jit(straight_through_ternary)(model_values(plain)[UP]))
    np.testing.assert_array_equal(values[UP], computed)
    again = replace(packed, model=replace(packed.model, options={**packed.model.options, "ternary": True}))
    with pytest.raises(UserError, match="is ternary already"):
        model_values(again)


def test_generating_refuses_to_make_packed_weights_ternary_again(exported: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(load_config(exported[0] / "config.toml")))
    with pytest.raises(UserError, match=r"model\.options\.ternary = false"):
        load_trained(tmp_path, exported[1] / WEIGHTS)


def test_other_experts_are_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = saved_training(tmp_path / "step", TINY)
    assert main(["moe", "export", str(training), "-o", str(tmp_path / "out"), "--packed"]) == 2
    assert "they are not ternary" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out" / WEIGHTS).exists()


# --- damaged files ------------------------------------------------------------------------------------------------


def write(path: Path, tensors: Tensors) -> Path:
    specs = [TensorSpec(name, DTYPE_NAMES[value.dtype], value.shape) for name, value in tensors.items()]
    path.write_bytes(b"".join(bytes(piece) for piece in safetensors_pieces(specs, tensors)))
    return path


GOOD = pack_ternary(ternary(normal(2, 4, 6)))
WHOLE = {
    "w.ternary.codes": GOOD.codes,
    "w.ternary.scale": GOOD.scale,
    "w.ternary.shape": np.array([2, 4, 6], np.int64),
}


def test_a_packed_file_reads_back(tmp_path: Path) -> None:
    path = write(tmp_path / "good.safetensors", {**WHOLE, "other": np.ones(3, np.float32)})
    specs, tensors, names = read_weights(path)
    assert names == ("w",)
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [("other", "f32", (3,)), ("w", "f32", (2, 4, 6))]
    np.testing.assert_array_equal(tensors["w"], unpack_ternary(GOOD))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"w.ternary.codes": GOOD.codes | 3}, "code 3"),
        ({"w.ternary.codes": GOOD.codes[:, :-1]}, r"need more than 10 bytes"),
        ({"w.ternary.codes": np.zeros((2, 9), np.uint8)}, r"need codes \[2, 6\] and a scale a matrix, found \[2, 9\]"),
        ({"w.ternary.codes": GOOD.codes.astype(np.int32)}, r"is i32: ternary weights have"),
        ({"w.ternary.scale": GOOD.scale[:1]}, r"scales \[1\]"),
        ({"w.ternary.scale": np.array([1, np.nan], np.float32)}, "negative or not finite"),
        ({"w.ternary.scale": np.array([1, -1], np.float32)}, "negative or not finite"),
        ({"w.ternary.shape": np.array([2, 1 << 40, 1 << 40], np.int64)}, "need more than 12 bytes"),
        ({"w.ternary.shape": np.array([2, -4, -6], np.int64)}, "are no matrices"),
        ({"w.ternary.shape": np.array([24], np.int64)}, "are no matrices"),
        ({"w.ternary.shape": np.array([[2, 4, 6]], np.int64)}, "each once and nothing else"),
        ({"w": np.ones((2, 4, 6), np.float32)}, "each once and nothing else"),
        ({"w.ternary.sign": np.ones(2, np.float32)}, "w.ternary.sign"),
    ],
)
def test_damaged_ternary_weights_are_refused(tmp_path: Path, changed: Tensors, says: str) -> None:
    with pytest.raises(TrustError, match=says):
        read_weights(write(tmp_path / "bad.safetensors", {**WHOLE, **changed}))


@pytest.mark.parametrize("missing", list(WHOLE))
def test_ternary_weights_without_a_part_are_refused(tmp_path: Path, missing: str) -> None:
    kept = {name: value for name, value in WHOLE.items() if name != missing}
    with pytest.raises(TrustError, match="each once and nothing else"):
        read_weights(write(tmp_path / "bad.safetensors", kept))


def test_a_damaged_packed_model_is_refused(exported: tuple[Path, Path], tmp_path: Path) -> None:
    _, tensors = read_safetensors(exported[1] / WEIGHTS)
    path = write(tmp_path / WEIGHTS, {**tensors, f"{UP}.ternary.codes": tensors[f"{UP}.ternary.codes"] | 3})
    config = load_config(exported[1] / "config.toml")
    with pytest.raises(UserError, match=r"cannot read model\.weights: .*code 3"):
        model_values(replace(config, model=replace(config.model, weights=str(path))))
    with pytest.raises(TrustError, match=f"{UP}.*code 3"):
        load_trained(exported[1], path)


def test_shape_that_fits_codes_but_not_scales_is_refused() -> None:
    with pytest.raises(TrustError, match="need codes"):
        unpack_ternary(TernaryMatrices((1, 8, 6), GOOD.codes, GOOD.scale))
