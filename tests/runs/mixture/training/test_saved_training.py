"""A training on the disk, and the ordinary model that comes out of it."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest
from lockstep_trainer import MoeTrainer
from moe_support import BASE, TINY, TOGETHER, batch, train
from msgspec.structs import replace

from planetary.artifacts.durable_files import Bytes, DurableFiles
from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.cli.main import main
from planetary.compiler.frontend.export import export_model
from planetary.compiler.frontend.weights import with_weights
from planetary.core.config import load_config
from planetary.core.configuration.schema import DataConfig
from planetary.core.errors import NumericsError, ResourceError, TrustError, UserError
from planetary.models import latent_moe
from planetary.models.initial import flat_names
from planetary.run.model.served import load_trained
from planetary.runs.mixture.results.merged_export import export_merged
from planetary.runs.mixture.training.participant_states import merged_model
from planetary.runs.mixture.training.saved import SavedTraining, read_training, write_training
from planetary.runs.rounds.preparation.options import builder_options

OFFLOAD = {"cadence": TOGETHER, "sketches": "all", "precision": "4bit", "update_form": "topk"}


@pytest.fixture(scope="module")
def trained() -> tuple[MoeTrainer, SavedTraining]:
    """Two steps with every kind of state: moments, rows, residuals, surrogates, velocities."""
    trainer, states, _ = train(2, **OFFLOAD)
    return trainer, SavedTraining(TINY, trainer.training, trainer.owners, states[-1])


def arrays_of(value: object) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    msgspec.json.encode(value, enc_hook=lambda array: found.append(np.array(array)))
    return found


def test_a_training_that_was_saved_goes_on_with_the_same_bits(
    trained: tuple[MoeTrainer, SavedTraining], tmp_path: Path
) -> None:
    trainer, saved = trained
    write_training(tmp_path / "step", saved)
    found = read_training(tmp_path / "step")
    assert (found.config, found.training) == (saved.config, saved.training)
    again = MoeTrainer(found.config, found.training, found.owners, optimise=False)
    expected = trainer.step(saved.state, *batch(2))[0]
    after = again.step(found.state, *batch(2))[0]
    pairs = list(zip(arrays_of(expected), arrays_of(after), strict=True))
    assert len(pairs) > 50
    assert all(a.dtype == b.dtype and (a == b).all() for a, b in pairs)
    assert after.steps == 3
    shared = (tmp_path / "step" / "state.safetensors").stat().st_size
    assert shared < 0.8 * sum(array.nbytes for array in arrays_of(saved))  # what composers share is there once


def test_a_damaged_or_missing_training_is_refused_by_name(
    trained: tuple[MoeTrainer, SavedTraining], tmp_path: Path
) -> None:
    folder = tmp_path / "step"
    with pytest.raises(UserError, match="holds no saved training"):
        read_training(folder)
    write_training(folder, trained[1])
    with pytest.raises(UserError, match="it exists"):
        write_training(folder, trained[1])
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, what in (("state.safetensors", "state.safetensors has sha256"), ("training.json", "another sha256")):
        cut = contents[name][:-1] + bytes([contents[name][-1] ^ 1])
        (folder / name).write_bytes(cut)
        with pytest.raises(TrustError, match=what):
            read_training(folder)
        (folder / name).write_bytes(contents[name])
    (folder / "state.safetensors").unlink()
    with pytest.raises(TrustError, match=r"state\.safetensors is missing"):
        read_training(folder)


def test_a_full_disk_leaves_nothing(trained: tuple[MoeTrainer, SavedTraining], tmp_path: Path) -> None:
    class Full(DurableFiles):
        def append(self, file: IO[bytes], chunk: Bytes) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match="No space left"):
        write_training(tmp_path / "step", trained[1], Full())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_exported_model_is_the_ordinary_one_and_generates(
    trained: tuple[MoeTrainer, SavedTraining], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, saved = trained
    write_training(tmp_path / "step", saved)
    merged = tmp_path / "merged"
    export = ["moe", "export", str(tmp_path / "step"), "-o", str(merged)]
    assert main(export) == 0
    assert "of 2 composers after 2 steps" in capsys.readouterr().out
    assert main(export) == 2
    assert "already holds a model" in " ".join(capsys.readouterr().err.split())
    assert main([*export, "--force"]) == 0
    expected = merged_model(saved.state, TINY)
    config = load_config(merged / "config.toml")
    options = builder_options(config, config.model.source)
    every = msgspec.to_builtins(replace(TINY, batch_size=BASE.batch_size))
    assert options == {name: value for name, value in every.items() if value is not None}
    model = export_model(config.model.source, options, roles={})
    given = with_weights(model, *read_safetensors(Path(config.model.weights)), where=config.model.weights)
    found = given.initial("param")
    assert found.keys() == expected.keys() == flat_names(latent_moe.build(**options)[1]).keys()
    assert all((found[name] == value).all() for name, value in expected.items())
    loaded = load_trained(merged, merged / "merged.safetensors")
    assert all((np.asarray(v) == expected[n]).all() for n, v in flat_names(loaded.params).items())
    capsys.readouterr()
    command = ["generate", str(merged), "--checkpoint", str(merged / "merged.safetensors"), "--tokens", "3"]
    assert main([*command, "--prompt", "\t\n"]) == 0  # characters of this model's small vocabulary
    assert capsys.readouterr().out.startswith("\t\n")


def test_partial_or_infinite_weights_are_refused(
    trained: tuple[MoeTrainer, SavedTraining], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, saved = trained
    export_merged(saved, tmp_path, data=DataConfig())
    specs, tensors = read_safetensors(tmp_path / "merged.safetensors")
    pieces = safetensors_pieces(specs[1:], tensors)
    (tmp_path / "part.safetensors").write_bytes(b"".join(bytes(piece) for piece in pieces))
    command = ["generate", str(tmp_path), "--checkpoint", str(tmp_path / "part.safetensors"), "--prompt", "x"]
    assert main(command) == 2
    assert f"the weights lack '{specs[0].name}'" in " ".join(capsys.readouterr().err.split())
    composer = saved.state.composers[0]
    broken = {name: np.full_like(value, np.nan) for name, value in composer.dense.items()}
    composers = (replace(composer, dense=broken), saved.state.composers[1])
    before = (tmp_path / "merged.safetensors").read_bytes()
    with pytest.raises(NumericsError, match="step 2"):
        export_merged(replace(saved, state=replace(saved.state, composers=composers)), tmp_path, data=DataConfig())
    assert (tmp_path / "merged.safetensors").read_bytes() == before


def test_surrogates_alone_can_be_evaluated(trained: tuple[MoeTrainer, SavedTraining]) -> None:
    trainer, saved = trained
    tokens, targets = batch(100)
    halves = [(tokens[:2], targets[:2]), (tokens[2:], targets[2:])]
    alone = trainer.evaluate_surrogates(saved.state, halves)
    assert 0 < abs(alone - trainer.evaluate(saved.state, halves)) < 0.1
