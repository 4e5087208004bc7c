"""A mixture whose functions are a few lines of NumPy: schedules of hundreds of simulated runs take seconds.

Every parameter is drawn towards a goal of the batch, so losses fall; experts and surrogates travel, are fitted, merged
and judged by production code. Each step's batch has a number, which the composer's optimizer adds up in the state: a
saved shard tells which tokens it was trained on.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from known_program import KnownProgram
from planetary.artifacts.store import BlobStore
from planetary.core.configuration.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FabricConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    TrainConfig,
)
from planetary.core.step import GRADIENT, RATE, FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import batches, read_slice
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.plan import MODEL, MixturePlan
from planetary.runs.mixture.preparation import PreparedMixture, ProgramRecord, plan_of
from planetary.runs.mixture.program.signature import in_layer
from planetary.runtime.device_program import DeviceProgram

BATCH, LENGTH = 1, 4
MODEL_OPTIONS = {
    "n_layer": 1,
    "n_head": 1,
    "n_kv_head": 1,
    "n_embd": 4,
    "n_expert": 3,
    "n_active": 2,
    "n_latent": 4,
    "n_hidden": 6,
    "vocab_size": 251,
}
SOURCE_TOKENS = 6000
LEDGER = TensorSpec("ledger", "i32", ())
"""State of a composer's optimizer: the sum of the numbers of all batches seen by the parameters."""


def batch_number(tokens: np.ndarray) -> int:
    """Return the number of a batch, below 2¹⁶."""
    return int(np.dot(tokens.astype(np.int64).ravel(), 1 + np.arange(tokens.size)) * 40_503 % 65_521)


def ledger_of(plan: MixturePlan, shard: int, steps: int) -> int:
    """Return the ledger of a shard trained on the tokens of each of the first `steps` steps once."""
    batch, length = plan.model.batch_size, plan.model.sequence_length
    cut = (next(batches(read_slice(plan.tokens_of(shard, step)), batch, length)) for step in range(steps))
    return sum(batch_number(tokens) for tokens, _ in cut)


def small_functions(plan: MixturePlan) -> dict[str, FunctionSpec]:
    """Return the signatures of `runs.mixture.program.programs`, with an optimizer that has one number as its state."""
    from planetary.models.initial import flat_names
    from planetary.models.latent_moe import dense_parameters, expert_parameters  # bring JAX

    model, slots, rank = plan.model, plan.slots, plan.training.rank
    rows, layers = plan.tokens_per_step, range(plan.model.n_layer)
    trains_experts = plan.training.expert_optimizer.in_step

    def specs(tree: object, layer: int | None = None) -> tuple[TensorSpec, ...]:
        found = flat_names(tree).items()  # type: ignore[arg-type]
        return tuple(
            TensorSpec(name if layer is None else in_layer(layer, "experts", name), "f32", leaf.shape)
            for name, leaf in found
        )

    def gradients_of(params: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(GRADIENT + spec.name, "f32", spec.shape) for spec in params)

    def held(slots: int, rank: int) -> tuple[TensorSpec, ...]:
        found = []
        for i in layers:
            found.append(TensorSpec(in_layer(i, "surrogates", "ownership"), "f32", (model.n_expert, slots)))
            if rank:
                found.append(TensorSpec(in_layer(i, "surrogates", "a"), "f32", (model.n_expert, model.n_latent, rank)))
                found.append(TensorSpec(in_layer(i, "surrogates", "b"), "f32", (model.n_expert, rank, model.n_latent)))
        return tuple(found)

    def update(params: tuple[TensorSpec, ...]) -> FunctionSpec:
        norm = TensorSpec("gradient_norm", "f32", ())
        return FunctionSpec((*params, LEDGER, RATE, *gradients_of(params)), (*params, LEDGER, norm))

    dense, experts = specs(dense_parameters(model)), specs(expert_parameters(model, slots))
    owned = tuple(spec for i in layers for spec in specs(expert_parameters(model, slots), i))
    every = tuple(spec for i in layers for spec in specs(expert_parameters(model, model.n_expert), i))
    data = tuple(TensorSpec(name, "i32", (model.batch_size, model.sequence_length)) for name in ("tokens", "targets"))
    losses = tuple(TensorSpec(name, "f32", ()) for name in ("loss", "cross_entropy"))
    widths = {"u": model.n_latent, "gates": model.n_expert}
    seen = [
        TensorSpec(in_layer(i, "seen", name), "f32", (rows, width)) for i in layers for name, width in widths.items()
    ]
    seen += [TensorSpec(in_layer(i, "seen", "g_y"), "f32", (rows, model.n_latent)) for i in layers]
    routing = tuple(TensorSpec(in_layer(i, "router", "probabilities"), "f32", (rows, model.n_expert)) for i in layers)
    trained = (*dense, *owned) if trains_experts else dense
    rows_in = tuple(
        TensorSpec(name, "f32", (rows, width))
        for name, width in (("u", model.n_latent), ("g_y", model.n_latent), ("gates", slots))
    )
    return {
        "composer_gradients": FunctionSpec(
            (*dense, *owned, *held(slots, rank), *data), (*losses, *gradients_of(trained), *seen)
        ),
        "composer_evaluate": FunctionSpec((*dense, *owned, *held(slots, rank), *data), (losses[1], *routing)),
        "composer_update": update(dense),
        "expert_gradients": FunctionSpec((*experts, *rows_in), gradients_of(experts)),
        "expert_proxy": FunctionSpec((*experts, *rows_in), (TensorSpec("proxy", "f32", (slots,)),)),
        "expert_update": update(experts),
        "whole_evaluate": FunctionSpec((*dense, *every, *held(model.n_expert, 0), *data), (losses[1], *routing)),
    }


class SmallProgram(KnownProgram):
    """The functions of a mixture in NumPy."""

    def __init__(self, model: LatentMoeConfig, functions: dict[str, FunctionSpec]) -> None:
        super().__init__(b"a small known program", functions)
        self._model = model

    def results(self, function: str, given: dict[str, np.ndarray]) -> Mapping[str, Any]:
        spec = self.signature(function)
        match function.partition("_")[2]:
            case "gradients" if "tokens" in given:
                return self._gradients(spec, given)
            case "gradients":
                return _expert_gradients(spec, given)
            case "proxy":
                return {"proxy": _proxy(given)}
            case "update":
                return _update(given)
            case _:
                return self._evaluated(spec, given)

    def _gradients(self, spec: FunctionSpec, given: dict[str, np.ndarray]) -> dict[str, Any]:
        number = batch_number(given["tokens"])
        found: dict[str, Any] = {}
        square, count = 0.0, 0
        for result in spec.results:
            if result.name.startswith(GRADIENT):
                gradient = given[result.name.removeprefix(GRADIENT)] - _goal(number)
                square, count = square + float(np.square(gradient, dtype=np.float64).sum()), count + gradient.size
                found[result.name] = gradient.astype(np.float32)
        # The optimizer's count; see `_update`.
        found[GRADIENT + "embedding.weight"][0, 0] = number
        found["loss"] = found["cross_entropy"] = np.float32(1 + square / count)
        for result in spec.results:
            if ".seen." in result.name:
                found[result.name] = self._seen(result, number)
        return found

    def _seen(self, result: TensorSpec, number: int) -> np.ndarray:
        rows = np.arange(result.shape[0])[:, None]
        columns = np.arange(result.shape[1])[None, :]
        if not result.name.endswith("gates"):
            return np.sin((1 + rows + 3 * columns) * (1 + number % 97), dtype=np.float32)
        chosen = (rows + number + columns) % self._model.n_expert < self._model.n_active
        return chosen.astype(np.float32) / self._model.n_active

    def _evaluated(self, spec: FunctionSpec, given: dict[str, np.ndarray]) -> dict[str, Any]:
        dense = [v for n, v in given.items() if v.dtype == np.float32 and ".surrogates." not in n]
        errors = np.concatenate([(value - GOAL).ravel() for value in dense])
        number, found = batch_number(given["tokens"]), {}
        for result in spec.results[1:]:
            rows, experts = result.shape
            scores = 1.0 + (np.arange(rows)[:, None] + number + np.arange(experts)[None, :]) % experts
            found[result.name] = scores / scores.sum(axis=1, keepdims=True)
        return {"cross_entropy": np.float32(1 + np.square(errors, dtype=np.float64).mean()), **found}


GOAL = np.float32(0.5)


def _goal(number: int) -> np.float32:
    return np.float32(GOAL + 0.1 * np.sin(number % 997))


def _usage(given: dict[str, np.ndarray]) -> np.ndarray:
    """Return how much each slot was chosen, f32 [slots]."""
    return given["gates"].mean(axis=0)


def _expert_gradients(spec: FunctionSpec, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    usage = _usage(given)[:, None, None]
    names = [result.name.removeprefix(GRADIENT) for result in spec.results]
    return {GRADIENT + name: usage * (given[name] - GOAL) for name in names}


def _proxy(given: dict[str, np.ndarray]) -> np.ndarray:
    square = sum(np.square(given[name] - GOAL).mean(axis=(1, 2)) for name in ("up", "down"))
    return _usage(given) * square


def _update(given: dict[str, np.ndarray]) -> dict[str, Any]:
    rate, ledger = given[RATE.name], int(given[LEDGER.name])
    found: dict[str, Any] = {"gradient_norm": np.float32(1)}
    for name, gradient in given.items():
        if not name.startswith(GRADIENT):
            continue
        param = name.removeprefix(GRADIENT)
        new = given[param] - rate * gradient
        if param == "embedding.weight":  # the first number is no parameter; see `SmallProgram._gradients`
            ledger += int(gradient[0, 0])
            new[0, 0] = given[param][0, 0]
        found[param] = new
    return {**found, LEDGER.name: np.int32(ledger)}


class SmallMixture:
    """A run of `SmallProgram`s; a `planetary.simulation.mixtures.mixture_cluster.MixtureTraining`."""

    cache = None

    def __init__(self, config: Config) -> None:
        data = _small_data()
        plan = plan_of(config, data)
        functions = small_functions(plan)
        self._run = SmallProgram(plan.model, functions)
        record = ProgramRecord(made_from="", environment="", sources={}, digest="", functions=functions)
        self.prepared = PreparedMixture(config, data, plan, self._run.program, record)

    def artifact(self, store: BlobStore) -> str:
        return store.put(b"a small known program")

    def open_program(self) -> DeviceProgram:
        return self._run


def small_mixture(*, rounds: int, composers: int = 2, inner_steps: int = 4, **moe: object) -> SmallMixture:
    """Return a small mixture; `moe`: other keys of `[moe]`, and `outer`, rate and momentum of the outer step."""
    return _small_mixture(rounds, composers, inner_steps, msgspec.json.encode(moe))


@functools.lru_cache(maxsize=16)
def _small_mixture(rounds: int, composers: int, inner_steps: int, moe: bytes) -> SmallMixture:
    given = {"composers": composers, "rank": 2, "backbone_every": 4, "refresh_every": 2, **msgspec.json.decode(moe)}
    rate, momentum = given.pop("outer", (1.0, 0.0))
    keys = msgspec.convert(given, MoeConfig)
    config = Config(
        run=RunConfig(name="sim"),
        model=ModelConfig(source=MODEL, options=dict(MODEL_OPTIONS)),
        data=_data_config(),
        train=TrainConfig(rounds=rounds, inner_steps=inner_steps, batch_size=BATCH, sequence_length=LENGTH),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0, learning_rate=0.05),
        outer=OuterConfig(learning_rate=rate, momentum=momentum, merge="rda"),
        fabric=FabricConfig(workers=composers + keys.expert_workers, latency_budget_s=2.0, abandon_after_s=120.0),
        checkpoint=CheckpointConfig(every=2),
        eval=EvalConfig(every=1, batches=2),
    )
    return SmallMixture(config.having(keys))


@functools.lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="planetary-small-mixture-")


def _data_config() -> DataConfig:
    path = Path(_folder().name) / "tokens.u16"
    if not path.exists():
        path.write_bytes((np.arange(SOURCE_TOKENS, dtype=np.uint32) * 40_503 % 251).astype("<u2").tobytes())
    return DataConfig(source=str(path))


@functools.lru_cache(maxsize=1)
def _small_data() -> PreparedData:
    train = TrainConfig(batch_size=BATCH, sequence_length=LENGTH)
    return prepare(Config(data=_data_config(), train=train), Path(_folder().name) / "data")
