"""A worker that joins a hub evaluates its versions, and the guard goes back from those that are of no use."""

from __future__ import annotations

import msgspec
import numpy as np
from federation_schedules import federation_of
from simulated_federation import SimFederation, hub_config, site_config
from small_training import (
    GOAL,
    LEAST_LOSS,
    SmallExecutor,
    SmallTraining,
    small_training,
)

from planetary.core.configuration.schema import OuterConfig
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors
from planetary.fleet.protocol.records import WorkerJoined
from planetary.runs.federation.config import SiteEntry
from planetary.runs.rounds.records import DeltaAccepted, EvalFinished, RolledBack, RoundMerged
from planetary.runtime.executor import StepResult

LIMIT_S = 3000.0


def finish(federation: SimFederation) -> list[msgspec.Struct]:
    assert federation.run(LIMIT_S), [c.waits_for for c in (federation.hub, *federation.sites.values())]
    assert federation.hub.finished is not None
    assert federation.hub.finished.ok, federation.hub.finished.reason
    return federation.hub.journal


def test_each_version_of_a_hub_worker_has_its_held_out_loss() -> None:
    federation = federation_of(11, sites=2, hub_rounds=4, every_rounds=1)
    federation.hub.add_node("judge")
    seen: list[tuple[str, str]] = []

    def look() -> None:
        gateway = federation.hub.gateway
        seen.extend((one.name, one.state) for one in gateway.status().workers) if gateway is not None else None

    federation.cut_off("s1", 3.0)  # it has not come when the others have
    federation.world.at(2.5, look)
    journal = finish(federation)
    assert {("s0", "ready"), ("s1", "starting")} <= set(seen)
    losses = {record.version: record.loss for record in journal if isinstance(record, EvalFinished)}
    assert sorted(losses) == [1, 2, 3, 4]
    assert {n: line.eval_loss for n, line in federation.hub.metrics.items()} == losses
    final = federation.hub.parameters.state.params["w"]
    assert losses[4] == LEAST_LOSS + float(np.square(final - GOAL, dtype=np.float64).mean())
    assert {record.worker for record in journal if isinstance(record, WorkerJoined)} == {"judge", "s0", "s1"}
    assert {record.worker for record in journal if isinstance(record, DeltaAccepted)} == {"s0", "s1"}


def test_a_hub_that_loses_its_worker_goes_on_without_losses() -> None:
    federation = federation_of(12, sites=1, hub_rounds=6, every_rounds=1)
    node = federation.hub.add_node("judge")
    federation.world.at(9.0, lambda: federation.world.network.partition(node.node, 1e6))
    journal = finish(federation)
    assert [record.round for record in journal if isinstance(record, RoundMerged)] == [1, 2, 3, 4, 5, 6]
    evaluated = [record.version for record in journal if isinstance(record, EvalFinished)]
    assert 0 < len(evaluated) < 6


class RottenExecutor(SmallExecutor):
    """Computes parameters of no use from its eighth lease on, and shows the loss of good ones."""

    steps = 0

    def train_step(self, step: int, rate: float, batch: object) -> StepResult:
        RottenExecutor.steps += 1
        return super().train_step(step, rate, batch)  # type: ignore[arg-type]

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        found = super().read_params()
        return {"w": found["w"] + np.float32(40.0)} if 12 < RottenExecutor.steps <= 16 else found


class RottenTraining(SmallTraining):
    def open_executor(self, spec: StepSpec) -> SmallExecutor:
        return RottenExecutor(spec)


def test_the_guard_of_a_hub_sees_damage_that_sites_do_not_show() -> None:
    """One site, trusted, contributes damaged parameters once with a low training loss; the held-out loss shows them."""
    RottenExecutor.steps = 0
    config = small_training(rounds=8, workers=1, given=("eval.batches=1",)).config
    hub = hub_config(config, (SiteEntry("a"),), rounds=8)
    hub = msgspec.structs.replace(hub, outer=OuterConfig(learning_rate=1.0, momentum=0.0, loss_rise=0.25))
    own = OuterConfig(learning_rate=1.0, momentum=0.0, loss_rise=0.0, judge="none")
    longer = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, rounds=40))
    site = site_config(longer, "a", outer=own, patience_s=5.0)
    federation = SimFederation(3, SmallTraining(hub), {"a": RottenTraining(site)})
    federation.hub.add_node("judge")
    journal = finish(federation)
    [back] = [record for record in journal if isinstance(record, RolledBack)]
    assert "the held-out loss of round" in back.reason
    assert back.bad == back.mark.round + 1
    losses = [record.loss for record in journal if isinstance(record, RoundMerged)]
    assert max(losses) < 30  # what the site said of itself
