"""The ports of masters and peers in a simulated process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planetary.artifacts.durable_files import DurableFiles
from planetary.collectives.transport.ports import Ports
from planetary.machine.machine import Machine
from planetary.simulation.collectives.background_loop import NetworkHere, SimulatedBackgroundLoop
from planetary.simulation.collectives.simulated_bulk import SimulatedBulkNetwork
from planetary.simulation.collectives.simulated_threads import SimulatedThreads
from planetary.simulation.process import Process
from planetary.simulation.world import World

Observe = Callable[[Machine[Any, Any], object, Sequence[object]], None]


def simulated_ports(
    world: World, process: Process, files: DurableFiles, observe: Observe, *, preempt_chance: float = 0.0
) -> Ports:
    """Return what a master or a peer in `process` uses of its machine. Called once for a process."""
    network = world.network
    network.of(process)  # its bulk connections and listeners end with it
    return Ports(
        clock=world.clock,
        threads=SimulatedThreads(process, preempt_chance),
        start_loop=lambda name: SimulatedBackgroundLoop(process, network, name),
        network=NetworkHere(network),
        bulk=SimulatedBulkNetwork(network, process),
        files=files,
        machine=lambda: process.node,
        draw_id=lambda: f"{world.random.getrandbits(128):032x}",
        observe=observe,
    )
