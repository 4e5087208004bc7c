"""A whole fabric in one process: the real machines and the real outer mathematics, in a simulated world.

Only what the shells do is simulated: connections, processes and the disk. What is computed is behind
`simulation.numerics`: a real training step, or `small_training`, whose parameters at the end can be computed again from
the journal alone and must be equal bit for bit, whatever went wrong on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.diloco.rounds import RoundPolicy
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.policy import ControllerPolicy, EvalChunk, RingPolicy
from planetary.simulation.faults import Fault
from planetary.simulation.gateway import SimDisk, SimGateway
from planetary.simulation.mirrored_links import Network
from planetary.simulation.numerics import Numerics
from planetary.simulation.small_training import OUTER_MOMENTUM, OUTER_RATE, PARAMS, TOKENS_PER_STEP, SmallTraining
from planetary.simulation.worker import SimHost
from planetary.simulation.world import World

SPEC = StepSpec("simulated", PARAMS, (), (), (), "0" * 64)
RESTART_GATEWAY_S = 1.5


def policy(
    *,
    rounds: int,
    workers: int,
    inner_steps: int = 4,
    checkpoint_every: int = 1,
    ring: bool = False,
    overlap: bool = False,
) -> ControllerPolicy:
    """Return the constants of a small simulated run."""
    outer_options = {"learning_rate": OUTER_RATE, "momentum": OUTER_MOMENTUM}
    precision = "f32" if overlap else "f64"
    job = m.RingJob(port=1, connections=1, precision=precision, gather_s=5.0, overlap=overlap, **outer_options)
    return ControllerPolicy(
        run="sim",
        rounds=rounds,
        config_hash="c",
        workers=workers,
        round=RoundPolicy(quorum=1, grace_s=4.0, deadline_s=0.0),
        startup_grace_s=10.0,
        first_step_s=30.0,
        abandon_after_s=120.0,
        inner_steps=inner_steps,
        inner_state="persist",
        schedule=Schedule(),
        tokens_per_lease=inner_steps * TOKENS_PER_STEP,
        locate=lambda lease: m.Slice("data", "ui8", lease * 44, 44),
        held_out=tuple(EvalChunk(m.Slice("held-out", "ui8", 11 * i, 11), 1) for i in range(workers)),
        eval_every=1,
        gateway_delivers=False,
        checkpoint_every=checkpoint_every,
        ring=RingPolicy(job=job, start_digest="") if ring else None,
        heartbeat_s=0.5,
        silent_after_s=2.5,
        iree_version="3.13.0",
        spec=SPEC,
        buffers="",
    )


class SimCluster:
    """A gateway and some hosts, with faults."""

    def __init__(
        self,
        seed: int,
        limits: ControllerPolicy,
        hosts: int,
        plan: Sequence[Fault] = (),
        numerics: Numerics | None = None,
    ) -> None:
        """Start everything at time 0; `plan` names hosts by number. `numerics` None: `SmallTraining`."""
        self.numerics: Numerics = SmallTraining() if numerics is None else numerics
        self.world = World(seed)
        self.network = Network(self.world, (0.001, 0.05), limits.silent_after_s)
        self.disk = SimDisk()
        self.policy = limits
        self.struck: list[str] = []  # faults that really hit something
        self.gateway: SimGateway | None = self._gateway(limits)
        self.hosts = [SimHost(self, f"node-{i}/0") for i in range(hosts)]
        for fault in plan:
            self.world.at(fault.at_s, lambda fault=fault: self._strike(fault))

    def _gateway(self, limits: ControllerPolicy) -> SimGateway:
        return SimGateway(self.world, self.disk, limits, self.numerics, self.network.partitioned)

    def gateway_endpoint(self) -> SimGateway | None:
        """The gateway that listens now, or None while it is down."""
        return self.gateway

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.gateway is not None and self.gateway.finished is not None

    def run(self, limit_s: float) -> bool:
        """Run until the run has ended; false when it did not within `limit_s` simulated seconds."""
        return self.world.run(lambda: self.finished, limit_s)

    def _strike(self, fault: Fault) -> None:
        host = self.hosts[fault.worker]
        worker = host.worker if host.worker is not None and not host.worker.dead else None
        hit = True
        match fault.kind:
            case "kill_worker":
                hit = host.kill_worker()
            case "drop_link":
                host.drop_link()
                if worker is not None:
                    worker.drop_link()
            case "partition":
                self.network.partition(host.name, fault.seconds)
            case "kill_gateway":
                hit = self._kill_gateway()
            case "full_disk":
                self.disk.full += 1
            case "hang_worker" | "slow_worker" | "poison_worker" | "repeat_result" | "flip_bit":
                hit = worker is not None
                if worker is not None:
                    worker.hung |= fault.kind == "hang_worker"
                    worker.poisoned |= fault.kind == "poison_worker"
                    worker.flips |= fault.kind == "flip_bit"
                    worker.step_s *= 5.0 if fault.kind == "slow_worker" else 1.0
                    if fault.kind == "repeat_result":
                        worker.repeat_result()
        if hit:
            self.struck.append(fault.kind)

    def _kill_gateway(self) -> bool:
        if self.gateway is None or self.finished:
            return False
        self.gateway.kill()
        self.gateway = None

        def restart() -> None:
            self.gateway = self._gateway(self.policy)

        self.world.after(RESTART_GATEWAY_S, restart)
        return True
