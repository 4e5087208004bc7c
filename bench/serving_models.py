"""Small models of every family that can be served, for benches: run folders with random parameters, published folders
with transformers' own initial values, and a short training for a mixture's surrogates.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.compiler.frontend.export import find_builder
from planetary.core.config import config_from_tables
from planetary.core.configuration.toml import to_toml
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import CharTokenizer
from planetary.models.initial import flat_names
from planetary.run.model.pretrained_export import export_pretrained

WINDOW = 128
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 256)))
"""A character for each token, so that a text gives its tokens back."""

_ATTENTION = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "nanochat": ("planetary.models.nanochat:build", _ATTENTION),
    "gpt2": ("planetary.models.gpt2:build", _ATTENTION),
    "llama": ("planetary.models.llama:build", {**_ATTENTION, "n_kv_head": 2, "n_hidden": 160}),
    "moe": ("planetary.models.moe:build", _ATTENTION),
    "mamba2": (
        "planetary.models.mamba2:build",
        {"n_layer": 2, "n_embd": 64, "head_size": 16, "n_state": 8, "vocab_size": 256},
    ),
}
"""Name -> function and options of the models of the zoo that need no training."""


def write_run(
    folder: Path, source: str, options: dict[str, Any], *, window: int = WINDOW, scale: float = 0.2, seed: int = 1
) -> Path:
    """Write the folder of a run of one round whose parameters are random, and return it."""
    folder.mkdir(parents=True)
    tables = {
        "run": {"name": folder.name},
        "model": {"source": source, "options": options},
        "train": {"sequence_length": window, "batch_size": 1},
        "data": {"tokenizer": "char"},
    }
    (folder / "config.toml").write_text(to_toml(config_from_tables(tables)))
    CharTokenizer(CHARACTERS).save(folder)
    rng = np.random.default_rng(seed)
    _, params, _ = find_builder(source)(**options, sequence_length=window)
    values = {
        name: (scale * rng.standard_normal(np.shape(one), np.float32)) for name, one in flat_names(params).items()
    }
    specs = tuple(TensorSpec(name, "f32", value.shape) for name, value in values.items())
    info = CheckpointInfo(
        round=1,
        config_hash="",
        model=source,
        model_digest="",
        param_specs=specs,
        data_key="",
        controller=None,  # type: ignore[arg-type]
        random_state={"seed": 0},
    )
    velocity = {name: np.zeros_like(value) for name, value in values.items()}
    write_checkpoint(folder / "checkpoints", Checkpoint(info, values, velocity), keep=1)
    return folder


def train_mixture(folder: Path) -> Path:
    """Train a mixture of two composers for a moment, and return its run's folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text("".join(CHARACTERS[i] for i in rng.integers(0, 256, 40_000)))
    tables = {
        "model": {
            "source": "planetary.models.latent_moe:build",
            "options": {
                "n_layer": 2, "n_embd": 64, "n_expert": 8, "n_active": 2, "n_latent": 32, "n_hidden": 64,
                "vocab_size": 256,
            },
        },
        "data": {"source": str(folder / "text.txt"), "tokenizer": "char"},
        "train": {"rounds": 2, "inner_steps": 5, "batch_size": 2, "sequence_length": WINDOW},
        "moe": {"composers": 2, "rank": 8, "refresh_every": 2},
        "fabric": {"workers": 2},
        "checkpoint": {"every": 1},
    }  # fmt: skip
    (folder / "mixture.toml").write_text(to_toml(config_from_tables(tables)))
    command = [sys.executable, "-m", "planetary", "train", "mixture.toml", "--run-dir", "mixture"]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return folder / "mixture"


def published_folders(folder: Path) -> dict[str, Path]:
    """Return folders as they are published: of GPT-2 and Llama by our export, of Qwen by transformers where it is."""
    found = {}
    for name in ("gpt2", "llama"):
        run = write_run(folder / f"{name}-run", *FAMILIES[name])
        export_pretrained(run, folder / f"hf-{name}")
        found[f"HF {name}"] = folder / f"hf-{name}"
    if importlib.util.find_spec("transformers") is None:
        return found
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": WINDOW,
    }  # fmt: skip
    for name in ("Qwen2", "Qwen3"):
        torch.manual_seed(1)
        head = {"head_dim": 16} if name == "Qwen3" else {}
        config = getattr(transformers, f"{name}Config")(**sizes, **head, initializer_range=0.2)
        place = folder / f"hf-{name.lower()}"
        getattr(transformers, f"{name}ForCausalLM")(config).eval().save_pretrained(place)
        (place / "tokenizer.json").write_bytes(CharTokenizer(CHARACTERS).to_json())
        found[f"HF {name}"] = place
    return found
