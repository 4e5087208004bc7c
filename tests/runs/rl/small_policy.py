"""A policy that is one table, in a few lines of NumPy; the parameters of such a run, from the journal alone.

The next token's logits are the row of the last token. So a text is a function of weights, seed and prompt, a training
step of weights and batch, and every version of a run can be computed again and must be equal bit for bit.

Shapes are written with B = texts of a call, R = rows of a training batch, T = tokens of a text but the first.
"""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from known_program import KnownProgram
from planetary.artifacts.store import BlobStore
from planetary.compiler.frontend.manifest import Manifest
from planetary.core.configuration.schema import (
    CheckpointConfig,
    Config,
    EvalConfig,
    FabricConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    TrainConfig,
)
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.machine.journal import Record
from planetary.models.context import CacheSizes
from planetary.runs.rl.config import RlConfig
from planetary.runs.rl.environments.judging import Judged
from planetary.runs.rl.environments.tasks import Problem
from planetary.runs.rl.loaded_policy import LoadedPolicy, RolloutStart, sample
from planetary.runs.rl.messages import LearnRollouts
from planetary.runs.rl.objectives.objective import IMITATION
from planetary.runs.rl.objectives.terms import LossTerms
from planetary.runs.rl.preparation import PreparedPolicy, objective_of
from planetary.runs.rl.program.shape import SCORE, TRAIN, PolicyShape
from planetary.runs.rl.records import GroupSampled, GroupsLearned, ImitationEnded
from planetary.runs.rl.rollouts.dialogues import RolloutLimits, Rollouts
from planetary.runs.rl.rollouts.packing import pack
from planetary.runs.rounds.events import TakeOuterStep
from planetary.runs.rounds.preparation.whole_versions import WholeVersions
from planetary.runs.rounds.records import RoundClosed, TrainingResumed
from planetary.runs.rounds.worker.inner_state import InnerStates
from planetary.runs.serve.program.shape import PAGE, ServingShape
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runtime.device_program import DeviceProgram
from planetary.sync.outer import initial_state
from planetary.sync.outer_optimizers import OuterState, optimizer_of

VOCABULARY = 11
"""The digits, and the line end that ends a text."""
END = 10
LENGTH, ROWS, MOST = 7, 8, 4
TABLE = TensorSpec("table", "f32", (VOCABULARY, VOCABULARY))
COUNT = TensorSpec("count", "i32", ())
"""State of the optimizer: the number of steps. It survives a worker's death and changes nothing."""


class DigitTokens:
    """A token is a digit or the line end; see `Tokenizer`."""

    vocab_size, end_of_document, digest = VOCABULARY, None, "digits"
    added = ((), ())
    special: frozenset[int] = frozenset()

    def encode(self, text: bytes) -> np.ndarray:
        return np.array([END if byte == ord("\n") else byte - ord("0") for byte in text], np.uint32)

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(ord("\n") if one == END else ord("0") + one for one in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token])

    def to_json(self) -> bytes:
        return b"{}"


class DigitProblems:
    """Prompts of two digits, of which the second is wanted plus one; see `Problems`."""

    held_out_count = 3

    def train(self, number: int) -> Problem:
        return _problem(7 * number)

    def held_out(self, number: int) -> Problem:
        return _problem(31 * number + 5)


def _problem(number: int) -> Problem:
    answer = str((number + 1) % 10)
    return Problem(f"{number // 10 % 10}{number % 10}", answer, {"answer": answer})


def reward_of(completion: str, meta: Mapping[str, Any]) -> float:
    """Return 1 for the answer, and else less the further the first digit is away."""
    if completion == meta["answer"]:
        return 1.0
    return 0.05 * (9 - abs(int(completion[0]) - int(meta["answer"]))) if completion.strip() else 0.0


def decode(params: Any, tokens: Any, context: Any) -> Any:
    """Return the logits of the token after each; see `models.context`."""
    return context.wanted(params["table"][tokens])


class SmallPolicyProgram(KnownProgram):
    """The functions of a policy in NumPy."""

    def __init__(self, functions: Mapping[str, FunctionSpec]) -> None:
        """`functions`: signatures by name."""
        super().__init__(b"a small known policy", functions)

    def results(self, function: str, given: dict[str, np.ndarray]) -> Mapping[str, Any]:
        return {TRAIN: _trained, SCORE: _scored}.get(function, _continued)(given)


def _rows(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return log-probabilities f32 [..., V] of the token after each; no row depends on the others of a call."""
    logits = table[tokens]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _continued(given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    last = np.take_along_axis(given["tokens"], given["length"][:, None] - 1, axis=1)[:, 0]
    row = _rows(given["table"], last)
    ids = row.argmax(axis=-1)[:, None]
    return {"cache": given["cache"], "values": np.take_along_axis(row, ids, axis=1), "ids": ids, "row": row}


def _scored(given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    rows = _rows(given["table"], given["tokens"][:, :-1])
    chosen = np.take_along_axis(rows, given["tokens"][:, 1:, None], axis=2)[..., 0]
    return {"logprobs": chosen, "entropy": -(np.exp(rows) * rows).sum(axis=-1)}


def _trained(given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Take a step of gradient ascent of the unclipped surrogate, the likelihood, and the KL from a reference."""
    names = LossTerms.__struct_fields__
    surrogate, likelihood, reference = (
        given["terms"][:, names.index(name)][:, None] for name in ("surrogate", "likelihood", "reference")
    )
    rows = _rows(given["table"], given["tokens"][:, :-1])
    targets = given["tokens"][:, 1:]
    chosen = np.take_along_axis(rows, targets[..., None], axis=2)[..., 0]
    ratio = np.exp(np.where(given["weights"] > 0, chosen - given["sampled"], 0))
    away = np.exp(np.where(given["weights"] > 0, given["reference"] - chosen, 0))
    force = given["weights"] * (given["advantages"] * (surrogate * ratio + likelihood) - reference * (1 - away))
    slopes = force[..., None] * ((targets[..., None] == np.arange(VOCABULARY)) - np.exp(rows))
    gradient = np.zeros_like(given["table"])
    np.add.at(gradient, given["tokens"][:, :-1].ravel(), slopes.reshape(-1, VOCABULARY).astype(np.float32))
    return {
        "table": given["table"] + given["rate"] * gradient,
        "count": given["count"] + 1,
        "loss": -(given["weights"] * given["advantages"] * (surrogate * ratio + likelihood * chosen)).sum(),
        "grad_norm": np.sqrt(np.square(gradient, dtype=np.float64).sum()),
    }


class SmallPolicy:
    """A run of `SmallPolicyProgram`s, and the results determined by the journal."""

    def __init__(self, config: Config) -> None:
        serving = ServingShape(
            vocabulary=VOCABULARY,
            window=PAGE,
            pages=9,
            page_shape=(1,),
            batches=(8,),
            chunks=(PAGE,),
            prefills=(8,),
            context_sizes=(1,),
            most_candidates=1,
            scores_prompts=False,
        )
        shape = PolicyShape(serving, ROWS, LENGTH)
        functions = shape.functions((TABLE,), (COUNT,))
        self.run = SmallPolicyProgram(functions)
        table = np.sin(np.arange(TABLE.size, dtype=np.float32)).reshape(TABLE.shape)
        model = TracedModel(
            name="table",
            decode=decode,
            params={"table": table},
            specs=(TABLE,),
            sizes=CacheSizes(1, 1, 1),
            vocabulary=VOCABULARY,
            window=PAGE,
            tokenizer=DigitTokens(),
            ends=frozenset({END}),
        )
        self.prepared = PreparedPolicy(
            config=config,
            model=model,
            reference=_reference(config, table),
            problems=DigitProblems(),
            objective=objective_of(config),
            shape=shape,
            limits=RolloutLimits(window=LENGTH + 1, most=MOST, vocabulary=VOCABULARY, ends=(END,)),
            program=self.run.program,
            state=(COUNT,),
            manifest=Manifest(model="table", arguments=()),
        )

    @property
    def _compares(self) -> tuple[bool, bool]:
        """Whether steps compare with a reference, and whether it is a teacher."""
        objective = self.prepared.objective
        return objective.terms.reference > 0 or objective.teacher, objective.teacher

    def artifact(self, store: BlobStore) -> str:
        """Return the digest of the blob that workers load; the store has it."""
        return store.put(b"a small known policy")

    def open_program(self) -> DeviceProgram:
        """Return the program on a worker's device."""
        return self.run

    def judge(self, completions: Sequence[str], meta: Mapping[str, Any]) -> Judged:
        """Return the verdict of the environment."""
        return Judged(reward=reward_of(completions[-1], meta))

    def replay(self, journal: Iterable[Record]) -> dict[int, np.ndarray]:
        """Return the table of every version that counts, by version, from the records alone."""
        config, prepared = self.prepared.config, self.prepared
        optimizer = optimizer_of(config.outer)
        outer: dict[int, OuterState] = {0: initial_state((TABLE,), prepared.model.arrays(), optimizer)}
        sampled: dict[int, int] = {}  # group -> version
        shares: dict[int, list[GroupsLearned]] = defaultdict(list)  # groups by round
        imitated = config.of(RlConfig).imitated_rounds
        for record in journal:
            match record:
                case ImitationEnded():
                    imitated = record.version
                case GroupSampled():
                    sampled[record.group] = record.version
                case GroupsLearned():
                    shares[record.round].append(record)
                case RoundClosed():
                    before = outer[record.round - 1]
                    parameters = WholeVersions((TABLE,), before, record.round - 1, optimizer)
                    parts = []
                    for share in sorted(shares.pop(record.round), key=lambda one: one.task):
                        imitates = record.round <= imitated
                        versions = {} if imitates else {group: sampled[group] for group in share.groups}
                        weights = {version: outer[version].params for version in versions.values()}
                        compared = prepared.reference or outer[min(imitated, record.round - 1)].params
                        ends = self._learned(share, weights, versions, before.params, compared)
                        parts.append((share.task, share.tokens, parameters.attach(ends)))
                    step = TakeOuterStep(record.round, config.outer.merge, tuple(parts))
                    parameters.step(config.outer, config.train.batch_size * config.of(RlConfig).max_tokens, step)
                    outer[record.round] = parameters.state
                case TrainingResumed():
                    outer = {version: state for version, state in outer.items() if version <= record.mark.round}
                    shares.clear()
                    if imitated > record.mark.round:
                        imitated = config.of(RlConfig).imitated_rounds
                case _:
                    pass
        return {version: state.params["table"] for version, state in outer.items()}

    def _learned(
        self,
        share: GroupsLearned,
        weights: Mapping[int, Tensors],
        versions: Mapping[int, int],
        before: Tensors,
        compared: Tensors,
    ) -> Tensors:
        """Return the end parameters of a share: the rollouts are sampled, judged and trained again.

        Args:
            share: of a round.
            weights: by version.
            versions: the version that sampled each group; none: the groups are imitated.
            before: parameters before the round.
            compared: parameters of the reference.
        """
        config, prepared = self.prepared.config, self.prepared
        texts = Rollouts(
            prepared.problems,
            prepared.model.tokenizer,
            prepared.limits,
            config.run.seed,
            config.of(RlConfig).completions,
        )
        with tempfile.TemporaryDirectory() as folder:
            kept = InnerStates(Path(folder), (COUNT,))
            policy = LoadedPolicy(self.run, prepared.shape, (COUNT,), kept=kept, persists=False, now=lambda: 0.0)
            for group, version in versions.items():
                policy.use(version, weights[version])
                policy.require(version)
                texts.take(False, (group,), version, self._sampled(policy, texts, group))
                members = texts.group(False, group)
                texts.settle(members, [self.judge(one.completions, one.problem.meta) for one in members])
            groups = texts.trained(share.groups) if versions else texts.answered(share.groups)
            objective = prepared.objective if versions else IMITATION
            batches = pack(groups, objective, prepared.shape, config.of(RlConfig).max_tokens)
            arrays = {name: np.stack([one.arrays[name] for one in batches]) for name in batches[0].arrays}
            policy.use(share.version, before)
            policy.use_reference(compared)
            compares, teaches = self._compares
            message = LearnRollouts(
                task=share.task,
                round=share.round,
                version=share.version,
                first_step=share.round - 1,
                rate=config.of(RlConfig).learning_rate if versions else config.optimizer.learning_rate,
                reference=compares and bool(versions),
                teacher=teaches and bool(versions),
                staleness=objective.staleness,
            )
            return policy.learn(message, arrays).parameters

    def _sampled(self, policy: LoadedPolicy, texts: Rollouts, group: int) -> dict[str, np.ndarray]:
        starts = [
            RolloutStart(tuple(one.tokens), seed, most, temperature)
            for one, seed, most, temperature in zip(
                texts.going_on(False, (group,)), *texts.drawings(False, (group,)), strict=True
            )
        ]
        found = sample(policy.sampling, self.prepared.shape.serving, VOCABULARY, starts, ends=(END,))
        return {
            "tokens": np.array([token for one in found for token in one.tokens], np.int32),
            "logprobs": np.array([value for one in found for value in one.logprobs], np.float32),
            "lengths": np.array([len(one.tokens) for one in found], np.int32),
        }


def _reference(config: Config, table: np.ndarray) -> dict[str, np.ndarray] | None:
    """Return the parameters a run compares with from the start: the teacher's, or the initial ones."""
    if config.of(RlConfig).objective == "distillation":
        return {"table": np.cos(np.arange(TABLE.size, dtype=np.float32)).reshape(TABLE.shape)}
    return None if config.of(RlConfig).imitated_rounds else {"table": table}


AVERAGED = OuterConfig(learning_rate=1.0, momentum=0.0, merge="mean")


@functools.lru_cache(maxsize=16)
def small_policy(
    *,
    rounds: int,
    workers: int = 3,
    imitated: int = 2,
    lag: int = 2,
    ahead: int = 0,
    verified: float = 0.25,
    checkpoint_every: int = 2,
    inner_steps: int = 1,
    objective: Literal["dr-grpo", "dapo", "topr", "distillation"] = "dr-grpo",
    kl: float = 0.0,
    imitation_goal: float = 0.0,
    outer: OuterConfig = AVERAGED,
) -> SmallPolicy:
    """Return a small policy; see the keys of `[rl]`."""
    rl = RlConfig(
        task="reverse",
        objective=objective,
        kl=kl,
        imitation_goal=imitation_goal,
        groups=4,
        completions=3,
        max_tokens=MOST,
        learning_rate=2.0,
        imitated_rounds=imitated,
        lag=lag,
        ahead=ahead,
        held_out=DigitProblems.held_out_count,
        verified=verified,
    )
    config = Config(
        run=RunConfig(name="sim"),
        train=TrainConfig(rounds=rounds, inner_steps=inner_steps, batch_size=ROWS, sequence_length=LENGTH),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0, learning_rate=0.5),
        outer=outer,
        fabric=FabricConfig(workers=workers, latency_budget_s=2.0, abandon_after_s=120.0),
        checkpoint=CheckpointConfig(every=checkpoint_every),
        eval=EvalConfig(every=3),
    )
    return SmallPolicy(config.having(rl))
