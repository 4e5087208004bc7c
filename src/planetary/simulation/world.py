"""A simulated world: time, machines with processes, and the network between them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from planetary.simulation.event_loop import SimulatedLoop
from planetary.simulation.fake_clock import FakeClock
from planetary.simulation.process import Process
from planetary.simulation.simulated_network import SimulatedNetwork


class World:
    """Runs scheduled callbacks in the order of their times; equal times in the order of scheduling.

    Everything random in a simulation is drawn from `random`, so one seed gives one story.

    Attributes:
        loop: of all processes.
        network: between their machines.
        processes: all that were ever started.
    """

    def __init__(self, seed: int) -> None:
        """Start at time 0, with no process."""
        self.loop = SimulatedLoop(seed)
        self.network = SimulatedNetwork(self.loop)
        self.processes: list[Process] = []
        self.random = self.loop.random

    @property
    def clock(self) -> FakeClock:
        """Simulated time."""
        return self.loop.clock

    @property
    def now(self) -> float:
        """Simulated monotonic seconds."""
        return self.loop.clock.monotonic()

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Do `action` at `time`, or now when that has passed; it belongs to no process, not even to the caller's."""
        self.loop.call_at(max(time, self.now), action, context=self.network.context)

    def after(self, delay: float, action: Callable[[], object]) -> None:
        """Do `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def process(self, name: str, node: str) -> Process:
        """Make a process on a node, which runs nothing yet."""
        process = Process(self.loop, name, node, 1 + len(self.processes))
        self.processes.append(process)
        return process

    def start(self, name: str, node: str, main: Callable[[Process], Coroutine[Any, Any, int]]) -> Process:
        """Start a process with the exit status returned by `main`."""
        process = self.process(name, node)
        process.run(lambda: main(process))
        return process

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until` is true. Returns false when nothing is left to happen, or `limit_s` is reached."""
        return self.loop.run(until, limit_s)

    def close(self) -> None:
        """Kill all processes and unwind their stacks."""
        for process in self.processes:
            process.kill()
        self.loop.close()
        with self.loop.as_running():  # cleanup that gathers coroutines asks for it
            for process in self.processes:
                process.bury()
