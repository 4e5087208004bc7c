"""PARALLAX in lock step on one machine: what surrogates, sketches and rare synchronisation cost in loss.

    python bench/parallax.py --arm end-to-end --arm paper        # some arms
    python bench/parallax.py --list                              # what there is
    python bench/parallax.py --exact                             # the exact cases

Every arm trains the same byte-level LatentMoE (16 experts, top 4; by default 3 attention and 3 expert blocks of width
128) on the same 2,048 tokens a step of the standard library's sources, from the same initial weights, in the same
order. The end-to-end arm is the same trainer with one composer. Held-out loss is that of the assembled model (all real
experts); the composer's view, with surrogates for what it does not own, is printed beside it. `--json FILE` adds a
line per arm.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runs" / "mixture"))

import msgspec
import numpy as np
from lockstep_trainer import MoeTrainer

from planetary.core.configuration.step_options import StepOptions
from planetary.core.schedules import Schedule
from planetary.data.sources import stdlib_documents
from planetary.models.latent_moe import PRESETS, LatentMoeConfig
from planetary.runs.mixture.methods.averaging import FragmentMergeRule
from planetary.runs.mixture.methods.surrogate import FitOptions
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.training.participant_states import TrainingState, assembled
from planetary.runs.mixture.training.saved import SavedTraining, write_training
from planetary.runs.mixture.training.settings import MoeTraining

replace = msgspec.structs.replace
HELD_OUT = 128  # sequences

COPY = 1024  # a rank of at least the experts' width makes surrogates copies
PAPER = Cadence(router=1, latent=1, backbone=8, refresh=5)
WARM = replace(PAPER, warm_start=40)
ALONE = Cadence(router=1, latent=1, backbone=1, refresh=1)

COPIES = {"cadence": WARM, "detach": False, "rank": COPY, "refresh_form": "4bit"}

# Surrogates that are fitted after every step need few steps of fitting.
STRICT = {"rank": 32, "cadence": ALONE, "detach": False, "sketches": "all", "fit": FitOptions(steps=3)}

ARMS: dict[str, dict[str, Any]] = {
    "end-to-end": {"composers": 1, "rank": 0, "cadence": ALONE},
    "dropped": {"rank": 0, "cadence": PAPER},
    "paper": {"cadence": PAPER},
    "paper, mean": {"cadence": PAPER, "merge": FragmentMergeRule(radial=False)},
    "paper, warm start": {"cadence": WARM},
    "paper, no detach, warm start": {"cadence": WARM, "detach": False},
    "paper, no detach, warm start, two owners": {"cadence": WARM, "detach": False, "replicas": 2},
    "paper, no detach, warm start, slow experts": {"cadence": WARM, "detach": False, "expert_rate": 0.5},
    "paper, refresh 1": {"cadence": replace(PAPER, refresh=1)},
    "paper, all sketches": {"cadence": PAPER, "sketches": "all", "precision": "4bit"},
    "paper, no detach": {"cadence": PAPER, "detach": False},
    "paper, refresh 1, all sketches": {"cadence": replace(PAPER, refresh=1), "sketches": "all", "precision": "4bit"},
    "paper, no detach, warm start, copies": COPIES,
    "paper, no detach, warm start, copies, all sketches": {**COPIES, "sketches": "all", "precision": "4bit"},
    "strict": {**STRICT, "precision": "4bit"},
    "strict, float": {**STRICT, "precision": "f32"},
    "copies": {"rank": COPY, "cadence": ALONE, "detach": False, "sketches": "all", "precision": "f32"},
}


def bytes_of_stdlib() -> np.ndarray:
    """Return all documents as one array of bytes, each ended by a zero byte."""
    return np.frombuffer(b"\0".join(document.text for document in stdlib_documents()), np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and next tokens, i32 [len(starts), length]."""
    rows = np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


class Data:
    """Training windows by step, and held-out ones from the last twentieth of the text."""

    def __init__(self, config: LatentMoeConfig, seed: int, parts: int = 1) -> None:
        text = bytes_of_stdlib()
        cut = len(text) * 19 // 20
        self._train, self._held = text[:cut], text[cut:]
        self._length, self._seed, self._parts = config.sequence_length, seed, parts

    def batch(self, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` windows; with parts, the first windows come from the first part, and so on."""
        rng = np.random.Generator(np.random.PCG64([self._seed, step]))
        size = len(self._train) // self._parts
        starts = rng.integers(0, size - self._length - 1, count) + np.arange(count) * self._parts // count * size
        return windows(self._train, starts, self._length)

    def held_out(self, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        starts = np.linspace(0, len(self._held) - self._length - 1, HELD_OUT).astype(np.int64)
        tokens, targets = windows(self._held, starts, self._length)
        return [(tokens[i : i + rows], targets[i : i + rows]) for i in range(0, len(starts), rows)]


def settings(arm: dict[str, Any], args: argparse.Namespace, config: LatentMoeConfig) -> MoeTraining:
    """Return the settings of an arm, changed as the command line says where several composers train."""
    arm = dict(arm)
    options = StepOptions(
        optimizer=args.optimizer,
        beta1=args.beta1,
        momentum=args.momentum,
    )
    schedule = Schedule(peak=args.rate, warmup_steps=args.steps // 10, total_steps=args.steps)
    expert_schedule = replace(schedule, peak=args.rate * arm.pop("expert_rate", 1.0))
    base = MoeTraining(
        composers=args.composers,
        batch_size=args.batch,
        rank=16,
        precision="f32",
        delta_rank=args.delta_rank,
        dense=options,
        experts=options,
        dense_schedule=schedule,
        expert_schedule=expert_schedule,
    )
    training = replace(base, **arm)
    if training.composers == 1 or not training.rank:
        rank = 0
    elif training.rank == COPY:
        rank = config.n_hidden
    else:  # the arms are written for experts of latent width 64: a quarter and a half of it
        rank = args.rank or training.rank * config.n_latent // 64
    changed = {name: value for name in ("backbone", "refresh") if (value := getattr(args, name))}
    cadence = replace(training.cadence, **changed) if training.composers > 1 else training.cadence
    fit = replace(training.fit, steps=args.fit) if args.fit else training.fit
    training = replace(training, rank=rank, cadence=cadence, fit=fit)
    return with_changes(training, args.set) if training.composers > 1 else training


def with_changes(training: MoeTraining, changes: list[str]) -> MoeTraining:
    """Return the settings with some of them changed, each given as `key=value` or `part.key=value`."""
    fields = msgspec.to_builtins(training)
    for change in changes:
        path, _, value = change.partition("=")
        *parts, name = path.split(".")
        inside = fields
        for part in parts:
            inside = inside.get(part, {})
        if name not in inside:
            raise SystemExit(
                f"--set {change}: there is no such setting in planetary.runs.mixture.training.settings.MoeTraining"
            )
        try:
            inside[name] = json.loads(value)
        except json.JSONDecodeError:
            inside[name] = value
    return msgspec.convert(fields, MoeTraining)


def train(name: str, args: argparse.Namespace, config: LatentMoeConfig) -> dict[str, Any]:
    training = settings(ARMS[name], args, config)
    trainer = MoeTrainer(config, training)
    data = Data(config, args.seed, args.composers if args.own_text else 1)
    held = data.held_out(trainer.batch)
    state = trainer.initial()
    losses, errors, sketch_bytes, refresh_bytes, curve = [], [], 0, 0, []
    began = time.process_time()
    for step in range(args.stop or args.steps):
        state, report = trainer.step(state, *data.batch(step, training.batch_size))
        losses.append(report.cross_entropy)
        sketch_bytes += report.sketch_bytes
        refresh_bytes += report.surrogate_bytes
        if not np.isnan(report.surrogate_error):
            errors.append(report.surrogate_error)
        if state.steps % args.evaluate_every == 0:
            loss = trainer.evaluate(state, held)
            curve.append((state.steps, loss))
            seconds = (time.process_time() - began) / state.steps
            print(f"{name}: step {state.steps}, held out {loss:.4f}, {seconds:.2f} CPU s a step", flush=True)
    if args.save:
        folder = args.save / name.replace(", ", "-").replace(" ", "-")
        write_training(folder, SavedTraining(config, training, trainer.owners, state))
    view = [trainer.evaluate_composer(state, c, held) for c in range(training.composers)]
    return {
        "arm": name,
        "preset": args.preset,
        "tokens_a_step": args.batch * config.sequence_length,
        "seed": args.seed,
        "rate": args.rate,
        "beta1": args.beta1,
        "optimizer": args.optimizer,
        "composers": training.composers,
        "rank": training.rank,
        "delta_rank": training.delta_rank,
        "refresh_form": training.refresh_form,
        "momentum": args.momentum,
        "cadence": msgspec.to_builtins(training.cadence),
        "set": args.set,
        "own_text": args.own_text,
        "ternary": config.ternary,
        "activation": config.activation,
        "steps": state.steps,
        "of": args.steps,
        "held_out": curve[-1][1] if curve else trainer.evaluate(state, held),
        "composer_view": float(np.mean(view)),
        "train_last_20": float(np.mean(losses[-20:])),
        "surrogate_error": float(np.mean(errors[-10:])) if errors else None,
        "sketch_bytes_per_step": sketch_bytes // max(1, state.steps),
        "refresh_bytes_per_step": refresh_bytes // max(1, state.steps),
        "agreement": msgspec.to_builtins(trainer.agreement(state, held[0][0])) if training.composers > 1 else None,
        "surrogates_only": trainer.evaluate_surrogates(state, held) if state.surrogates is not None else None,
        "curve": curve,
        "cpu_seconds_per_step": (time.process_time() - began) / max(1, state.steps),
    }


def same(a: TrainingState, b: TrainingState, config: LatentMoeConfig) -> bool:
    """Whether two trainings have the same model in every bit."""
    (dense_a, experts_a), (dense_b, experts_b) = assembled(a, config), assembled(b, config)
    return all((dense_a[n] == dense_b[n]).all() for n in dense_a) and all(
        (x[n] == y[n]).all() for x, y in zip(experts_a, experts_b, strict=True) for n in x
    )


def exact(args: argparse.Namespace, config: LatentMoeConfig) -> None:
    """The exact cases: offload against direct ownership, and exact copies against end-to-end training.

    Without the load-balancing loss, which is not a mean over the parts of a batch.
    """
    config = replace(config, balance=0.0)
    data = Data(config, args.seed)
    arms = {
        "direct": {"cadence": PAPER},
        "offload": {"cadence": PAPER, "sketches": "owner", "precision": "f32"},
        "end-to-end": ARMS["end-to-end"],
        "copies": ARMS["copies"],
    }
    trainers = {name: MoeTrainer(config, settings(arm, args, config)) for name, arm in arms.items()}
    states = {name: trainer.initial() for name, trainer in trainers.items()}
    for step in range(args.stop or args.steps):
        batch = data.batch(step, trainers["direct"].training.batch_size)
        states = {name: trainers[name].step(state, *batch)[0] for name, state in states.items()}
    equal = same(states["direct"], states["offload"], config)
    losses = {name: t.evaluate(states[name], data.held_out(t.batch)) for name, t in trainers.items()}
    gap = losses["copies"] / losses["end-to-end"] - 1
    steps = states["direct"].steps
    print(f"{steps} steps: offload equals direct ownership bit for bit: {equal}")
    print(f"{steps} steps: copies {losses['copies']:.6f}, end-to-end {losses['end-to-end']:.6f}: {gap:+.4%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", default=[], choices=list(ARMS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the arms")
    parser.add_argument("--exact", action="store_true", help="check the exact cases")
    parser.add_argument("--steps", type=int, default=400, help="of the learning-rate schedule")
    parser.add_argument("--stop", type=int, default=0, help="stop after so many steps of it (0: train to its end)")
    parser.add_argument("--evaluate-every", type=int, default=80)
    parser.add_argument("--preset", default="default", help="of models/latent_moe.py (default: default)")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--beta1", type=float, default=0.9, help="Adam's, of everything (default: 0.9)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"), help="of everything")
    parser.add_argument("--momentum", type=float, default=0.9, help="Muon's (default: 0.9)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens a step, of all composers")
    parser.add_argument("--composers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0, help="of surrogates (0: the arm's)")
    parser.add_argument("--delta-rank", type=int, default=0, help="of what a refresh changes (0: surrogates whole)")
    parser.add_argument("--fit", type=int, default=0, help="steps of fitting per refresh (0: the arm's)")
    parser.add_argument("--backbone", type=int, default=0, help="horizon of the backbone (0: the arm's)")
    parser.add_argument("--refresh", type=int, default=0, help="steps between refreshes (0: the arm's)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting of the arms with several composers, such as merge.rate=1.25 (see MoeTraining)",
    )
    parser.add_argument("--own-text", action="store_true", help="each composer trains on its own part of the text")
    parser.add_argument("--ternary", action="store_true", help="ternary experts")
    parser.add_argument("--swiglu", action="store_true", help="SwiGLU experts")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data's order")
    parser.add_argument("--save", type=Path, help="save each arm's training here, for `planetary moe export`")
    parser.add_argument("--json", type=Path, help="append a line per arm to this file")
    args = parser.parse_args()
    if args.list:
        for name, arm in ARMS.items():
            print(f"{name}: {arm}")
        return
    kind = {"ternary": args.ternary, "activation": "swiglu" if args.swiglu else "relu2"}
    config = LatentMoeConfig(**{**PRESETS[args.preset], **kind, "vocab_size": 256, "seed": args.seed})
    if args.exact:
        exact(args, config)
    for name in args.arm:
        result = train(name, args, config)
        print(json.dumps(result), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
