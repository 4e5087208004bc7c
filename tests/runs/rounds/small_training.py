"""Training as a small known function; the end parameters of such a run, from the journal alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.compiler.step.step_module import TrainStep
from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FabricConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
)
from planetary.core.errors import UserError
from planetary.core.example_layout import Batch
from planetary.core.extension_points import MERGE_RULES, OVERLAPS
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.data.evaluation_sets import with_sets
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import batches_of, read_slice
from planetary.machine.journal import Record
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runs.rounds.records import (
    ContributionsJudged,
    DeltaAccepted,
    DeltaWithdrawn,
    LeaseAssigned,
    RolledBack,
    RoundClosed,
    RoundMerged,
    RoundsResumed,
    StepReplaced,
)
from planetary.runs.rounds.start import policy_of
from planetary.runtime.executor import Executor, StepResult
from planetary.sync.contributions import Contribution
from planetary.sync.fragments import Fragments, mixed
from planetary.sync.merge import rule_of
from planetary.sync.outer import initial_state, outer_step, published_params
from planetary.sync.outer_optimizers import OuterState, optimizer_of
from planetary.sync.payload import PayloadForm, payload_digest
from planetary.sync.ring import HeldContribution, eager_start, form_of, outer_step_of_sum, share

BATCH, LENGTH = 2, 4
SIZE = 8
PARAMS = (TensorSpec("w", "f32", (SIZE,)),)
_TOKENS = tuple(TensorSpec(name, "i32", (BATCH, LENGTH)) for name in ("inputs", "targets"))
STEPS = {character * 64: pull for character, pull in zip("0123", (0.1, 0.06, 0.15, 0.08), strict=True)}
"""Digests of the steps a run may have, and how far each draws the parameters; the first is that of the start."""
SPEC = StepSpec("simulated", PARAMS, (), (), _TOKENS, "0" * 64)


def spec_of(config: Config) -> StepSpec:
    """Return the signature of a run's step: one tensor, or one for each fragment, with the same eight numbers."""
    if config.sync.fragments == 1:
        return SPEC
    pieces = np.array_split(np.arange(SIZE), config.sync.fragments)
    params = tuple(TensorSpec(f"w{number}", "f32", (len(piece),)) for number, piece in enumerate(pieces))
    return msgspec.structs.replace(SPEC, params=params)


def split(spec: StepSpec, values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parameters of a small run by name: copies of runs of `values`, float32 [8]."""
    ends = np.cumsum([one.size for one in spec.params])[:-1]
    return {one.name: part.copy() for one, part in zip(spec.params, np.split(values, ends), strict=True)}


def joined(spec: StepSpec, params: Tensors) -> np.ndarray:
    """Reverse `split`."""
    return np.concatenate([params[one.name] for one in spec.params])


SOURCE_TOKENS = 6000


class SmallExecutor:
    """Eight parameters every batch draws towards a separate goal; see `Executor`."""

    device_name = "none"

    def __init__(self, spec: StepSpec = SPEC) -> None:
        """Start without parameters; `spec`: of one of `STEPS`."""
        self.spec, self._pull = spec, np.float32(STEPS[spec.stablehlo_digest])
        self._values = np.zeros(SIZE, np.float32)

    def peak_memory(self) -> int:
        return 0

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        self.set_params(params)

    def set_params(self, params: Tensors) -> None:
        self._values = joined(self.spec, params)

    def reset_opt_state(self) -> None: ...

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        difference = self._values - _goal(batch)
        self._values = (self._values - self._pull * difference).astype(np.float32)
        return StepResult(LEAST_LOSS + float(np.square(difference, dtype=np.float64).mean()), 1.0)

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        return LEAST_LOSS + float(np.square(self._values - GOAL, dtype=np.float64).mean())

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        return split(self.spec, self._values)

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None: ...


GOAL = np.linspace(3, 1, 8, dtype=np.float32)
LEAST_LOSS = 8.0  # so high the outer momentum's overshoot is no damage (`sync.sanity`)


def _goal(batch: Sequence[np.ndarray]) -> np.ndarray:
    """Return the target of a batch: the common goal plus a separate term."""
    number = int(batch[0].sum()) + 31 * int(batch[1][0, 0]) + 1
    return GOAL + np.float32(0.3) * np.sin(np.arange(8, dtype=np.float32) * np.float32(number % 997))


Sums = Mapping[bytes, Sequence[np.ndarray]]
"""The results of a ring's reductions, oldest first, by the bytes of a share in them."""


def _sum_of(shares: Sequence[np.ndarray], sums: Sums, *, coded: bool = False) -> np.ndarray:
    """Return the newest of `sums` that is the sum of `shares`; without one, their sum from the first to the last.

    `coded`: it was quantised in transit, and differs by no more than the rounding of each hop in four bits.
    """
    orders = [functools.reduce(np.add, order) for order in itertools.permutations(shares)]
    if coded:
        most = 2 * len(shares) * sum(float(np.ptp(share)) for share in shares) / 15
        near = (total for total in reversed(sums[shares[0].tobytes()]) if np.abs(total - orders[0]).max() <= most)
        return next(near)
    for total in reversed(sums.get(shares[0].tobytes(), ())):
        if total.shape == orders[0].shape and np.logical_or.reduce([total == order for order in orders]).all():
            return total
    return orders[0]


class SmallTraining:
    """A run of `SmallExecutor`s; a `planetary.simulation.rounds.training.Training`."""

    cache = None

    def __init__(self, config: Config) -> None:
        self.prepared = _prepared(config, spec_of(config))
        self.fragments = Fragments(self.spec.params, config.sync.fragments)

    def prepared_with(self, own: StepRecord | None) -> Prepared:
        return self.prepared if own is None else dataclasses.replace(_prepared(self.config, own.spec), record=own)

    def another_step(self, overrides: Sequence[str]) -> Prepared:
        """The first override is the digest of one of `STEPS`."""
        if overrides[0] not in STEPS:
            raise UserError(f"there is no step {overrides[0]!r}")
        return _prepared(self.config, msgspec.structs.replace(self.spec, stablehlo_digest=overrides[0]))

    def artifact(self, store: BlobStore, spec: StepSpec) -> str:
        return store.put(b"a small known function, " + spec.stablehlo_digest.encode())

    def open_executor(self, spec: StepSpec) -> Executor:
        return SmallExecutor(spec)

    @property
    def spec(self) -> StepSpec:
        """Of the step."""
        return self.prepared.step.spec

    @property
    def config(self) -> Config:
        """Of the run."""
        return self.prepared.config

    def start(self) -> OuterState:
        """Return the state before the first round."""
        optimizer, codec = optimizer_of(self.config.outer), self.config.sync.start_compression
        state = initial_state(self.spec.params, self.prepared.params, optimizer)
        if codec == "none":
            return state
        form = PayloadForm(codec, self.spec.params)
        payload = form.encode(state.params)
        return msgspec.structs.replace(state, params=form.decode(payload, payload_digest(payload)))

    def trained(
        self, params: Tensors, *leases: int, mix: Callable[[Tensors], Tensors] | None = None, step: str = ""
    ) -> dict[str, np.ndarray]:
        """Return the parameters after the training of leases, in order, from `params`, with the step of that digest.

        `mix` returns the parameters to go on with after the delay of a fragment.
        """
        executor = SmallExecutor(
            msgspec.structs.replace(self.spec, stablehlo_digest=step or self.spec.stablehlo_digest)
        )
        executor.set_params(params)
        parts = self.config.leases_per_slice
        batches = [batch for lease in leases for batch in _batches(self.config.train.inner_steps, parts, lease)]
        for number, batch in enumerate(batches):
            if mix is not None and number == self.config.sync.delay:
                executor.set_params(mix(executor.read_params()))
            executor.train_step(0, 0.0, batch)
        if mix is not None and self.config.sync.delay == self.config.train.inner_steps:
            executor.set_params(mix(executor.read_params()))
        return executor.read_params()

    def outer_step(
        self,
        state: OuterState,
        round_: int,
        parts: Sequence[tuple[str, HeldContribution]],
        rule: str,
        *,
        sums: Sums,
        peers: int,
    ) -> OuterState:
        """Return the state after a round, from each worker's contributions, merged by a rule of that name.

        `peers`: that reduced it in a ring; 0: it was reduced in a star.
        """
        config, optimizer = self.config, optimizer_of(self.config.outer)
        if not peers:
            contributions = [held.contribution for _, held in parts]
            merge = rule_of(MERGE_RULES.chosen(rule, config.outer))
            specs = self.fragments.of_round(round_)
            return state.updated(outer_step(specs, state, contributions, optimizer, rule=merge).state)
        overlap = OVERLAPS.find(config.sync.overlap).overlaps
        radial = MERGE_RULES.find(config.outer.merge).radial
        form = form_of(config.sync.precision, peers, overlap=overlap, radial=radial, contributions=len(parts))
        tokens = sum(held.contribution.tokens for _, held in parts)
        workers = sorted({worker for worker, _ in parts})
        coded = config.sync.ring_compression != "none" and peers > 1
        shares = [share(PARAMS, [held for of, held in parts if of == worker], tokens, form) for worker in workers]
        total = _sum_of(shares, sums, coded=coded)
        return outer_step_of_sum(PARAMS, state, (total, form), optimizer).state

    def _held(
        self,
        record: DeltaAccepted,
        assigned: tuple[LeaseAssigned, str],
        states: Mapping[int, OuterState],
        held: Mapping[int, HeldContribution],
        ends_of: dict[int, Tensors],
    ) -> HeldContribution:
        """Return an accepted task's contribution and the start parameters; streaming: add the ends to `ends_of`.

        `assigned`: the record of the lease, and the digest of the step in use then.
        """
        begun, step = assigned
        if OVERLAPS.find(self.config.sync.overlap).fragmented:
            return self._streamed(record, begun, states, ends_of)
        start: Tensors = states[begun.version].params
        if begun.ahead:
            own, rate = [held[task] for task in begun.ahead], optimizer_of(self.config.outer).eager_rate()
            radial = MERGE_RULES.find(self.config.outer.merge).radial
            start = eager_start(PARAMS, start, own, begun.ahead_tokens, rate, radial=radial)
        ends = self.trained(published_params(PARAMS, start), record.lease, *record.more, step=step)
        if self.config.sync.compression == "none":
            return HeldContribution(Contribution(record.task, record.tokens, ends), start)
        deltas = {name: start[name] - values for name, values in ends.items()}
        return HeldContribution(Contribution(record.task, record.tokens, deltas, form="deltas"), {})

    def _streamed(
        self,
        record: DeltaAccepted,
        begun: LeaseAssigned,
        states: Mapping[int, OuterState],
        ends_of: dict[int, Tensors],
    ) -> HeldContribution:
        def mixed_in(own: Tensors, version: int, newest: int) -> Tensors:
            shared, alpha = states[newest].params, self.config.sync.mixing
            of_round = self.fragments.of_round(version)
            return {**own, **{s.name: mixed(s, own[s.name], shared[s.name], alpha) for s in of_round}}

        def mix(own: Tensors) -> Tensors:
            return mixed_in(own, begun.mixes, begun.mixes)

        start = ends_of[begun.after] if begun.after else states[begun.version].params
        for version in self.fragments.one_each(begun.missed):
            start = mixed_in(start, version, begun.version)
        ends = self.trained(start, record.lease, *record.more, mix=mix if begun.mixes >= 0 else None)
        ends_of[record.task] = ends
        specs, weight = self.fragments.of_round(record.round), record.tokens // (1 + record.stale)
        sent = {spec.name: ends[spec.name] for spec in specs}
        if self.config.sync.compression == "none":
            return HeldContribution(Contribution(record.task, weight, sent), {})
        newest = max(begun.version, begun.mixes)
        deltas = {name: states[newest].params[name] - values for name, values in sent.items()}
        return HeldContribution(Contribution(record.task, weight, deltas, form="deltas"), {})

    @property
    def _is_exact(self) -> bool:
        """Whether the journal alone determines the parameters that workers sent and received."""
        sync = self.config.sync
        return sync.compression in ("none", "float32") and sync.broadcast_compression == "none"

    def replay(
        self, journal: Iterable[Record], received: Mapping[int, Tensors] | None = None, sums: Sums | None = None
    ) -> dict[str, np.ndarray]:
        """Compute the final parameters from the journal, following resumes back to their checkpoints.

        Args:
            journal: of the run.
            received: with a lossy codec, the deltas the gateway received, by task: the rest a worker keeps back depends
                on results the journal does not know.
            sums: of a ring, as the workers received them: the journal does not know the order of additions. Each one
                that is taken is the sum of the shares in one of the possible orders.
        """
        states = {0: self.start()}
        accepted: list[DeltaAccepted] = []
        begun: dict[int, tuple[LeaseAssigned, str]] = {}  # task -> start, and the step in use
        held: dict[int, HeldContribution] = {}  # task -> contribution
        ends_of: dict[int, Tensors] = {}  # streaming: task -> all end parameters
        rules: dict[int, str] = {}  # round -> merge rule of the contributions
        round_, step = 0, SPEC.stablehlo_digest
        for record in journal:
            match record:
                case StepReplaced():
                    assert (record.round, record.before) == (round_, step)
                    step = record.model
                case RoundsResumed() | RolledBack():
                    round_ = record.mark.round
                    accepted = []
                case LeaseAssigned():
                    begun[record.task] = record, step
                case ContributionsJudged():
                    rules[record.round] = record.rule
                case DeltaAccepted():
                    accepted.append(record)
                    if self._is_exact:
                        held[record.task] = self._held(record, begun[record.task], states, held, ends_of)
                case DeltaWithdrawn():
                    accepted = [a for a in accepted if a.task != record.task]
                case RoundClosed():
                    parts = []
                    for a in (a for a in accepted if a.round == record.round):
                        if not self._is_exact:
                            assert received is not None
                            delta = Contribution(a.task, a.tokens // (1 + a.stale), received[a.task], form="deltas")
                            parts.append((a.worker, HeldContribution(delta, {})))
                            continue
                        parts.append((a.worker, held[a.task]))
                    rule = rules.get(record.round, "mean")
                    states[record.round] = self.outer_step(
                        states[round_], record.round, parts, rule, sums=sums or {}, peers=record.peers
                    )
                    accepted = [a for a in accepted if a.round != record.round]
                case RoundMerged():
                    round_ = record.round
                case _:
                    pass
        return dict(states[round_].params)


def _prepared(config: Config, spec: StepSpec) -> Prepared:
    made = StepRecord(made_from="", environment="", sources={}, spec=spec, params="", buffers="")
    params = split(spec, np.linspace(-1, 1, SIZE, dtype=np.float32))
    return Prepared(config, with_sets(config, _small_data()), TrainStep("", spec, b""), params, {}, made)


def small_training(
    *,
    rounds: int,
    workers: int,
    inner_steps: int = 4,
    checkpoint_every: int = 1,
    eval_every: int = 1,
    ring: bool = False,
    overlap: bool = False,
    max_epochs: int = 0,
    given: Sequence[str] = (),
) -> SmallTraining:
    """Return a small run of `workers` workers; `given`: settings of other keys, as of `--set`."""
    config = Config(
        run=RunConfig(name="sim"),
        data=DataConfig(source=str(_source()), max_epochs=max_epochs),
        train=TrainConfig(
            rounds=rounds, inner_steps=inner_steps, batch_size=BATCH, sequence_length=LENGTH, inner_state="reset"
        ),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0),
        # With overlap the outer step is one late, and on this function it overshoots without end.
        outer=OuterConfig(learning_rate=0.7, momentum=0.9, loss_rise=0.0 if overlap else 0.25),
        fabric=FabricConfig(workers=workers, latency_budget_s=2.0, abandon_after_s=120.0),
        sync=SyncConfig(
            topology="ring" if ring or overlap else "star",
            overlap="async" if overlap else "none",
            precision="f32" if overlap else "f64",
        ),
        checkpoint=CheckpointConfig(every=checkpoint_every),
        eval=EvalConfig(every=eval_every, batches=workers),
    )
    return SmallTraining(apply_overrides(config, given) if given else config)


def small_policy(*, rounds: int, workers: int) -> ControllerPolicy:
    """Return the constants of the controller of such a run."""
    training = small_training(rounds=rounds, workers=workers)
    return policy_of(training.config, training.prepared)


@functools.lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="planetary-small-training-")


def _source() -> Path:
    path = Path(_folder().name) / "tokens.u16"
    if not path.exists():
        path.write_bytes((np.arange(SOURCE_TOKENS, dtype=np.uint32) * 40_503 % 251).astype("<u2").tobytes())
    return path


@functools.lru_cache(maxsize=1)
def _small_data() -> PreparedData:
    """Return tokens that all small runs are trained on."""
    return prepare(small_config(), Path(_folder().name) / "data")


def small_config() -> Config:
    """Return the configuration the data of small runs depends on."""
    train = TrainConfig(batch_size=BATCH, sequence_length=LENGTH)
    return Config(data=DataConfig(source=str(_source())), train=train)


@functools.lru_cache(maxsize=4096)
def _batches(inner_steps: int, parts: int, lease: int) -> tuple[Batch, ...]:
    config = small_config()
    order = _small_data().order(config, inner_steps * config.tokens_per_batch)
    order = msgspec.structs.replace(order, parts=parts)
    return tuple(batches_of(SPEC.batch, read_slice(order.locate(lease)), None))


def encode_story(journal: Iterable[Record]) -> bytes:
    """Return the journal as bytes, for comparing two runs."""
    return b"\n".join(msgspec.json.encode(record) for record in journal)
