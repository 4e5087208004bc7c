"""Goodput of a run whose workers keep getting lost, in simulated time, with the production gateway and workers.

    python bench/goodput.py [--workers 8] [--rounds 60] [--every 20] [--seeds 3]

Each worker's process is killed once in `--every` rounds, at a time drawn for each; its supervisor starts another one. A
round is 30 steps of 0.13 s, 3.9 s. Goodput is the tokens that count, per second, against the same run without faults;
the loss is that of a small function (`tests/runs/rounds/small_training.py`), held out. Prints one JSON object for each
way: equal leases, measured ones, and the decoupled overlap, in which a round waits for one worker and a grace time.
With two fragments its rounds are 15 steps, so that every number is synchronised once in 30, and there are twice as
many; a merged fragment is mixed in after 10 steps. `tokens_per_s` are those without faults.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runs" / "rounds"))

from small_training import small_training

from planetary.fleet.protocol.records import WorkerLost
from planetary.runs.rounds.records import RoundMerged
from planetary.simulation.faults import Fault
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.simulated_cluster import SimMachine

STEPS, STEP_S = 30, 0.13


class Way(NamedTuple):
    """How workers are synchronised: keys, and into how many rounds the `STEPS` steps are cut."""

    given: tuple[str, ...]
    parts: int = 1


DECOUPLED = (
    "sync.overlap=decoupled",
    "sync.compression=float32",
    "sync.fragments=2",
    "sync.delay=10",
    "sync.mixing=0.5",
    "sync.grace_steps=8",
    "fabric.quorum=1",
)
WAYS = {
    "equal leases": Way(("fabric.leases=equal",)),
    "measured leases": Way(("fabric.leases=measured",)),
    "decoupled": Way(DECOUPLED, parts=2),
}


def run(seed: int, workers: int, rounds: int, way: Way, plan: list[Fault]) -> tuple[float, float, int]:
    """Return tokens per second of the run's rounds, the last held-out loss, and the workers lost."""
    rounds *= way.parts
    training = small_training(
        rounds=rounds,
        workers=workers,
        inner_steps=STEPS // way.parts,
        given=["outer.learning_rate=1", "outer.momentum=0", "outer.merge=mean", "eval.every=10", *way.given],
    )
    machines = [SimMachine(is_steady=True)] * workers
    cluster = SimCluster(seed, training, workers, plan, step_s=STEP_S, machines=machines)
    if not cluster.run(100.0 * rounds):
        raise SystemExit(f"the run did not end: {cluster.waits_for}")
    ends = [record for record in cluster.journal if isinstance(record, RoundMerged)]
    lost = sum(isinstance(record, WorkerLost) for record in cluster.journal)
    last = cluster.metrics[rounds].eval_loss
    assert last is not None
    return sum(end.tokens for end in ends) / sum(end.seconds for end in ends), last, lost


def faults(seed: int, workers: int, rounds: int, every: float, round_s: float) -> list[Fault]:
    source, period = random.Random(f"goodput {seed}"), every * round_s
    plan = []
    for worker in range(workers):
        at = source.uniform(0.0, period)
        while at < rounds * round_s:
            plan.append(Fault(at_s=6.0 + at, kind="kill_worker", worker=worker))
            at += period
    return sorted(plan, key=lambda fault: fault.at_s)


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=float, default=20.0, metavar="ROUNDS")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for name, way in WAYS.items():
        parts, losses, lost, rates = [], [], [], []
        for seed in range(options.seeds):
            rate, loss, _ = run(seed, options.workers, options.rounds, way, [])
            tokens = options.workers * STEPS * 8
            plan = faults(seed, options.workers, options.rounds, options.every, tokens / rate)
            faulty, loss_then, count = run(seed, options.workers, options.rounds, way, plan)
            parts.append(faulty / rate)
            rates.append(rate)
            losses.append(loss_then / loss - 1)
            lost.append(count)
        print(
            json.dumps(
                {
                    "way": name,
                    "workers": options.workers,
                    "rounds": options.rounds,
                    "workers_lost": lost,
                    "tokens_per_s": round(statistics.mean(rates), 1),
                    "goodput": [round(part, 4) for part in parts],
                    "mean": round(statistics.mean(parts), 4),
                    "loss_change": [round(change, 5) for change in losses],
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
