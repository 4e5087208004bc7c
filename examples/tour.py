"""A cluster of three in one process: its journal as it grows, a worker and the gateway killed, and the parameters
computed again from the journal alone.

    python examples/tour.py

Gateway, supervisors and workers are those of a real run (`docs/tour.md`); connections, processes and the clock are
simulated, and a small known function stands in place of a model, so that it takes a second and needs no compiler.
`planetary.simulate` does the same with a model's own training step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runs" / "rounds"))

from small_training import small_training

from planetary.machine.journal import replay
from planetary.runs.rounds.state import ControllerState
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster

ROUNDS, WORKERS, INNER_STEPS = 4, 2, 4
FAULTS = (
    Fault(at_s=4.9, kind="kill_worker", worker=1),  # in the middle of a lease
    Fault(at_s=9.0, kind="kill_gateway"),  # it is started again and resumes from its journal
)
WORDS = {
    "kill_worker": "a worker was killed: its lease goes back, and is trained by the process that takes its place",
    "kill_gateway": "the gateway was killed: it starts again, replays this journal, and goes on with the open round",
}
SHOWN = ("rounds", "round", "lease", "task", "worker", "to", "contributions", "tokens_total", "why", "reason", "loss")


def brief(value: object) -> str:
    """Return a value of a record in few characters: a number of things for a list, four digits for a float."""
    if isinstance(value, tuple | list):
        return str(len(value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run the cluster to its end and check what it came to."""
    training = small_training(rounds=ROUNDS, workers=WORKERS, inner_steps=INNER_STEPS)
    cluster = SimCluster(0, training, WORKERS, FAULTS)
    size = told = struck = 0
    print(f"a gateway, {WORKERS} workers and {ROUNDS} rounds; the journal, in simulated seconds:\n")

    def follow() -> None:
        nonlocal size, told, struck
        path = cluster.run_folder / "events.jsonl"
        if not path.exists() or path.stat().st_size == size:
            return
        size = path.stat().st_size
        for kind in cluster.struck[struck:]:
            print(f"--- {WORDS[kind]}")
            struck += 1
        for record in cluster.journal[told:]:
            fields = msgspec.to_builtins(record)
            event, time = fields.pop("event"), fields.pop("t")
            shown = "  ".join(f"{key}={brief(fields[key])}" for key in SHOWN if key in fields)
            print(f"{time:6.2f} s  {event:22}{shown}")
            told += 1

    assert cluster.run(limit_s=600.0, follow=follow), "the run hangs"
    follow()
    print(f"\nfaults that hit: {', '.join(cluster.struck)}")

    # The state of the controller is a fold over the journal.
    untimed = [msgspec.structs.replace(record, t=0.0) for record in cluster.journal]
    assert replay(untimed, ControllerState()).ledger == cluster.controller.state.ledger
    # Which leases count, and in which rounds, decides the parameters: whatever went wrong, they are the same bits.
    again = training.replay(cluster.journal)
    for name, value in cluster.parameters.state.params.items():
        np.testing.assert_array_equal(value, again[name])
    print(f"parameters recomputed from the journal: equal in every bit after {ROUNDS} rounds")


if __name__ == "__main__":
    main()
