"""Tasks of reinforcement. The built-in ones make prompts on the spot, with an answer whose reward is 1."""

from __future__ import annotations

import inspect
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from planetary.core.configuration.needs import Need
from planetary.core.errors import UserError


@dataclass(frozen=True)
class Problem:
    """A prompt.

    Attributes:
        prompt: text it continues; or messages it answers, which the tokenizer's chat template renders.
        answer: that it may be taught; "": there is none.
        meta: arguments of the reward, as JSON has them.
        tools: that a chat offers, in OpenAI's form; none: those of the task.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str
    meta: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()


class Task(ABC):
    """A task of reinforcement: an environment that judges completions, and maybe the prompts. One per process.

    A class that has no `problem` needs a file of prompts, `rl.prompts`.

    Attributes:
        tools: that chats of the task offer, in OpenAI's form: `{"type": "function", "function": {"name", …}}`.
        most_calls: turns with calls of tools in a dialogue; a further one is judged as it is.
    """

    needs: ClassVar[tuple[Need, ...]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    most_calls: int = 8

    @classmethod
    def of_function(cls, reward: Callable[[Any, str, Mapping[str, Any]], float]) -> type[Task]:
        """Return the task of a reward function. Raises `UserError` for one that does not take the arguments.

        `reward` takes the prompt, one completion, and the meta of the problem.
        """
        arguments = ("prompt", "completion", "meta")
        try:
            inspect.signature(reward).bind(*arguments)
        except TypeError as error:
            raise UserError(
                f"task {reward.__name__}{inspect.signature(reward)}: it is called with the positional arguments "
                f"({', '.join(arguments)}), one completion a call: {error}"
            ) from error

        class RewardFunction(Task):
            def judge(self, prompt: Any, completions: Sequence[str], meta: Mapping[str, Any]) -> float | str:
                return reward(prompt, completions[-1], meta)

        return RewardFunction

    def problem(self, rng: np.random.Generator) -> Problem:
        """Return a prompt, a function of the random numbers."""
        raise NotImplementedError

    def problems(self) -> Sequence[Problem]:
        """Return a fixed set of prompts, in place of `problem`. `rl.held_out` of them are never trained on."""
        return ()

    @abstractmethod
    def judge(self, prompt: Any, completions: Sequence[str], meta: Mapping[str, Any]) -> float | str:
        """Return the reward of a dialogue, or the text that follows, after which the policy goes on. In a chat the text
        is a message of the user.

        The result must be a function of the arguments: a process that dies takes no dialogue with it.

        Args:
            prompt: as `problem` or the file of prompts has it: a text, or a list of messages.
            completions: of the policy, oldest first, as it wrote them; those of a class that returns no text and has no
                tools are one.
            meta: of the problem; of a file, all fields of the record but the prompt.
        """

    def call(self, name: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
        """Return the answer of one of `tools` to a call. An exception's text is the answer, too.

        Must be a function of the arguments, as `judge`. `arguments` are as the policy wrote them: any JSON.
        """
        raise NotImplementedError(f"the task has no tool {name}")

    def follow(
        self,
        prompt: Any,
        completions: Sequence[str],
        meta: Mapping[str, Any],
        chat: Sequence[Mapping[str, Any]],
        *,
        is_over: bool = False,
    ) -> float | str | list[dict[str, Any]]:
        """Return the answers to the calls in the last message of a chat; without calls the result of `judge`.

        Args:
            prompt, completions, meta: as of `judge`.
            chat: messages of prompt, completions and replies; empty where the prompt is a text.
            is_over: whether nothing can follow, as the context is full.
        """
        calls = chat[-1].get("tool_calls") or () if chat and not is_over else ()
        if not calls or sum(bool(one.get("tool_calls")) for one in chat) > self.most_calls:
            return self.judge(prompt, completions, meta)
        answers = [(one, self._answer(one["function"], meta)) for one in calls]
        return [
            {"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"], "content": answer}
            for one, answer in answers
        ]

    def _answer(self, function: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
        try:
            return str(self.call(function["name"], function["arguments"], meta))
        except Exception as error:  # noqa: BLE001 - the answer names the error
            return f"{type(error).__name__}: {error}"


def likeness(found: str, wanted: str) -> float:
    """Return 1 for the wanted text, and else a fifth of the share of characters that are at their place."""
    if found == wanted:
        return 1.0
    right = sum(a == b for a, b in zip(found, wanted, strict=False))
    return 0.2 * right / max(len(found), len(wanted), 1)


class _WithAnswer(Task):
    """A task whose prompts have one answer."""

    def judge(self, prompt: str, completions: Sequence[str], meta: Mapping[str, Any]) -> float | str:
        return likeness(completions[-1].strip(), str(meta["answer"]))


class Reverse(_WithAnswer):
    """Six letters, which are wanted from the last to the first."""

    name = "reverse"

    def problem(self, rng: np.random.Generator) -> Problem:
        letters = "".join(chr(ord("a") + int(i)) for i in rng.integers(0, 26, 6))
        return Problem(f"{letters}>", letters[::-1], {"answer": letters[::-1]})


class Add(_WithAnswer):
    """Two numbers of three digits. Their sum is wanted from the units on, as on paper: each digit follows from two
    digits and the carry of those before.
    """

    name = "add"

    def problem(self, rng: np.random.Generator) -> Problem:
        a, b = (int(value) for value in rng.integers(100, 1000, 2))
        answer = str(a + b)[::-1]
        return Problem(f"{a}+{b}=", answer, {"answer": answer})


class Sort(_WithAnswer):
    """Six digits, which are wanted in order."""

    name = "sort"

    def problem(self, rng: np.random.Generator) -> Problem:
        digits = "".join(str(int(i)) for i in rng.integers(0, 10, 6))
        return Problem(f"{digits}<", "".join(sorted(digits)), {"answer": "".join(sorted(digits))})


class Countdown(Task):
    """Three digits and a number made of them by + - *, each used once, in a wanted order.

    Of several right expressions the first is taught: where any may be, sampled answers are right less often than the
    likeliest ones.
    """

    name = "countdown"

    def problem(self, rng: np.random.Generator) -> Problem:
        a, b, c = (int(value) for value in rng.integers(1, 10, 3))
        first, second = (("+", "-", "*")[int(i)] for i in rng.integers(0, 3, 2))
        target = _value(f"{a}{first}{b}{second}{c}")
        numbers = sorted([a, b, c])
        prompt = f"{' '.join(map(str, numbers))}: {target}="
        return Problem(prompt, _taught(*numbers)[target], {"numbers": numbers, "target": target})

    def judge(self, prompt: str, completions: Sequence[str], meta: Mapping[str, Any]) -> float | str:
        """Return 1 for an expression of all numbers with the wanted value; 0.3 for all numbers, 0.1 for an
        expression.
        """
        text = completions[-1].strip()
        if len(text) > 40 or not re.fullmatch(r"[0-9]{1,4}([+*-][0-9]{1,4})*", text):
            return 0.0
        if sorted(int(number) for number in re.findall(r"[0-9]+", text)) != list(meta["numbers"]):
            return 0.1
        return 1.0 if _value(text) == meta["target"] else 0.3


@cache
def _taught(*numbers: int) -> Mapping[int, str]:
    """Return the expression that is taught of each value: the first by signs, then by the order of the numbers."""
    signs = itertools.product("+-*", repeat=2)
    made = (f"{a}{first}{b}{second}{c}" for first, second in signs for a, b, c in itertools.permutations(numbers))
    found: dict[int, str] = {}
    for expression in made:
        found.setdefault(_value(expression), expression)
    return found


def _value(expression: str) -> int:
    """Return the value of numbers joined by + - *, with the usual precedence."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([0-9*]+)", expression):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total
