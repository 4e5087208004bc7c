"""A federation that merges what one gateway would merge is that gateway, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from simulated_federation import SimFederation, hub_config, site_config
from small_training import SmallExecutor, SmallTraining, small_training

from planetary.compiler.step.step_module import TrainStep
from planetary.core.configuration.schema import Config, OuterConfig
from planetary.core.quantisers import from_bfloat16, to_bfloat16
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.federation.config import SiteEntry
from planetary.runs.federation.records import ContributionOffered, VersionAdopted
from planetary.runs.rounds.records import DeltaAccepted
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.rounds.training import StepTraining, Training

PLAIN = OuterConfig(learning_rate=1.0, momentum=0.0, loss_rise=0.0)
LIMIT_S = 2000.0


def alone(training: Training, workers: int) -> SimCluster:
    cluster = SimCluster(1, training, workers)
    assert cluster.run(LIMIT_S), cluster.waits_for
    return cluster


def finished(federation: SimFederation) -> None:
    assert federation.run(LIMIT_S), [c.waits_for for c in (federation.hub, *federation.sites.values())]
    for cluster in (federation.hub, *federation.sites.values()):
        assert cluster.finished is not None
        assert cluster.finished.ok, cluster.finished.reason


def assert_equal(one: SimCluster, other: SimCluster) -> None:
    found, expected = one.parameters.state.params, other.parameters.state.params
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def hub_over(config: Config, *names: str, rounds: int, every_rounds: int = 1, outer: OuterConfig) -> Config:
    entries = tuple(SiteEntry(name) for name in names)
    hub = hub_config(config, entries, rounds=rounds, every_rounds=every_rounds)
    return msgspec.structs.replace(hub, outer=outer)


@pytest.mark.parametrize("every_rounds", [1, 3])
def test_a_hub_over_one_site_equals_the_site_alone(every_rounds: int) -> None:
    """The hub's step is the identity (rate 1, no momentum), and the site keeps the velocity of its own."""
    config = small_training(rounds=6, workers=2).config
    reference = alone(SmallTraining(config), 2)
    hub = hub_over(config, "a", rounds=6 // every_rounds, every_rounds=every_rounds, outer=PLAIN)
    site = site_config(config, "a", workers=2, outer=config.outer)
    federation = SimFederation(2, SmallTraining(hub), {"a": SmallTraining(site)}, lambda name: 2)
    finished(federation)
    assert_equal(federation.hub, reference)
    assert_equal(federation.sites["a"], reference)
    tokens = reference.controller.state.tokens_total
    assert federation.hub.controller.state.tokens_total == tokens
    assert federation.hub.controller.state.counted == {"a": tokens}
    mine, theirs = federation.sites["a"].metrics, reference.metrics
    assert [mine[n].eval_loss for n in sorted(mine)] == [theirs[n].eval_loss for n in sorted(theirs)]


class NarrowExecutor(SmallExecutor):
    """A worker that holds its parameters in bfloat16."""

    def set_params(self, params: Tensors) -> None:
        super().set_params({"w": from_bfloat16(params["w"])})

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        return {"w": to_bfloat16(super().read_params()["w"])}


class NarrowTraining(SmallTraining):
    """The small training of a model in bfloat16."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        prepared = self.prepared
        spec = msgspec.structs.replace(prepared.step.spec, params=(TensorSpec("w", "bf16", (8,)),))
        params = {"w": to_bfloat16(prepared.params["w"])}
        self.prepared = dataclasses.replace(prepared, step=TrainStep("", spec, b""), params=params)

    def open_executor(self, spec: StepSpec) -> NarrowExecutor:
        return NarrowExecutor(spec)


def test_masters_of_a_bfloat16_model_cross_the_border_whole() -> None:
    """The low bits that gather what an outer step adds are those of the site alone, after six borders."""
    config = small_training(rounds=6, workers=2).config
    reference = alone(NarrowTraining(config), 2)
    hub = hub_over(config, "a", rounds=6, outer=PLAIN)
    site = site_config(config, "a", workers=2, outer=config.outer)
    federation = SimFederation(2, NarrowTraining(hub), {"a": NarrowTraining(site)}, lambda name: 2)
    finished(federation)
    assert_equal(federation.hub, reference)
    assert_equal(federation.sites["a"], reference)
    masters = reference.parameters.state.params["w"]
    assert (masters != from_bfloat16(to_bfloat16(masters))).any()


def test_hub_of_two_single_sites_equals_one_site_of_two() -> None:
    """The sites' steps are the identity, and the hub takes the one step with rate and momentum."""
    config = small_training(rounds=6, workers=2).config
    reference = alone(SmallTraining(config), 2)
    hub = hub_over(config, "a", "b", rounds=6, outer=config.outer)
    sites = {name: SmallTraining(site_config(config, name, outer=PLAIN)) for name in "ab"}
    federation = SimFederation(3, SmallTraining(hub), sites)
    finished(federation)
    assert_equal(federation.hub, reference)
    for site in federation.sites.values():
        assert_equal(site, reference)
    tokens = reference.controller.state.tokens_total
    assert federation.hub.controller.state.counted == {"a": tokens // 2, "b": tokens // 2}
    leases = [
        (2 * record.lease + part, record.round)
        for part, site in enumerate(federation.sites.values())
        for record in site.journal
        if isinstance(record, DeltaAccepted)
    ]
    assert sorted(leases) == sorted((r.lease, r.round) for r in reference.journal if isinstance(r, DeltaAccepted))


def test_each_border_is_in_the_journal_of_its_site() -> None:
    config = small_training(rounds=4, workers=1).config
    hub = hub_over(config, "a", rounds=2, every_rounds=2, outer=PLAIN)
    federation = SimFederation(4, SmallTraining(hub), {"a": SmallTraining(site_config(config, "a", outer=PLAIN))})
    finished(federation)
    told = [r for r in federation.sites["a"].journal if isinstance(r, VersionAdopted | ContributionOffered)]
    assert [(type(r).__name__, r.round, r.version) for r in told] == [
        ("VersionAdopted", 0, 0),
        ("ContributionOffered", 2, 0),
        ("VersionAdopted", 2, 1),
        ("ContributionOffered", 4, 1),
        ("VersionAdopted", 4, 2),
    ]
    assert [r.carried for r in told if isinstance(r, VersionAdopted)] == [0, 0, 0]


@pytest.mark.slow
def test_both_hold_with_a_real_training_step(tmp_path: Path) -> None:
    """A transformer under AdamW, whose moments stay with the workers, and XLA's own numbers."""
    from planetary.artifacts.store import BlobStore
    from planetary.run.choice import read_config
    from planetary.run.simulate import TINY
    from planetary.runs.rounds.preparation.model_shapes import with_model_shapes
    from planetary.runs.rounds.preparation.preparation import prepare_run
    from planetary.runtime.executor import open_executor

    rounds = 4
    given = [f"train.rounds={rounds}", "train.inner_steps=3", "eval.batches=2", "fabric.workers=2"]
    config = with_model_shapes(read_config(TINY, given))
    prepared = prepare_run(config, tmp_path, lambda stage: None)
    config, spec = prepared.config, prepared.step.spec
    executor = open_executor(BlobStore(tmp_path / "blobs").path(spec.stablehlo_digest), spec, backend="pjrt:cpu")
    step = StepTraining(prepared, tmp_path, executor)
    reference = alone(step, 2)

    one = hub_over(config, "a", rounds=rounds, outer=PLAIN)
    site = site_config(config, "a", workers=2, outer=config.outer)
    federation = SimFederation(5, step.under(one), {"a": step.under(site)}, lambda name: 2)
    finished(federation)
    assert_equal(federation.hub, reference)
    assert_equal(federation.sites["a"], reference)

    two = hub_over(config, "a", "b", rounds=rounds, outer=config.outer)
    sites = {name: step.under(site_config(config, name, outer=PLAIN)) for name in "ab"}
    federation = SimFederation(6, step.under(two), sites)
    finished(federation)
    assert_equal(federation.hub, reference)
    losses = [federation.hub.metrics[number].loss for number in range(1, rounds + 1)]
    assert losses == pytest.approx([reference.metrics[number].loss for number in range(1, rounds + 1)])
    assert losses[-1] < losses[0]
