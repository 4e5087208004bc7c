"""Names of the files of an exported mixture, for users that load no model."""

from __future__ import annotations

WEIGHTS, SURROGATES = "merged.safetensors", "surrogates.safetensors"
