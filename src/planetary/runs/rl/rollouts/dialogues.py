"""The rollouts of a run at the gateway: prompts, completions and replies, token by token, with versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from planetary.runs.rl.rollouts.chats import Message, PolicyChats
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


@dataclass(frozen=True)
class Reply:
    """Tokens after a completion, and the messages they are of in a chat; or the reason why there are none."""

    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


@dataclass
class Dialogue:
    """One completion of a prompt, in one turn or several.

    Attributes:
        problem: the prompt, answer and meta data.
        chat: messages of prompt, completions and replies, where the prompt is messages.
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
    chat: list[Message] = field(default_factory=list)
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
        self,
        problems: Problems,
        tokenizer: Tokenizer,
        limits: RolloutLimits,
        seed: int,
        completions: int,
        *,
        chats: PolicyChats | None = None,
    ) -> None:
        """`seed`: of the run; `completions`: of a training group's prompt; `chats`: of prompts that are messages."""
        self._problems, self._tokenizer, self._limits = problems, tokenizer, limits
        self._seed, self._completions, self._chats = seed, completions, chats
        self._groups: dict[tuple[bool, int], list[Dialogue]] = {}

    def group(self, held_out: bool, number: int) -> list[Dialogue]:
        """Return a group's dialogues; made when they are first asked for. Raises `UserError` for too long a prompt."""
        key = (held_out, number)
        if key not in self._groups:
            problem = self._problems.held_out(number) if held_out else self._problems.train(number)
            tokens = self._encoded_prompt(problem)
            count = HELD_OUT_ANSWERS if held_out else self._completions
            chat = [] if isinstance(problem.prompt, str) else list(problem.prompt)
            self._groups[key] = [Dialogue(problem, list(tokens), list(chat)) for _ in range(count)]
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
            "seeds": np.array(seeds, np.int64),
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
            text = self._tokenizer.decode(shown.tolist()).decode("utf-8", "replace")
            one.completions.append(text)
            if one.chat:
                assert self._chats is not None
                one.chat.append(self._chats.read(text, len(one.tokens), one.problem.tools))
            one.extend(own.tolist(), values.tolist(), version, own=True)
        return dialogues

    def untake(self, dialogues: Iterable[Dialogue]) -> None:
        """Undo the newest turn of dialogues: the tokens do not count."""
        for one in dialogues:
            turn = one.turns.pop()
            one.completions.pop()
            del one.chat[-1:]
            for part in (one.tokens, one.own, one.sampled, one.versions):
                del part[turn.start :]

    @staticmethod
    def cases(dialogues: Iterable[Dialogue], *, are_over: bool = False) -> list[Case]:
        """Return the cases the environment judges, one a dialogue; `are_over`: nothing can follow."""
        return [
            Case(
                one.problem.prompt,
                tuple(one.completions),
                dict(one.problem.meta),
                tuple(map(dict, one.chat)),
                is_over=are_over,
            )
            for one in dialogues
        ]

    def replies(self, dialogues: Iterable[Dialogue], verdicts: Iterable[Judged]) -> list[Reply | None]:
        """Return the replies to dialogues, in order; None: the dialogue has ended. Changes nothing, and may block."""
        return [self._reply(one, verdict) for one, verdict in zip(dialogues, verdicts, strict=True)]

    def fits(self, one: Dialogue, reply: Reply | None) -> bool:
        """Whether the context has room for a reply and a token more."""
        return reply is None or len(one.tokens) + len(reply.tokens) < self._limits.window

    def settle(
        self, dialogues: Sequence[Dialogue], verdicts: Sequence[Judged], replies: Sequence[Reply | None] | None = None
    ) -> None:
        """Append replies, or take rewards, of dialogues in order; `replies`: as `replies` returns them."""
        replies = self.replies(dialogues, verdicts) if replies is None else replies
        for one, verdict, reply in zip(dialogues, verdicts, replies, strict=True):
            if reply is None or reply.problem:
                one.ended, one.reward = True, verdict.reward
                one.problem_found = verdict.problem if reply is None else reply.problem
            elif not self.fits(one, reply):
                one.ended, one.problem_found = True, "its reply is longer than the context"
            else:
                one.extend(reply.tokens, [0.0] * len(reply.tokens), -1, own=False)
                one.chat += reply.messages

    def _reply(self, one: Dialogue, verdict: Judged) -> Reply | None:
        if verdict.reply is None and not verdict.messages:
            return None
        if not one.chat:
            if verdict.reply is None:
                return Reply(problem="it answers a text with messages: its prompt would have to be messages, too")
            return Reply(self._tokenizer.encode(verdict.reply.encode()).tolist())
        assert self._chats is not None
        added = verdict.messages or [{"role": "user", "content": verdict.reply}]
        try:
            text = self._chats.following(one.chat, added, one.problem.tools)
        except UserError as error:
            return Reply(problem=str(error))
        tokens = self._tokenizer.encode(text.encode()).tolist()
        has_ended = one.tokens[-1] in self._limits.ends and tokens[:1] and tokens[0] in self._limits.ends
        return Reply(tokens[1:] if has_ended else tokens, added)

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
            answer = [*self._tokenizer.encode(problem.answer.encode()).tolist(), self._end_of(problem)]
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
        if isinstance(problem.prompt, str):
            text, tokens = problem.prompt, [*self._limits.begins]
        elif self._chats is None:
            raise UserError("some prompts are texts and some are messages: expected one kind")
        else:
            text, tokens = self._chats.prompt(problem.prompt, problem.tools), []
        tokens += self._tokenizer.encode(text.encode()).tolist()
        if not 0 < len(tokens) < self._limits.window:
            raise UserError(
                f"a prompt has {len(tokens)} tokens: expected 1 to {self._limits.window - 1}, as "
                f"train.sequence_length leaves room for; it begins {text[:40]!r}"
            )
        return tokens

    def _end_of(self, problem: Problem) -> int:
        """Return the token that ends an imitated answer: in a chat, that of the template."""
        if isinstance(problem.prompt, str) or self._chats is None:
            return self._limits.ends[0]
        text = self._chats.ending(problem.prompt, problem.answer, problem.tools)
        found = self._tokenizer.encode(text.encode()).tolist()
        return found[0] if len(found) == 1 and found[0] in self._limits.ends else self._limits.ends[0]

    def _room(self, one: Dialogue) -> int:
        return min(self._limits.most, self._limits.window - len(one.tokens))

    def _seed_of(self, held_out: bool, number: int, member: int, turn: int) -> int:
        text = f"{self._seed} {held_out} {number} {member} {turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _temperature(held_out: bool, member: int) -> float:
    return 0.0 if held_out and member == 0 else 1.0


def outcome_of(dialogues: Sequence[Dialogue]) -> Mapping[str, object]:
    """Return the fields of a `GroupOutcome`: whether the group goes on, rewards, and problems, each once."""
    if not all(one.ended for one in dialogues):
        return {"goes_on": True}
    problems = tuple(dict.fromkeys(one.problem_found for one in dialogues if one.problem_found))
    return {"rewards": tuple(one.reward for one in dialogues), "problems": problems}
