"""A trained model as the gateway serves it, wherever it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import Tokenizer
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.program.shape import CallSize, ServingShape
from planetary.runs.serve.program.trial import ServingTrial
from planetary.runtime.device_program import Program


@dataclass(frozen=True)
class ServedAdapter:
    """A model's change that clients choose by a name.

    Attributes:
        name: by which clients ask for it.
        arrays: A and B of every adapted matrix, by the names the functions have for them, with the scale in B.
        chat_template: of its own; "": the model's.
    """

    name: str
    arrays: Mapping[str, np.ndarray]
    chat_template: str = ""


@dataclass(frozen=True, kw_only=True)
class ServedModel(ABC):
    """The parameters, texts and functions of a model that is served.

    Attributes:
        name: by which clients ask for it.
        specs: parameters, in the order of the functions' arguments; of adapters A and B after the others.
        vocabulary: tokens the model knows.
        window: the longest text it was trained for, in tokens.
        tokenizer: of the model.
        version: the round the parameters are of; 0: they are of no run.
        chat_template: in Jinja, as the tokenizer's files have it; "": it has none.
        special_tokens: that the template writes, by the names it has for them.
        begins: tokens before every text that is no chat.
        ends: tokens that end a text.
        warning: for the operator, of a model served with limits; "": there are none.
        adapters: changes that a call can be made with; 0 in a call stands for none, 1 for the first.
        adapter: with which a request is computed, from 1; 0: none.
        refresh: returns the newest version of the model, or None if it is this one's; None: there are no others.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    vocabulary: int
    window: int
    tokenizer: Tokenizer
    version: int = 0
    chat_template: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()
    begins: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    warning: str = ""
    adapters: tuple[ServedAdapter, ...] = ()
    adapter: int = 0
    refresh: Callable[[int], ServedModel | None] | None = None

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the parameters by name, as a host has them; A and B are those of no adapter, zeros."""

    @abstractmethod
    def shape(self, serve: ServeConfig) -> ServingShape:
        """Return the sizes the functions have, within the limits of a configuration. Raises `UserError`."""

    @abstractmethod
    def program(self, shape: ServingShape, calls: Sequence[CallSize] | None = None) -> Program:
        """Return the functions of these calls; None: of all. Raises `CompileError`."""

    @abstractmethod
    def trial(self, shape: ServingShape, adapter: int = 0) -> ServingTrial:
        """Return a text with the results of the whole forward pass, with an adapter. Raises `CompileError`."""

    def without_values(self) -> ServedModel:
        """Return the model without the parameters' numbers: functions can still be built, `arrays` and `trial` not."""
        return self

    @cached_property
    def variants(self) -> tuple[Self, ...]:
        """The model with each of its adapters, as clients choose it by the adapter's name."""
        return tuple(
            replace(self, name=one.name, adapter=number, chat_template=one.chat_template or self.chat_template)
            for number, one in enumerate(self.adapters, 1)
        )

    @property
    def param_count(self) -> int:
        """Scalars."""
        return sum(spec.size for spec in self.specs)
