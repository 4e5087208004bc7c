"""What lies cost a run: ten workers of which four lie, in simulated time, with a real training step.

    python bench/liars.py > table.md          # about 20 minutes on two cores
    python bench/liars.py --quick             # the first table alone

The loss is the held-out one after the last round, over that of the same run without liars. The outer step has rate 1
and no momentum, and the run ends while the loss still falls: a round of less progress then costs loss. A lie that
costs less than `SHOWN` where nothing is judged proves nothing about the judgement: the last column says so. Equal
arguments give equal bits, so a table is the same on every machine whose XLA rounds alike.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping
from typing import Any, get_args

import planetary
from planetary.core.errors import PlanetaryError
from planetary.simulation.lies import Lie

WORKERS, LIARS, ROUNDS = 10, (1, 3, 5, 7), 10
SHOWN = 1.05  # of the honest run's loss
CONFIG: dict[str, Any] = {
    "run": {"name": "liars"},
    "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 256}},
    "train": {"rounds": ROUNDS, "inner_steps": 10, "batch_size": 4, "sequence_length": 64},
    "optimizer": {"learning_rate": 0.001, "warmup_steps": 20},
    "outer": {"learning_rate": 1.0, "momentum": 0.0, "merge": "mean"},
    "eval": {"every": 1, "batches": 10},
}
ALWAYS = 1e9  # seconds
RULES = {
    "mean": {},
    "median": {"outer.merge": "median"},
    "trimmed_mean, 0.4": {"outer.merge": "trimmed_mean", "outer.trimmed": 0.4},
    "centred_clipping": {"outer.merge": "centred_clipping"},
}


def run(lie: Lie | None, *, at_s: float = 0.0, overrides: Mapping[str, Any] | None = None) -> planetary.Simulated:
    """Simulate a run in which some lie from a time on."""
    faults = [planetary.Fault(at_s, "lie", worker=w, seconds=ALWAYS, lie=lie) for w in LIARS] if lie else []
    return planetary.simulate(CONFIG, workers=WORKERS, faults=faults, overrides=overrides)


def held_out(done: planetary.Simulated) -> float:
    """The loss after the last round that was evaluated."""
    return done.eval_losses[-1][1]


def numbers(done: planetary.Simulated) -> tuple[str, int, int]:
    """The round in which the last liar was excluded, how many honest workers were, and honest contributions refused."""
    liar_names = {f"node-{number}/0" for number in LIARS}
    refused: dict[str, list[int]] = collections.defaultdict(list)
    lost: set[str] = set()
    for event in done.events:
        match event["event"]:
            case "contributions_judged":
                for measure in event["measures"]:
                    if measure["refused"]:
                        refused[measure["worker"]].append(event["round"])
            case "worker_lost":
                lost.add(event["worker"])
            case _:
                pass
    last = max((rounds[-1] for name, rounds in refused.items() if name in liar_names & lost), default=0)
    excluded = f"{last}" if liar_names <= lost and last else ("by their evaluations" if liar_names <= lost else "not")
    honest = sum(len(rounds) for name, rounds in refused.items() if name not in liar_names)
    return excluded, len(lost - liar_names), honest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first table alone")
    given = parser.parse_args()
    honest = run(None)
    base = held_out(honest)
    print(f"Honest run: held-out loss {base:.3f} after {ROUNDS} rounds.\n", flush=True)
    ends = [event["t"] for event in honest.events if event["event"] == "round_finished"]
    begins = [event["t"] for event in honest.events if event["event"] == "run_started"]
    middle = ends[ROUNDS // 2 - 1] - begins[0]
    print(
        "| lie | loss, of honest | last liar excluded in round | honest workers lost | honest contributions refused | "
        f"lies begin after round {ROUNDS // 2}: loss, of honest | excluded in round | honest workers lost | "
        "nothing judged: loss, of honest |\n|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for lie in get_args(Lie):
        row = [lie]
        for at_s in (0.0, middle):
            done = run(lie, at_s=at_s)
            excluded, lost, refused = numbers(done)
            row += [f"{held_out(done) / base:.3f}", excluded, str(lost), *([str(refused)] if at_s == 0 else [])]
        # The loss of a run is what evaluators tell: where nobody checks them, a false one is that run's loss.
        alone = "believed" if lie == "false_loss" else shown(unjudged(lie, RULES["mean"], base))
        print("| " + " | ".join([*row, alone]) + " |", flush=True)
    if given.quick:
        return
    print('\nNothing is judged (`outer.judge = "none"`), and the run never goes back (`outer.loss_rise = 0`):\n')
    print("| lie | " + " | ".join(RULES) + " |\n|---|" + "---|" * len(RULES), flush=True)
    for lie in (None, *get_args(Lie)):
        if lie == "false_loss":
            continue
        costs = [unjudged(lie, keys, base) for keys in RULES.values()]
        print(
            f"| {lie or '(none)'} | " + " | ".join(f"{cost:.3f}" if cost else "ends" for cost in costs) + " |",
            flush=True,
        )


def unjudged(lie: Lie | None, keys: Mapping[str, Any], base: float) -> float | None:
    """Return the loss of a run that judges nothing and never goes back, of the honest run's; None: the run ends."""
    try:
        done = run(lie, overrides={"outer.judge": "none", "outer.loss_rise": 0.0, **keys})
    except PlanetaryError:
        return None
    return held_out(done) / base if done.outcome == "finished" else None


def shown(cost: float | None) -> str:
    """Return a cost, and whether it is large enough for the row to show that the judgement helps."""
    if cost is None:
        return "ends"
    return f"{cost:.3f}" + ("" if cost >= SHOWN else ": cannot show")


if __name__ == "__main__":
    main()
