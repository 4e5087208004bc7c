"""A tiny composer, ready to run: its program, a way to run it, tensors for all its arguments; and tiny trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from lockstep_trainer import MoeTrainer, StepReport, composer_runner, expert_runner
from msgspec.structs import replace

from planetary.compiler.check.interpreter import run_interpreter
from planetary.core.configuration.step_options import StepOptions
from planetary.core.schedules import Schedule
from planetary.core.tensors import TensorSpec
from planetary.models.initial import draw
from planetary.models.latent_moe import PRESETS, LatentMoeConfig, parameters
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.surrogate import FitOptions
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.program.signature import ComposerShape
from planetary.runs.mixture.training.participant_states import TrainingState, assembled
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runtime.device_program import DeviceProgram, Program

# Three experts on two composers: one of these has an empty slot. All tests share this model's programs.
TINY = LatentMoeConfig(**{**PRESETS["tiny"], "n_expert": 3})
OPTIONS = StepOptions()
SCHEDULE = Schedule(peak=0.01, total_steps=20)


class Later(Executor):
    """Runs its work on demand, one item after the other."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.work.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self, most: int = 10**9) -> None:
        """Do so many of the things that wait, and of those that are added meanwhile."""
        while self.work and most > 0:
            self.work.pop(0)()
            most -= 1


class Interpreted(DeviceProgram):
    """Runs a program with StableHLO's reference interpreter, whose arithmetic no compiler reorders."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, "the StableHLO interpreter")

    def put(self, spec: TensorSpec, array: np.ndarray) -> Any:
        return array

    def get(self, spec: TensorSpec, handle: Any, into: np.ndarray | None = None) -> np.ndarray:
        return handle

    def invoke(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        kinds = [result.dtype for result in self.signature(function).results]
        return list(run_interpreter(self.program.portable, function, list(arguments), kinds))


def worker() -> DeviceProgram:
    """An expert worker of two experts, for the sketches of `TINY`."""
    return expert_runner(TINY, 2, TINY.batch_size * TINY.sequence_length, OPTIONS, False)


@dataclass
class Built:
    config: LatentMoeConfig
    run: DeviceProgram
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
    run = composer_runner(config, ComposerShape(slots, rank, config.batch_size, detach), OPTIONS, False)
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


# --- training in lock step ----------------------------------------------------------------------------------

TOGETHER = Cadence(router=1, latent=1, backbone=1, refresh=1)
BASE = MoeTraining(
    composers=2,
    batch_size=4,
    rank=3,
    precision="f32",
    fit=FitOptions(steps=2, rows=32, capacity=64),
    dense=OPTIONS,
    experts=OPTIONS,
    dense_schedule=SCHEDULE,
    expert_schedule=SCHEDULE,
)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, TINY.vocab_size, (4, TINY.sequence_length)).astype(np.int32)
    return tokens, np.roll(tokens, -1, axis=1)


def train(
    steps: int, config: LatentMoeConfig = TINY, **options: Any
) -> tuple[MoeTrainer, list[TrainingState], list[StepReport]]:
    """A trainer, the states before the first and after each step, and the steps' reports."""
    trainer = MoeTrainer(config, replace(BASE, **options), optimise=False)
    states, reports = [trainer.initial()], []
    for step in range(steps):
        state, report = trainer.step(states[-1], *batch(step))
        states.append(state)
        reports.append(report)
    return trainer, states, reports


def model_of(state: TrainingState) -> dict[str, np.ndarray]:
    dense, layers = assembled(state, TINY)
    return {**dense, **{f"{i}.{n}": v for i, layer in enumerate(layers) for n, v in layer.items()}}
