"""The models that come with the package, by name. Importing this file imports no JAX."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import msgspec

from planetary.core.errors import UserError


class ZooModel(msgspec.Struct, frozen=True):
    """One model of the zoo.

    Attributes:
        source: the value for `model.source` and `planetary export`.
        batch: the contents of a batch: tokens and next tokens (`planetary train` feeds these), or images and labels.
    """

    source: str
    batch: Literal["tokens", "images"]

    @property
    def presets(self) -> dict[str, dict[str, Any]]:
        """Options by preset name: `"tiny"` for tests, `"default"`, and published sizes where there are some."""
        return importlib.import_module(self.source.partition(":")[0]).PRESETS

    def options(self, preset: str = "default") -> dict[str, Any]:
        """Return a copy of a preset's options, or raise `UserError` naming the presets there are."""
        presets = self.presets
        if preset not in presets:
            raise UserError(f"{self.source} has no preset {preset!r}; it has: {', '.join(presets)}")
        return dict(presets[preset])


ZOO: dict[str, ZooModel] = {
    "gpt2": ZooModel("planetary.models.gpt2:build", "tokens"),
    "nanochat": ZooModel("planetary.models.nanochat:build", "tokens"),
    "llama": ZooModel("planetary.models.llama:build", "tokens"),
    "moe": ZooModel("planetary.models.moe:build", "tokens"),
    "latent_moe": ZooModel("planetary.models.latent_moe:build", "tokens"),
    "mamba2": ZooModel("planetary.models.mamba2:build", "tokens"),
    "vit": ZooModel("planetary.models.vit:build", "images"),
    "convnet": ZooModel("planetary.models.convnet:build", "images"),
}
