"""Train one model on many unreliable machines.

    run = planetary.train("my.toml", workers=2, rounds=3)
    run.metrics[-1].loss, run.generate("def ")

The names below are the whole public interface, documented in docs/api.md with the public packages
`planetary.collectives`, `planetary.models` and `planetary.testing`. All other modules are private: they change without
notice. Nothing is imported before a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.lazy_names import lazy_names
from planetary.version import __version__

if TYPE_CHECKING:
    from planetary.client.jobs import Jobs
    from planetary.collectives import Communicator
    from planetary.compiler.frontend.attention import attention
    from planetary.compiler.frontend.cross_entropy import linear_cross_entropy
    from planetary.run.config_help import Config
    from planetary.run.handle import Run
    from planetary.run.metrics import RoundRewards
    from planetary.run.model.authoring import compile, export, vjp
    from planetary.run.rl import rl
    from planetary.run.serve import Server, serve
    from planetary.run.simulate import Simulated, simulate
    from planetary.run.train import train, train_async
    from planetary.runs.rounds.metrics import RoundMetrics
    from planetary.simulation.faults import Fault
    from planetary.simulation.simulated_network import SimulatedLink

__all__ = [
    "Communicator",
    "Config",
    "Fault",
    "Jobs",
    "RoundMetrics",
    "RoundRewards",
    "Run",
    "Server",
    "Simulated",
    "SimulatedLink",
    "__version__",
    "attention",
    "compile",
    "export",
    "linear_cross_entropy",
    "rl",
    "serve",
    "simulate",
    "train",
    "train_async",
    "vjp",
]

_HOMES = {
    "attention": "planetary.compiler.frontend.attention",
    "linear_cross_entropy": "planetary.compiler.frontend.cross_entropy",
    "Communicator": "planetary.collectives",
    "compile": "planetary.run.model.authoring",
    "export": "planetary.run.model.authoring",
    "vjp": "planetary.run.model.authoring",
    "Config": "planetary.run.config_help",
    "Fault": "planetary.simulation.faults",
    "Jobs": "planetary.client.jobs",
    "RoundMetrics": "planetary.runs.rounds.metrics",
    "RoundRewards": "planetary.run.metrics",
    "Run": "planetary.run.handle",
    "Server": "planetary.run.serve",
    "Simulated": "planetary.run.simulate",
    "SimulatedLink": "planetary.simulation.simulated_network",
    "rl": "planetary.run.rl",
    "serve": "planetary.run.serve",
    "simulate": "planetary.run.simulate",
    "train": "planetary.run.train",
    "train_async": "planetary.run.train",
}

__getattr__ = lazy_names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
