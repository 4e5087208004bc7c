"""A tiny composer, ready to run: its program, a way to run it, and tensors for all its arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from planetary.compiler.step_options import StepOptions
from planetary.models.initial import draw
from planetary.models.latent_moe import PRESETS, LatentMoeConfig, parameters
from planetary.moe import ownership
from planetary.moe.execution import XlaRunner
from planetary.moe.programs import ComposerShape, Program, composer_program

TINY = LatentMoeConfig(**PRESETS["tiny"])


@functools.cache
def runner(config: LatentMoeConfig, shape: ComposerShape) -> XlaRunner:
    return XlaRunner(composer_program(config, shape, StepOptions()), optimise=False)


@dataclass
class Built:
    config: LatentMoeConfig
    run: XlaRunner
    slots: np.ndarray
    everything: dict[str, Any]  # the whole model, with parameters of which none is zero
    tensors: dict[str, np.ndarray]

    @property
    def program(self) -> Program:
        return self.run.program

    def give_ownership(self, slots: np.ndarray) -> None:
        """Own these experts, i32 [layers, slots]."""
        self.slots = slots
        matrix = ownership.slot_matrix(slots, self.config.n_expert)
        for i, layer in enumerate(self.everything["layers"]):
            self.tensors[f"layers.{i}.surrogates.ownership"] = matrix[i]
            for name, value in layer["experts"].items():
                self.tensors[f"layers.{i}.experts.{name}"] = ownership.take_slots(value[None], slots[i : i + 1])[0]

    def gradients(self) -> dict[str, np.ndarray]:
        return self.run("gradients", self.tensors)

    def whole_model(self) -> dict[str, Any]:
        return self.everything

    def named(self, tree: Any) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(v) for p, v in leaves}

    def trees(self) -> tuple[Any, list[Any], list[Any], list[np.ndarray]]:
        """The arguments of `composer_forward`."""
        layers = [{k: v for k, v in layer.items() if k != "experts"} for layer in self.everything["layers"]]
        params = {**self.everything, "layers": layers}
        numbers = range(self.config.n_layer)
        names = self.everything["layers"][0]["experts"]
        experts = [{k: self.tensors[f"layers.{i}.experts.{k}"] for k in names} for i in numbers]
        held = [{k: self.tensors[f"layers.{i}.surrogates.{k}"] for k in ("ownership", "a", "b")} for i in numbers]
        rows = self.config.batch_size * self.config.sequence_length
        probes = [np.zeros((rows, self.config.n_latent), np.float32) for _ in numbers]
        return params, experts, held, probes

    def worker_inputs(self, layer: int, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        gates = seen[f"layers.{layer}.seen.gates"] @ self.tensors[f"layers.{layer}.surrogates.ownership"]
        return {
            "up": self.tensors[f"layers.{layer}.experts.up"],
            "down": self.tensors[f"layers.{layer}.experts.down"],
            "u": seen[f"layers.{layer}.seen.u"],
            "g_y": seen[f"layers.{layer}.seen.g_y"],
            "gates": gates,
        }


def build(config: LatentMoeConfig, *, slots: int, rank: int, composer: int = 0, detach: bool = True) -> Built:
    """A composer of as many as the slots ask for, with random surrogates and a random batch."""
    run = runner(config, ComposerShape(slots, rank, config.batch_size, detach))
    rng = np.random.default_rng(1)
    drawn = draw(parameters(config), 0)
    whole = jax.tree.map(lambda p: p + 0.1 * rng.standard_normal(p.shape).astype(np.float32), drawn)
    tensors: dict[str, np.ndarray] = {}
    built = Built(config, run, np.zeros(0), whole, tensors)
    layers = [{k: v for k, v in layer.items() if k != "experts"} for layer in whole["layers"]]
    tensors |= built.named({**whole, "layers": layers})
    for spec in run.program.functions["gradients"].arguments:
        if spec.dtype == "i32":
            draws = np.random.default_rng(len(spec.name))  # the same batch whatever else is drawn
            tensors[spec.name] = draws.integers(0, config.vocab_size, spec.shape).astype(np.int32)
        elif spec.name.endswith((".a", ".b")):
            tensors[spec.name] = rng.standard_normal(spec.shape).astype(np.float32)
    composers = -(-config.n_expert // slots)
    owners = ownership.round_robin(config.n_layer, config.n_expert, composers)
    built.give_ownership(ownership.owned_slots(owners, composer, slots))
    return built
