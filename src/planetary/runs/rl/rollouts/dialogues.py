"""The rollouts of a run at the gateway: prompts, completions and replies, token by token, with versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from planetary.core.errors import RemoteProtocolError, UserError
from planetary.core.tensors import Tensors
from planetary.data.tokenizer import Tokenizer
from planetary.runs.rl.environments.judge_process import Case
from planetary.runs.rl.environments.judging import Judged
from planetary.runs.rl.environments.problems import Problems
from planetary.runs.rl.environments.tasks import Problem
from planetary.runs.rl.prompt_groups import HELD_OUT_ANSWERS
from planetary.runs.rl.rollouts.packing import TrainedRollout


class RolloutLimits(msgspec.Struct, frozen=True):
    """Limits of rollouts.

    Attributes:
        window: tokens of a whole rollout at most.
        most: tokens of a completion at most.
        vocabulary: tokens below it can be drawn.
        ends: tokens that end a completion; the first of them ends an imitated answer.
        begins: tokens before every prompt.
    """

    window: int
    most: int
    vocabulary: int
    ends: tuple[int, ...]
    begins: tuple[int, ...] = ()


@dataclass
class Turn:
    """Tokens generated at once: `count` from the position `start` on, drawn with `seed` at `temperature`, 0 or 1."""

    start: int
    count: int
    seed: int
    temperature: float


@dataclass
class Dialogue:
    """One completion of a prompt, in one turn or several.

    Attributes:
        problem: the prompt, answer and meta data.
        tokens: of the whole rollout.
        own: whether each token is the policy's.
        sampled: log-probability with which each own token was drawn; 0 elsewhere.
        versions: of the weights that drew each own token; -1 elsewhere.
        turns: generated so far.
        completions: completed rollouts, without the ending tokens.
        reward: None while it goes on, and where the environment gave none.
        ended: whether nothing is generated any more.
        problem_found: failure of the environment; "": none.
    """

    problem: Problem
    tokens: list[int]
    own: list[bool] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    reward: float | None = None
    ended: bool = False
    problem_found: str = ""

    def __post_init__(self) -> None:
        """The tokens of a prompt are not the policy's own."""
        count = len(self.tokens)
        self.own, self.sampled, self.versions = [False] * count, [0.0] * count, [-1] * count

    def extend(self, tokens: Sequence[int], sampled: Sequence[float], version: int, *, own: bool) -> None:
        """Append tokens."""
        self.tokens += tokens
        self.own += [own] * len(tokens)
        self.sampled += sampled
        self.versions += [version] * len(tokens)


class Rollouts:
    """The rollouts of all groups that are neither trained nor dropped. Used from one thread at a time."""

    def __init__(
        self, problems: Problems, tokenizer: Tokenizer, limits: RolloutLimits, seed: int, completions: int
    ) -> None:
        """`seed`: of the run; `completions`: of a training group's prompt."""
        self._problems, self._tokenizer, self._limits = problems, tokenizer, limits
        self._seed, self._completions = seed, completions
        self._groups: dict[tuple[bool, int], list[Dialogue]] = {}

    def group(self, held_out: bool, number: int) -> list[Dialogue]:
        """Return a group's dialogues; made when they are first asked for. Raises `UserError` for too long a prompt."""
        key = (held_out, number)
        if key not in self._groups:
            problem = self._problems.held_out(number) if held_out else self._problems.train(number)
            tokens = self._encoded_prompt(problem)
            count = HELD_OUT_ANSWERS if held_out else self._completions
            self._groups[key] = [Dialogue(problem, list(tokens)) for _ in range(count)]
        return self._groups[key]

    def forget(self, held_out: bool, numbers: Iterable[int]) -> None:
        """Let groups go."""
        for number in numbers:
            self._groups.pop((held_out, number), None)

    def going_on(self, held_out: bool, numbers: Iterable[int]) -> list[Dialogue]:
        """Return the dialogues of groups that have not ended, in order."""
        return [one for number in numbers for one in self.group(held_out, number) if not one.ended]

    def drawings(self, held_out: bool, numbers: Sequence[int]) -> tuple[list[int], list[int], list[float]]:
        """Return seed, most tokens and temperature of each rollout that goes on, in order."""
        seeds, most, temperatures = [], [], []
        for number in numbers:
            for member, one in enumerate(self.group(held_out, number)):
                if not one.ended:
                    seeds.append(self._seed_of(held_out, number, member, len(one.turns)))
                    most.append(self._room(one))
                    temperatures.append(_temperature(held_out, member))
        return seeds, most, temperatures

    def to_sample(self, held_out: bool, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the rollouts that are to be continued, as `SampleRollouts` describes them."""
        rollouts = [one.tokens for one in self.going_on(held_out, numbers)]
        seeds, most, temperatures = self.drawings(held_out, numbers)
        return {
            "tokens": np.array([token for rollout in rollouts for token in rollout], np.int32),
            "lengths": np.array([len(rollout) for rollout in rollouts], np.int32),
            "seeds": np.array(seeds, np.uint32),
            "most": np.array(most, np.int32),
            "temperatures": np.array(temperatures, np.float32),
        }

    def take(self, held_out: bool, numbers: Sequence[int], version: int, arrays: Tensors) -> list[Dialogue]:
        """Append sampled completions to their dialogues; return these.

        Raises:
            RemoteProtocolError: they are no completions of these rollouts; nothing was appended.
        """
        dialogues = self.going_on(held_out, numbers)
        tokens, logprobs, lengths = (arrays.get(name) for name in ("tokens", "logprobs", "lengths"))
        if (
            tokens is None
            or logprobs is None
            or lengths is None
            or (tokens.dtype, logprobs.dtype, lengths.dtype) != (np.int32, np.float32, np.int32)
            or lengths.shape != (len(dialogues),)
            or tokens.ndim != 1
            or tokens.shape != logprobs.shape
            or (lengths < 1).any()
            or lengths.sum() != len(tokens)
        ):
            raise RemoteProtocolError(f"sampled rollouts: expected {len(dialogues)} completions of a token or more")
        if (tokens < 0).any() or (tokens >= self._limits.vocabulary).any():
            raise RemoteProtocolError(f"a sampled token is not below {self._limits.vocabulary}")
        if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
            raise RemoteProtocolError("a log-probability of a sampled token is not finite, or above 0")
        borders = np.cumsum(lengths)[:-1]
        parts = list(zip(dialogues, np.split(tokens, borders), np.split(logprobs, borders), strict=True))
        for one, own, _ in parts:
            ended = own[-1] in self._limits.ends
            if len(own) > self._room(one) or np.isin(own[:-1], self._limits.ends).any():
                raise RemoteProtocolError("a completion goes on after its end")
            if not ended and len(own) < self._room(one):
                raise RemoteProtocolError("a completion stops before its end")
        members = [(n, i) for n in numbers for i, one in enumerate(self.group(held_out, n)) if not one.ended]
        for (one, own, values), (number, member) in zip(parts, members, strict=True):
            seed = self._seed_of(held_out, number, member, len(one.turns))
            one.turns.append(Turn(len(one.tokens), len(own), seed, _temperature(held_out, member)))
            shown = own[:-1] if own[-1] in self._limits.ends else own
            one.completions.append(self._tokenizer.decode(shown.tolist()).decode("utf-8", "replace"))
            one.extend(own.tolist(), values.tolist(), version, own=True)
        return dialogues

    def untake(self, dialogues: Iterable[Dialogue]) -> None:
        """Undo the newest turn of dialogues: the tokens do not count."""
        for one in dialogues:
            turn = one.turns.pop()
            one.completions.pop()
            for part in (one.tokens, one.own, one.sampled, one.versions):
                del part[turn.start :]

    @staticmethod
    def cases(dialogues: Iterable[Dialogue]) -> list[Case]:
        """Return the cases the environment judges, one a dialogue."""
        return [Case(one.problem.prompt, tuple(one.completions), dict(one.problem.meta)) for one in dialogues]

    def settle(self, dialogues: Iterable[Dialogue], verdicts: Iterable[Judged]) -> None:
        """Append replies, or take rewards, of dialogues in order."""
        for one, verdict in zip(dialogues, verdicts, strict=True):
            if verdict.reply is None:
                one.ended, one.reward, one.problem_found = True, verdict.reward, verdict.problem
                continue
            reply = self._tokenizer.encode(verdict.reply.encode()).tolist()
            if len(one.tokens) + len(reply) >= self._limits.window:
                one.ended, one.problem_found = True, "its reply is longer than the context"
                continue
            one.extend(reply, [0.0] * len(reply), -1, own=False)

    # --- training ---------------------------------------------------------------------------------------------

    def trained(self, numbers: Iterable[int]) -> list[list[TrainedRollout]]:
        """Return the rollouts of training groups with their rewards."""
        return [
            [
                TrainedRollout(one.tokens, one.own, one.sampled, float("nan") if one.reward is None else one.reward)
                for one in self.group(False, number)
            ]
            for number in numbers
        ]

    def answered(self, numbers: Iterable[int]) -> list[list[TrainedRollout]]:
        """Return the answers of training groups' prompts. Raises `UserError` for a prompt without one."""
        found = []
        for number in numbers:
            problem = self._problems.train(number)
            if not problem.answer:
                raise UserError("rl.imitated_rounds needs prompts with an answer, and one has none")
            prompt = self._encoded_prompt(problem)
            answer = [*self._tokenizer.encode(problem.answer.encode()).tolist(), self._limits.ends[0]]
            tokens = [*prompt, *answer]
            if len(tokens) > self._limits.window:
                raise UserError(
                    f"a prompt with its answer has {len(tokens)} tokens, and rollouts may have {self._limits.window}: "
                    "raise train.sequence_length"
                )
            own = [False] * len(prompt) + [True] * len(answer)
            found.append([TrainedRollout(tokens, own, [0.0] * len(tokens), 1.0)])
        return found

    # --- small things -----------------------------------------------------------------------------------------

    def _encoded_prompt(self, problem: Problem) -> list[int]:
        tokens = [*self._limits.begins, *self._tokenizer.encode(problem.prompt.encode()).tolist()]
        if not 0 < len(tokens) < self._limits.window:
            raise UserError(
                f"a prompt has {len(tokens)} tokens: expected 1 to {self._limits.window - 1}, as "
                f"train.sequence_length leaves room for; it begins {problem.prompt[:40]!r}"
            )
        return tokens

    def _room(self, one: Dialogue) -> int:
        return min(self._limits.most, self._limits.window - len(one.tokens))

    def _seed_of(self, held_out: bool, number: int, member: int, turn: int) -> int:
        text = f"{self._seed} {held_out} {number} {member} {turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _temperature(held_out: bool, member: int) -> float:
    return 0.0 if held_out and member == 0 else 1.0


def outcome_of(dialogues: Sequence[Dialogue]) -> Mapping[str, object]:
    """Return the fields of a `GroupOutcome`: whether the group goes on, rewards, and problems, each once."""
    if not all(one.ended for one in dialogues):
        return {"goes_on": True}
    problems = tuple(dict.fromkeys(one.problem_found for one in dialogues if one.problem_found))
    return {"rewards": tuple(one.reward for one in dialogues), "problems": problems}
