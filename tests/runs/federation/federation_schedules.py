"""Random fault schedules of whole simulated federations, and what must be true after each; see `random_schedules`."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from simulated_federation import SimFederation, hub_config, site_config
from small_training import PARAMS, SmallTraining, small_training

from planetary.core.configuration.schema import OuterConfig
from planetary.runs.federation.config import SiteEntry
from planetary.runs.federation.records import VersionAdopted
from planetary.runs.rounds.records import DeltaAccepted, DeltaWithdrawn, RoundMerged, RoundsRecord
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.training import Training
from planetary.sync.contributions import Contribution, rebase
from planetary.sync.outer import initial_state, outer_step
from planetary.sync.outer_optimizers import OuterState, optimizer_of
from random_schedules import Schedules, forging, surviving

LIMIT_S = 3000.0
FAULTS = (
    "cut_off",
    "cut_off",
    "kill_hub",
    "kill_site",
    "power_hub",
    "power_site",
    "drop_site",
    "mute_site",
    "deafen_site",
    "kill_worker",
)


NESTEROV = (
    OuterConfig(learning_rate=0.8, momentum=0.3, loss_rise=0.0),
    OuterConfig(learning_rate=0.9, momentum=0.2, loss_rise=0.0),
)
"""The outer steps of a hub and of its sites."""


class FaultyFederation(SimFederation):
    """A federation with faults of hub, sites and the links between them.

    Attributes:
        struck: how often each kind of fault hit something.
    """

    def __init__(self, seed: int, hub: Training, sites: Mapping[str, Training], workers: Callable[[str], int]) -> None:
        """Start everything at time 0; see `SimFederation`."""
        super().__init__(seed, hub, sites, workers)
        self.struck: collections.Counter[str] = collections.Counter()

    @property
    def waits_for(self) -> list[str]:
        """The unmet conditions of hub and sites."""
        return [cluster.waits_for for cluster in (self.hub, *self.sites.values())]

    def strike(self, kind: str, name: str, seconds: float) -> None:
        """Let something go wrong now."""
        hub, site, network = self.hub, self.sites[name], self.world.network
        hit = hub.finished is None and site.finished is None
        match kind:
            case "cut_off":
                self.cut_off(name, seconds)
            case "kill_hub":
                hit = hub.kill_gateway()
            case "kill_site":
                hit = site.kill_gateway()
            case "power_hub" | "power_site":
                cluster = hub if kind == "power_hub" else site
                hit = cluster.gateway is not None and cluster.finished is None
                if hit:
                    cluster.disk.cut_power(cluster.process)
            case "drop_site":
                hit = network.drop(site.place.node) > 0
            case "mute_site":
                network.cut(site.place.node, hub.place.node, seconds)
            case "deafen_site":
                network.cut(hub.place.node, site.place.node, seconds)
            case "kill_worker":
                site.strike(Fault(at_s=0.0, kind="kill_worker", worker=0))
        self.struck[kind] += hit


def federation_of(
    seed: int,
    *,
    sites: int = 3,
    hub_rounds: int = 5,
    every_rounds: int = 2,
    outer: tuple[OuterConfig, OuterConfig] = NESTEROV,
) -> FaultyFederation:
    """Make a federation; `outer`: the outer steps of the hub and of its sites."""
    names = [f"s{number}" for number in range(sites)]
    config = small_training(rounds=hub_rounds, workers=2).config
    hub = hub_config(config, tuple(map(SiteEntry, names)), rounds=hub_rounds, every_rounds=every_rounds)
    hub = msgspec.structs.replace(hub, outer=outer[0])
    most = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, rounds=60))
    workers = {name: 1 + number % 2 for number, name in enumerate(names)}
    trainings = {
        name: SmallTraining(site_config(most, name, workers=workers[name], outer=outer[1], patience_s=6.0))
        for name in names
    }
    return FaultyFederation(seed, SmallTraining(hub), trainings, workers.__getitem__)


@contextlib.contextmanager
def faulty_federation(seed: int, *, most: int = 8, **options: Any) -> Iterator[FaultyFederation]:
    """Make the federation of a seed with `most` faults at most; `options`: of `federation_of`.

    In every fourth schedule a worker of the hub, which may evaluate, forges messages in the names of the sites.
    """
    source = random.Random(seed)
    federation = federation_of(seed, **options)
    names = sorted(federation.sites)
    for _ in range(source.randint(1, most)):
        at, kind, name = source.uniform(2.0, 40.0), source.choice(FAULTS), source.choice(names)
        seconds = source.uniform(2.0, 30.0)
        federation.world.at(at, lambda k=kind, n=name, s=seconds: federation.strike(k, n, s))
    if seed % 4:
        yield federation
        return
    federation.hub.forgery = federation.sites[names[0]].forgery  # a site's messages are like its workers'
    federation.hub.add_node("forger")
    with forging(federation.hub, 0, punished=seed % 8 > 0):
        yield federation


# --- what holds -------------------------------------------------------------------------------------------------


def check_all_ended_well(federation: SimFederation) -> None:
    """The hub took all its rounds, and sent its sites home."""
    hub = federation.hub
    for cluster in (hub, *federation.sites.values()):
        assert cluster.finished is not None
        assert cluster.finished.ok, cluster.finished.reason
    assert hub.controller.state.round == hub.config.train.rounds


def check_tokens_count_once(federation: SimFederation) -> None:
    """What the hub counts is, site by site, an unbroken run of what the site trained, and no part is in two sites."""
    state = federation.hub.controller.state
    assert state.tokens_total == sum(state.counted.values())
    assert merged_tokens(federation.hub.journal) == state.counted
    leases: list[int] = []
    for part, (name, site) in enumerate(federation.sites.items()):
        own = site.controller.state
        assert state.counted.get(name, 0) <= own.tokens_total
        assert own.tokens_total == own.ledger.trained * site.config.targets_per_slice
        records = [r for r in history_of(site.journal) if isinstance(r, DeltaAccepted)]
        leases += [r.lease * len(federation.sites) + part for r in records]
    assert max(collections.Counter(leases).values()) == 1


def merged_tokens(hub_journal: Sequence[RoundsRecord]) -> dict[str, int]:
    """Return how many tokens of each site the hub merged, and assert that they are unbroken runs from the first on."""
    history = history_of(hub_journal)
    withdrawn = {r.task for r in history if isinstance(r, DeltaWithdrawn)}
    reached: dict[str, int] = {}
    for record in history:
        if isinstance(record, DeltaAccepted) and record.task not in withdrawn:
            assert record.through - record.tokens == reached.get(record.worker, 0)
            reached[record.worker] = record.through
    return reached


def check_the_journals_give_all_parameters(federation: SimFederation) -> None:
    """Every version of the hub, and what every site ended with, bit for bit, from the journals alone."""
    replayed = Replayed(federation)
    for cluster, state in (
        (federation.hub, replayed.hub(federation.hub.controller.state.round)),
        *((site, replayed.after(name)) for name, site in federation.sites.items()),
    ):
        np.testing.assert_array_equal(cluster.parameters.state.params["w"], state.params["w"])


class Replayed:
    """A federation computed again from its journals."""

    def __init__(self, federation: SimFederation) -> None:
        self._federation = federation
        self._history = {name: history_of(site.journal) for name, site in federation.sites.items()}
        self._hub_history = history_of(federation.hub.journal)
        self._versions: dict[int, OuterState] = {}
        self._ends: dict[tuple[str, int], OuterState] = {}
        self._starts: dict[tuple[str, int], OuterState] = {}
        self._tokens = {
            name: {0: 0} | {r.round: r.tokens_total for r in history if isinstance(r, RoundMerged)}
            for name, history in self._history.items()
        }

    def hub(self, version: int) -> OuterState:
        """The hub's state after a round."""
        if version not in self._versions:
            self._versions[version] = self._hub(version)
        return self._versions[version]

    def after(self, name: str) -> OuterState:
        """A site's state at the end."""
        return self.start(name, max(self._tokens[name]))

    def _hub(self, version: int) -> OuterState:
        training = self._federation.hub.training
        if version == 0:
            return initial_state(PARAMS, training.prepared.params, optimizer_of(self._federation.hub.config.outer))
        parts = [
            Contribution(r.task, r.tokens, self.end(r.worker, self._round_of(r.worker, r.through)).params)
            for r in accepted(self._hub_history, version)
        ]
        outer = self._federation.hub.config.outer
        return outer_step(PARAMS, self.hub(version - 1), parts, optimizer_of(outer)).state

    def end(self, name: str, round_: int) -> OuterState:
        """A site's state after a round, before it meets the hub."""
        if (name, round_) not in self._ends:
            self._ends[name, round_] = self._end(name, round_)
        return self._ends[name, round_]

    def _end(self, name: str, round_: int) -> OuterState:
        site = self._federation.sites[name]
        training = site.training
        assert isinstance(training, SmallTraining)
        if round_ == 0:
            return initial_state(PARAMS, training.prepared.params, optimizer_of(training.config.outer))
        start, names = self.start(name, round_ - 1), list(self._federation.sites)
        parts = [
            Contribution(r.task, r.tokens, training.trained(start.params, r.lease * len(names) + names.index(name)))
            for r in accepted(self._history[name], round_)
        ]
        outer = site.config.outer
        return outer_step(PARAMS, start, parts, optimizer_of(outer)).state

    def start(self, name: str, round_: int) -> OuterState:
        """A site's state from which the round after this one was trained."""
        if (name, round_) not in self._starts:
            self._starts[name, round_] = self._start(name, round_)
        return self._starts[name, round_]

    def _start(self, name: str, round_: int) -> OuterState:
        state, before = self.end(name, round_), self._adopted(name, round_ - 1)
        for adopted in (r for r in self._history[name] if isinstance(r, VersionAdopted) and r.round == round_):
            if before is not None and adopted.version == before.version:
                before = adopted  # said again by a gateway that was started again
                continue
            version = self.hub(adopted.version).params
            params = version
            if adopted.carried:
                counted = self._tokens[name][round_] - adopted.carried
                assert before is not None
                if counted == self._tokens[name][before.round] - before.carried:
                    base = self.hub(before.version).params
                else:
                    base = self.end(name, self._round_of(name, counted)).params
                params = rebase(version, base, state.params)
            state, before = msgspec.structs.replace(state, params=dict(params)), adopted
        return state

    def _adopted(self, name: str, until: int) -> VersionAdopted | None:
        found = [r for r in self._history[name] if isinstance(r, VersionAdopted) and r.round <= until]
        return found[-1] if found else None

    def _round_of(self, name: str, tokens: int) -> int:
        return next(round_ for round_, total in self._tokens[name].items() if total == tokens)


def accepted(history: Sequence[RoundsRecord], round_: int) -> list[DeltaAccepted]:
    withdrawn = {r.task for r in history if isinstance(r, DeltaWithdrawn)}
    return [r for r in history if isinstance(r, DeltaAccepted) and r.round == round_ and r.task not in withdrawn]


def history_of(journal: Iterable[RoundsRecord]) -> list[RoundsRecord]:
    """The journal without what was voided by resumes; what a site adopted outlasts them with its file."""
    return surviving(journal, outlasts=lambda record, mark: isinstance(record, VersionAdopted) and record.round == mark)


SCHEDULES = Schedules(
    kind="federation",
    build=faulty_federation,
    faults=frozenset(FAULTS),
    invariants=(check_all_ended_well, check_tokens_count_once, check_the_journals_give_all_parameters),
    limit_s=LIMIT_S,
    journals=lambda federation: {"hub": federation.hub.journal, **{n: s.journal for n, s in federation.sites.items()}},
    options={
        "--sites": {"type": int, "default": 3},
        "--hub-rounds": {"type": int, "default": 5},
        "--every-rounds": {"type": int, "default": 2},
        "--most": {"type": int, "default": 8},
    },
)
