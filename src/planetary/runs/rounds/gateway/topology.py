"""The topologies at the gateway: the contributions of workers, and the servers beside the gateway's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from planetary.core.configuration.schema import Config
from planetary.core.extension_points import MERGE_RULES, OUTER_OPTIMIZERS, OVERLAPS, TOPOLOGIES
from planetary.core.tensors import TensorSpec
from planetary.fleet.gateway.invites import InviteList
from planetary.fleet.protocol import messages as m
from planetary.net.addresses import address_text
from planetary.net.authority import Authority
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.policy import ControllerPolicy, RingPolicy
from planetary.sync.outer_optimizers import OuterState, optimizer_of
from planetary.sync.payload import PayloadForm
from planetary.sync.ring import state_digest, state_specs


class RingMaster(Protocol):
    """Leads the workers of a ring, as `collectives.Master` does."""

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"; known from `start` on."""
        ...

    def start(self) -> object:
        """Begin to listen. Raises `UserError`."""
        ...

    def stop(self) -> None:
        """End, with all connections."""
        ...


class MakeMaster(Protocol):
    """Makes a master, as the class `collectives.Master` does."""

    def __call__(self, listen_address: str, *, authority: Authority | None) -> RingMaster:
        """`authority` None: plain connections, on loopback only."""
        ...


def new_master(listen_address: str, *, authority: Authority | None) -> RingMaster:
    """Make a `collectives.Master`. The package is loaded by the first call: a star's gateway starts without it.

    The gateway decides who takes part, so a machine whose invite has expired stays in the ring.
    """
    from planetary.collectives import Master

    revoked = frozenset[str]() if authority is None else InviteList(authority)
    return Master(listen_address, authority=authority, revoked=revoked, invites_lapse=False)


class GatewayTopology(Protocol):
    """One per gateway of a run in rounds."""

    @property
    def brings(self) -> type[m.Message]:
        """The message of a worker that comes with tensors which the gateway keeps."""
        ...

    def start(self) -> None:
        """Begin to listen, where something beside the gateway's server listens. Raises `UserError`."""
        ...

    def stop(self) -> None:
        """End that, with all connections."""
        ...

    def extend(self, policy: ControllerPolicy, state: OuterState) -> ControllerPolicy:
        """Add the topology's constants to a controller's policy; `state` is the one the gateway starts from."""
        ...

    def accepted(self, params: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """Return the tensors a worker may send."""
        ...


class StarGateway:
    """Workers send their end parameters, or their deltas as bytes of a codec ("none": end parameters)."""

    brings = rm.TrainResult

    def __init__(self, codec: str = "none") -> None:
        self._codec = codec

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def extend(self, policy: ControllerPolicy, state: OuterState) -> ControllerPolicy:
        return policy

    def accepted(self, params: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return params if self._codec == "none" else (PayloadForm(self._codec, params).spec,)


class RingGateway:
    """Workers reduce among themselves, led by a master in this process, and send the outer state when asked."""

    brings = rm.RingState

    def __init__(
        self, config: Config, host: str, authority: Authority | None, make_master: MakeMaster = new_master
    ) -> None:
        """`host`: the address that workers connect to; `authority` None: plain connections, on loopback only."""
        self._config = config
        self._master = make_master(address_text(host, config.sync.port), authority=authority)

    def start(self) -> None:
        self._master.start()

    def stop(self) -> None:
        self._master.stop()

    def extend(self, policy: ControllerPolicy, state: OuterState) -> ControllerPolicy:
        port = int(self._master.address.rpartition(":")[2])
        return msgspec.structs.replace(policy, ring=ring_policy(self._config, policy.spec.params, state, port))

    def accepted(self, params: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return state_specs(params, optimizer_of(self._config.outer))


_RING_BITS = {"none": 0, "int4": 4, "int8": 8, "int16": 16}


def ring_policy(config: Config, params: Sequence[TensorSpec], state: OuterState, port: int) -> RingPolicy:
    """Return the ring's constants of a configuration: a start from `state`, and a master at `port`."""
    overlap = OVERLAPS.find(config.sync.overlap)
    job = rm.RingJob(
        port=port,
        connections=config.sync.connections,
        precision=config.sync.precision,
        outer=OUTER_OPTIMIZERS.chosen(config.outer.optimizer, config.outer),
        gather_s=config.timings.ring_gather_s,
        overlap=overlap.overlaps,
        eager=overlap.eager,
        radial=MERGE_RULES.find(config.outer.merge).radial,
        measures=config.sync.ring_order == "measured",
        bits=_RING_BITS[config.sync.ring_compression],
    )
    return RingPolicy(job=job, start_digest=state_digest(params, state))


def topology_of(config: Config, host: str, authority: Authority | None) -> GatewayTopology:
    """Return the gateway's part of a configuration's topology; arguments as of `RingGateway`."""
    in_ring = TOPOLOGIES.find(config.sync.topology).in_ring
    return RingGateway(config, host, authority) if in_ring else StarGateway(config.sync.compression)
