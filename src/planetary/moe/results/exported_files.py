"""What the files of an exported mixture are called, for whoever names them without loading a model."""

from __future__ import annotations

WEIGHTS, SURROGATES = "merged.safetensors", "surrogates.safetensors"
