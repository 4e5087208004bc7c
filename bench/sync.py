"""Ways to synchronise against one worker on the same tokens: held-out loss per seed, gaps with t-intervals, bytes.

    python bench/sync.py examples/stdlib.toml --seeds 0,1,2 --rounds 20 --inner-steps 30
    python bench/sync.py examples/stdlib.toml --ways rda,sparse-both --set model.options='{n_layer = 2, n_embd = 64}'
    python bench/sync.py examples/stdlib.toml --ways mean:10,sign-both:36 --rounds 50 --inner-steps 36 --against mean:10
    python bench/sync.py examples/stdlib.toml --ways mean,star-eager,streaming:10,streaming-late:10 --factors ''

`mean:10` is the way `mean` with H 10, in as many steps; `mean:10*1.5` with one and a half times the learning rate, too;
`adam@0.02/0.5/0.99/0.001` the way `adam` with other constants (η, β₁, β₂, ε).
There are two references: one worker on the same tokens, and data-parallel training, one worker with the batches of all
workers and as many steps (the published definition of the gap, arXiv:2503.09799).

The ways `relay...`, `star-...` and `streaming...` run a worker's exchange and the gateway's parameters themselves. A
fragment of three is synchronised every H steps there, so that `streaming:10` compares with `mean` at H 30.

Trains in this process with the compiled step, the data order and the pure functions of a real run (`outer_step`,
`PayloadForm`, `Shown`, `eager_start`), so that all workers are in every round. Runs are paired by seed: the gap of a
way is the mean over seeds of its loss over the reference's, with its 90 % t-interval. `sparse-no-feedback` is a
negative control: it has to be worse than `sparse`. With `--factors` the references are trained at several rates.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from diloco_gap import as_baseline, held_out_loss, open_executors

from planetary.core.config import load_config
from planetary.core.configuration.schema import Config, OuterConfig
from planetary.core.extension_points import MERGE_RULES
from planetary.core.tensors import Tensors
from planetary.data.reader import batches, read_slice
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.changes import ChangeOf
from planetary.runs.rounds.controller.star import start_offer
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runs.rounds.worker.exchange import Outgoing, Trained, exchange_of
from planetary.sync.contributions import Contribution
from planetary.sync.merge import rule_of
from planetary.sync.outer import initial_state, outer_step, published_params
from planetary.sync.outer_optimizers import AVERAGING, Adam, Nesterov, OuterOptimizer
from planetary.sync.payload import PAYLOAD, PayloadForm, Shown, payload_digest
from planetary.sync.ring import HeldContribution, eager_start

replace = msgspec.structs.replace


class Way(msgspec.Struct, frozen=True):
    """One way to synchronise."""

    merge: str = "mean"
    outer: OuterOptimizer = AVERAGING
    up: str = "none"
    down: str = "none"
    feedback: bool = True
    delay: str = ""  # "eager", or "naive"
    start: str = "none"  # codec of the initial parameters; of ways of the star
    overlap: str = ""  # of the star, with the exchange and the parameters of a real run
    fragments: rm.Fragmentation | None = None
    stepwise: float = 0.0  # part of the rounds, the last ones, in which parameters are averaged after every step


WAYS = {
    "mean": Way(),
    "nesterov": Way(outer=Nesterov(0.7, 0.9)),
    "mean-tail-10": Way(stepwise=0.1),
    "mean-tail-20": Way(stepwise=0.2),
    "mean-1.3": Way(outer=Nesterov(1.3)),
    "adam": Way(outer=Adam(0.03, 0.0, 0.99, 0.01)),
    "rda-adam": Way("rda", outer=Adam(0.05, 0.0, 0.99, 0.02)),
    "rda": Way("rda"),
    "int4-both": Way(up="int4", down="int4"),
    "rda-int4-both": Way("rda", up="int4", down="int4"),
    "sign": Way("rda", up="sign"),
    "sign-both": Way("rda", up="sign", down="sign"),
    "relay": Way("rda", up="sign", down="relay", start="int8", overlap="none"),
    "relay-float32": Way("rda", up="float32", down="relay", overlap="none"),
    "mean-sign-both": Way(up="sign", down="sign"),
    "sign-no-feedback": Way("rda", up="sign", feedback=False),
    "sparse": Way("senders", up="sparse"),
    "sparse-both": Way("senders", up="sparse", down="sparse"),
    "sparse-no-feedback": Way("senders", up="sparse", feedback=False),
    "eager": Way(delay="eager"),
    "naive": Way(delay="naive"),
    "star-none": Way(overlap="none"),
    "star-eager": Way(up="float32", overlap="eager"),
    "eager-sign": Way(up="sign", overlap="eager"),
    "eager-sign-both": Way(up="sign", down="sign", overlap="eager"),
    "eager-sign-int4": Way(up="sign", down="int4", overlap="eager"),
    "eager-relay": Way(up="sign", down="relay", start="int8", overlap="eager"),
    "eager-rda": Way("rda", up="float32", overlap="eager"),
    "eager-rda-relay": Way("rda", up="sign", down="relay", start="int8", overlap="eager"),
    "eager-rda-sign-both": Way("rda", up="sign", down="sign", overlap="eager"),
    "star-eager-int4": Way(up="int4", down="int4", overlap="eager"),
    "streaming": Way(overlap="streaming", fragments=rm.Fragmentation(count=3, delay=1, mixing=0.5)),
    "streaming-late": Way(overlap="streaming", fragments=rm.Fragmentation(count=3, delay=3, mixing=0.5)),
    "streaming-taken": Way(overlap="streaming", fragments=rm.Fragmentation(count=3, delay=1)),
    "streaming-fp4": Way(up="fp4", overlap="streaming", fragments=rm.Fragmentation(count=3, delay=1, mixing=0.5)),
    "streaming-int4": Way(
        up="int4", down="int4", overlap="streaming", fragments=rm.Fragmentation(count=3, delay=6, mixing=0.5)
    ),
}
# Student's t at 95 % (two-sided 90 %), by degrees of freedom.
T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}


# Negative controls: a way, and the one that has to be better.
CONTROLS = {"sparse-no-feedback": "sparse", "sign-no-feedback": "sign"}


def as_parallel(config: Config, factor: float) -> Config:
    """Return the configuration of data-parallel training: one worker takes the batches of all in every step."""
    alone, workers = as_baseline(config, factor), config.fabric.workers
    train = replace(alone.train, rounds=config.train.rounds, batch_size=workers * config.train.batch_size)
    return replace(alone, train=train, eval=replace(alone.eval, batches=max(1, alone.eval.batches // workers)))


def asked(text: str, config: Config) -> tuple[Way, Config]:
    """Return the way and the configuration of NAME[@RATE/BETA1/BETA2/EPSILON][:H][*FACTOR]."""
    text, _, factor = text.partition("*")
    text, _, steps = text.partition(":")
    name, _, constants = text.partition("@")
    way = replace(WAYS[name], outer=Adam(*map(float, constants.split("/")))) if constants else WAYS[name]
    if steps:
        train = replace(config.train, inner_steps=int(steps), rounds=round(config.total_inner_steps / int(steps)))
        config = replace(config, train=train)
    optimizer = replace(config.optimizer, learning_rate=config.optimizer.learning_rate * float(factor or 1))
    return way, replace(config, optimizer=optimizer)


def train(way: Way, config: Config, cache: Path, threads: int | None) -> tuple[float, float]:
    """Return the held-out loss at the end, and the bytes of a worker up and down in all rounds, with the start."""
    prepared = prepare_run(config, cache, lambda stage: None)
    executors = open_executors(config, prepared, cache, threads)
    specs, order = prepared.step.spec.params, prepared.data.order(config)
    schedule = schedule_of(config, config.total_inner_steps)
    [(held_out, _)] = prepared.data.eval_chunks(config)
    state, rounds = initial_state(specs, prepared.params, way.outer), config.train.rounds
    steps, workers = config.train.inner_steps, config.fabric.workers
    up = None if way.up == "none" else PayloadForm(way.up, specs)
    shown = None if way.down == "none" else Shown(way.down, specs, state.params)
    residuals: list[Tensors | None] = [None] * workers
    waiting: list[Contribution] = []  # delayed: of the round before
    own: list[HeldContribution | None] = [None] * workers
    often = 0  # synchronisations beyond one a round
    dense = 4.0 * sum(spec.size for spec in specs)
    for executor in executors:
        executor.load(published_params(specs, state.params), prepared.buffer_values, None)

    def averaged_every_step(round_: int, shared: Tensors) -> Tensors:
        """Train a round with an average after each step; every worker keeps its own optimizer state."""
        nonlocal often
        leases = [round_ * workers + worker for worker in range(workers)]
        shape = config.train.batch_size, config.train.sequence_length
        columns = zip(*(batches(read_slice(order.locate(lease)), *shape) for lease in leases), strict=True)
        for step, column in enumerate(columns, start=round_ * steps):
            for executor, batch in zip(executors, column, strict=True):
                executor.set_params(published_params(specs, shared))
                executor.train_step(step, schedule.rate(step), batch)
            ends = [executor.read_params() for executor in executors]
            tokens = config.targets_per_slice
            parts = [Contribution(lease, tokens, end) for lease, end in zip(leases, ends, strict=True)]
            shared = outer_step(specs, initial_state(specs, shared), parts, AVERAGING).state.params
        often += steps - 1
        return shared

    def trained(worker: int, lease: int, start: Tensors, first: int) -> Tensors:
        executor = executors[worker]
        executor.set_params(published_params(specs, start))
        pieces = batches(read_slice(order.locate(lease)), config.train.batch_size, config.train.sequence_length)
        for step, batch in enumerate(pieces, start=first):
            executor.train_step(step, schedule.rate(step), batch)
        return executor.read_params()

    with ThreadPoolExecutor(workers) as pool:
        for round_ in range(rounds):
            shared = state.params if shown is None else shown.params
            if round_ >= round(rounds * (1 - way.stepwise)):
                state = initial_state(specs, averaged_every_step(round_, shared))
                continue
            starts: list[Tensors] = [shared] * workers
            if way.delay == "eager":
                tokens = workers * config.targets_per_slice
                rate = way.outer.eager_rate()
                starts = [eager_start(specs, shared, [] if held is None else [held], tokens, rate) for held in own]
            leases = [round_ * workers + worker for worker in range(workers)]
            ends = list(pool.map(trained, range(workers), leases, starts, [round_ * steps] * workers))
            parts: list[Contribution] = []
            for worker in range(workers):
                deltas = {s.name: starts[worker][s.name] - ends[worker][s.name] for s in specs}
                task = leases[worker]
                own[worker] = HeldContribution(
                    Contribution(task, config.targets_per_slice, ends[worker]), starts[worker]
                )
                if up is not None:
                    payload, residual = up.compress(deltas, residuals[worker] if way.feedback else None)
                    residuals[worker] = residual
                    deltas = up.decode(payload, payload_digest(payload))
                if up is not None or way.delay:
                    parts.append(Contribution(task, config.targets_per_slice, deltas, form="deltas"))
                else:
                    parts.append(Contribution(task, config.targets_per_slice, ends[worker]))
            taken, waiting = (waiting, parts) if way.delay else (parts, [])
            if taken:
                rule = rule_of(MERGE_RULES.chosen(way.merge, OuterConfig()))
                state = outer_step(specs, state, taken, way.outer, rule=rule).state
                if shown is not None:
                    shown.advance(state.params)
    if waiting:  # the last round lands when nothing is trained any more
        state = outer_step(
            specs,
            state,
            waiting,
            way.outer,
            rule=rule_of(MERGE_RULES.chosen(way.merge, OuterConfig())),
        ).state
    executors[0].set_params(published_params(specs, state.params if shown is None else shown.params))
    loss = held_out_loss(executors[0], read_slice(held_out), config)
    for executor in executors:
        executor.close()
    moved = (dense if up is None else up.spec.size) + (dense if shown is None else shown.spec.size)
    return loss, float(moved) * (rounds + often) + dense


def train_star(way: Way, config: Config, cache: Path, threads: int | None) -> tuple[float, float]:
    """As `train`, for ways of the star that overlap: round r is reduced while round r + 1 is trained."""
    prepared = prepare_run(config, cache, lambda stage: None)
    executors = open_executors(config, prepared, cache, threads)
    specs, order = prepared.step.spec.params, prepared.data.order(config)
    schedule = schedule_of(config, config.total_inner_steps)
    [(held_out, _)] = prepared.data.eval_chunks(config)
    steps, workers, tokens = config.train.inner_steps, config.fabric.workers, config.targets_per_slice
    codecs = rm.Compression(up=way.up, down=way.down, start=way.start)
    count = 1 if way.fragments is None else way.fragments.count
    gateway = ParameterVersions(
        specs, initial_state(specs, prepared.params, way.outer), 0, codecs, fragments=count, optimizer=way.outer
    )
    rate = way.outer.eager_rate() if way.overlap == "eager" else 0.0
    exchanges = [
        exchange_of(specs, codecs, rate, way.fragments, eager_radial=way.merge == "rda") for _ in range(workers)
    ]
    own: list[int] = [0] * workers  # task of each worker in the round that is reduced
    moved = 0

    def take(worker: int, version: int) -> None:
        """Send a version to a worker."""
        nonlocal moved
        if version == 0 and gateway.start_digest:
            offer = start_offer(codecs.start, gateway.start_digest, specs)
        else:
            offer = gateway.change.offer(version, version - 1, [own[worker]])
        if isinstance(offer.payload, ChangeOf):
            tensors = gateway.change_of(version, offer.payload.own)
        else:
            tensors = gateway.of_version(version)
        moved += sum(array.nbytes for array in tensors.values())
        exchanges[worker].take(offer.message, tensors)

    for worker, executor in enumerate(executors):
        take(worker, 0)
        executor.load(exchanges[worker].start(), prepared.buffer_values, None)
    waiting: list[tuple[int, int, int]] = []  # contributions to the round before

    def step(round_: int) -> None:
        """Reduce what was contributed to a round."""
        gateway.take_outer_step(round_, waiting, rule_of(MERGE_RULES.chosen(way.merge, OuterConfig())))
        waiting.clear()
        gateway.keep([round_])

    def trained(worker: int, round_: int) -> tuple[Outgoing, int]:
        executor, exchange, task = executors[worker], exchanges[worker], round_ * workers + worker
        before = task - workers
        chained, mixes = round_ > 1, round_ > 1 and way.overlap == "streaming"
        if mixes:
            start = exchange.start(after=before)
        else:
            start = exchange.start((before,) if chained and rate else (), workers * tokens)
        executor.set_params(start)
        pieces = batches(
            read_slice(order.locate(task - workers)), config.train.batch_size, config.train.sequence_length
        )
        for number, batch in enumerate(pieces):
            if mixes and way.fragments is not None and number == way.fragments.delay:
                take(worker, round_ - 1)
                executor.set_params(exchange.mix(executor.read_params() if number else start, round_ - 1))
            index = (round_ - 1) * steps + number
            executor.train_step(index, schedule.rate(index), batch)
        return exchange.give(Trained(task, round_, tokens, start, executor.read_params())), task

    with ThreadPoolExecutor(workers) as pool:
        for round_ in range(1, config.train.rounds + 1):
            if way.overlap == "streaming" and waiting:  # it is reduced before the next lease's delay is over
                step(round_ - 1)
            given = list(pool.map(trained, range(workers), [round_] * workers))
            if way.overlap == "eager" and waiting:
                step(round_ - 1)
                for worker in range(workers):
                    take(worker, round_ - 1)
            for worker, (sent, task) in enumerate(given):
                result = rm.TrainResult(
                    task=task, round=round_, steps=steps, tokens=tokens, loss=0.0, grad_norm=0.0, seconds=0.0,
                    digest=sent.digest,
                )  # fmt: skip
                defect, tensors = gateway.read(result, sent.tensors)
                assert not defect, defect
                waiting.append((task, tokens, gateway.attach(tensors, sent.tensors.get(PAYLOAD), sent.digest)))
                own[worker] = task
                moved += sum(array.nbytes for array in sent.tensors.values())
            if way.overlap == "none":
                step(round_)
                for worker in range(workers):
                    take(worker, round_)
    if waiting:
        step(config.train.rounds)
    executors[0].set_params(published_params(specs, gateway.shown or gateway.state.params))
    loss = held_out_loss(executors[0], read_slice(held_out), config)
    for executor in executors:
        executor.close()
    return loss, moved / workers


def interval(gaps: list[float]) -> str:
    """Return the mean of gaps and its 90 % t-interval, in percent."""
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return f"{mean:+.2%}"
    half = T90[len(gaps) - 1] * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{mean:+.2%} [{mean - half:+.2%}, {mean + half:+.2%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inner-steps", type=int, default=30)
    parser.add_argument("--factors", default="1.0", help="of the references' rate; the best counts; empty: none")
    parser.add_argument("--references", default="one worker,data-parallel")
    parser.add_argument("--against", default="mean", help="the way whose bytes and loss others are compared with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "planetary-bench")
    given = parser.parse_args()
    seeds, ways = [int(s) for s in given.seeds.split(",")], [way for way in given.ways.split(",") if way]
    factors = [float(factor) for factor in given.factors.split(",") if factor]
    shape = [f"train.rounds={given.rounds}", f"train.inner_steps={given.inner_steps}", "train.target_minutes=0"]
    base = load_config(given.config, [*shape, *given.set])
    plainly = {"one worker": as_baseline, "data-parallel": as_parallel}
    wanted = given.references.split(",") if factors else []
    references: dict[str, list[float]] = {name: [] for name in wanted}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    began = time.monotonic()
    for seed in seeds:
        config = replace(base, run=replace(base.run, seed=seed))
        for name in wanted:
            tried = [train(Way(), plainly[name](config, factor), given.cache, given.threads)[0] for factor in factors]
            references[name].append(min(tried))
            print(f"# seed {seed}: {name} {tried}, {time.monotonic() - began:.0f} s", flush=True)
        for way in ways:
            chosen, shaped = asked(way, config)
            run = train_star if chosen.overlap else train
            found[way].append(run(chosen, shaped, given.cache, given.threads))
            print(f"# seed {seed}: {way} {found[way][-1][0]:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    if given.against in found:
        references[given.against] = [loss for loss, _ in found[given.against]]
    print(f"| way | loss by seed | {''.join(f'gap to {name}, 90 % t-interval | ' for name in references)}bytes |")
    print(f"|---|---|{'---|' * len(references)}---:|")
    for name, losses in references.items():
        if name not in found:
            print(f"| {name} | {', '.join(f'{loss:.4f}' for loss in losses)} |{' |' * (len(references) + 1)}")
    dense = found[given.against][0][1] if given.against in found else None
    for way, runs in found.items():
        cells = [interval([a / b - 1 for (a, _), b in zip(runs, other, strict=True)]) for other in references.values()]
        fewer = f"1/{dense / runs[0][1]:.1f}" if dense else "-"
        print(f"| {way} | {' | '.join([', '.join(f'{loss:.4f}' for loss, _ in runs), *cells])} | {fewer} |")
    for worse, better in CONTROLS.items():
        if {worse, better} <= set(found):
            gaps = [a / b - 1 for (a, _), (b, _) in zip(found[worse], found[better], strict=True)]
            print(f"\nnegative control, {worse} against {better}: {interval(gaps)}")


if __name__ == "__main__":
    main()
