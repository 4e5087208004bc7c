"""Checkpoints of given parameters, for tests that need a run's folder and no training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.core.tensors import TensorSpec


def checkpoint_of(params: Mapping[str, np.ndarray], round_: int = 1, model: str = "") -> Checkpoint:
    info = CheckpointInfo(
        round=round_,
        config_hash="",
        model=model,
        model_digest="",
        param_specs=tuple(TensorSpec(name, "f32", value.shape) for name, value in params.items()),
        data_key="",
        controller=msgspec.Raw(b"{}"),
        random_state={},
    )
    return Checkpoint(info, params, params)


def save_parameters(folder: Path, params: Mapping[str, np.ndarray], round_: int = 1, keep: int = 1) -> None:
    """Write a checkpoint of a round into a run's folder."""
    write_checkpoint(folder / "checkpoints", checkpoint_of(params, round_), keep=keep)
