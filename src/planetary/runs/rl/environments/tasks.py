"""Built-in tasks: prompts made on the spot, with an answer and a reward between 0 and 1 for anything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Problem:
    """A prompt.

    Attributes:
        prompt: text it continues.
        answer: that it may be taught; "": there is none.
        meta: arguments of the reward, as JSON has them.
    """

    prompt: str
    answer: str
    meta: Mapping[str, Any]


Reward = Callable[[str, str, Mapping[str, Any]], float]
"""`reward(prompt, completion, meta)`: a number, the larger the better."""


@dataclass(frozen=True)
class Task:
    """A built-in task."""

    problem: Callable[[np.random.Generator], Problem]
    reward: Reward


def likeness(found: str, wanted: str) -> float:
    """Return 1 for the wanted text, and else a fifth of the share of characters that are at their place."""
    if found == wanted:
        return 1.0
    right = sum(a == b for a, b in zip(found, wanted, strict=False))
    return 0.2 * right / max(len(found), len(wanted), 1)


def _of_answer(prompt: str, completion: str, meta: Mapping[str, Any]) -> float:
    return likeness(completion.strip(), str(meta["answer"]))


def _reverse(rng: np.random.Generator) -> Problem:
    """Return six letters, which are wanted from the last to the first."""
    letters = "".join(chr(ord("a") + int(i)) for i in rng.integers(0, 26, 6))
    return Problem(f"{letters}>", letters[::-1], {"answer": letters[::-1]})


def _add(rng: np.random.Generator) -> Problem:
    """Return two numbers of three digits. Their sum is wanted from the units on, as on paper: each digit follows from
    two digits and the carry of those before.
    """
    a, b = (int(value) for value in rng.integers(100, 1000, 2))
    answer = str(a + b)[::-1]
    return Problem(f"{a}+{b}=", answer, {"answer": answer})


def _sort(rng: np.random.Generator) -> Problem:
    """Return six digits, which are wanted in order."""
    digits = "".join(str(int(i)) for i in rng.integers(0, 10, 6))
    return Problem(f"{digits}<", "".join(sorted(digits)), {"answer": "".join(sorted(digits))})


def _countdown(rng: np.random.Generator) -> Problem:
    """Return three digits and a number made of them by + - *, each used once, in a wanted order."""
    a, b, c = (int(value) for value in rng.integers(1, 10, 3))
    first, second = (("+", "-", "*")[int(i)] for i in rng.integers(0, 3, 2))
    answer = f"{a}{first}{b}{second}{c}"
    target = _value(answer)
    numbers = sorted([a, b, c])
    return Problem(f"{' '.join(map(str, numbers))}: {target}=", answer, {"numbers": numbers, "target": target})


def _value(expression: str) -> int:
    """Return the value of numbers joined by + - *, with the usual precedence."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([0-9*]+)", expression):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


def _reward_countdown(prompt: str, completion: str, meta: Mapping[str, Any]) -> float:
    """Return 1 for an expression of all numbers with the wanted value; 0.3 for all numbers, 0.1 for an expression."""
    text = completion.strip()
    if len(text) > 40 or not re.fullmatch(r"[0-9]{1,4}([+*-][0-9]{1,4})*", text):
        return 0.0
    if sorted(int(number) for number in re.findall(r"[0-9]+", text)) != list(meta["numbers"]):
        return 0.1
    return 1.0 if _value(text) == meta["target"] else 0.3


TASKS: Mapping[str, Task] = {
    "reverse": Task(_reverse, _of_answer),
    "add": Task(_add, _of_answer),
    "sort": Task(_sort, _of_answer),
    "countdown": Task(_countdown, _reward_countdown),
}
