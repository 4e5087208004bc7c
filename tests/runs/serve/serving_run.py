"""A run folder without a training: random parameters, so that texts are noise and no two seeds agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from planetary.compiler.frontend.export import find_builder
from planetary.core.config import config_from_tables
from planetary.core.configuration.toml import to_toml
from planetary.models.initial import flat_names
from saved_parameters import save_parameters

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256}
WINDOW = 256


def write_run(
    folder: Path,
    round_: int,
    seed: int,
    *,
    source: str = "planetary.models.nanochat:build",
    options: dict[str, Any] = SMALL,
    data: dict[str, Any] | None = None,
) -> None:
    """Write the folder's configuration, and one more checkpoint."""
    folder.mkdir(exist_ok=True)
    tables = {
        "run": {"name": folder.name},
        "model": {"source": source, "options": options},
        "train": {"sequence_length": WINDOW, "batch_size": 1},
        "data": data or {},
    }
    (folder / "config.toml").write_text(to_toml(config_from_tables(tables)))
    rng = np.random.default_rng(seed)
    _, params, _ = find_builder(source)(**({"sequence_length": WINDOW, **options} if options else {}))
    values = {name: rng.normal(0, 0.2, leaf.shape).astype(np.float32) for name, leaf in flat_names(params).items()}
    save_parameters(folder, values, round_, keep=5)
