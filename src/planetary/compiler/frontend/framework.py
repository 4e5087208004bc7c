"""Modules of other frameworks as models: the framework is found by its modules, and named nowhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from planetary.core.extension_points import FRAMEWORKS

BuiltModel = tuple[Callable[..., Any], Any, Sequence[Any]]
"""`(loss_fn, params, example_batch)`, as a `build` function returns them (docs/models.md)."""


class ModuleBuilder(ABC):
    """Builds the model of a framework's module that takes tokens, as a `build` function does in JAX.

    Its signature names the options, among them `batch_size` and `sequence_length`.
    """

    @abstractmethod
    def __call__(self, **options: Any) -> BuiltModel:
        """Return the loss, the parameters and a batch. Raises `UserError` where the framework or the module fails."""

    @abstractmethod
    def logits(self, params: Any, tokens: Any, **options: Any) -> Any:
        """Return scores [batch, sequence, vocabulary], as a JAX array, of tokens int32 [batch, sequence]."""


class Framework(ABC):
    """A framework with modules.

    Attributes:
        name: in the registry.
        packages: without these a file with modules cannot be loaded.
        install: what an error says to install then.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str]

    @abstractmethod
    def is_module(self, found: Any) -> bool:
        """Whether something is a module of the framework, or a class of them. Imports nothing."""

    @abstractmethod
    def builder(self, found: Any, loss: Callable[..., Any] | None, source: str) -> ModuleBuilder:
        """Return the builder of a module's model.

        Args:
            found: a module or a class of them.
            loss: `loss(output, target)` beside it in its file, in the framework's arrays; None: there is none.
            source: the model's name in errors.
        """


def framework_of(found: Any) -> Framework | None:
    """Return the framework that something is a module of; None: of none."""
    return next((one for one in _frameworks() if one.is_module(found)), None)


def missing_package(package: str | None) -> str:
    """Return the end of an error for a package that is not installed: "" where no framework needs it."""
    return next((f"; pip install '{one.install}'" for one in _frameworks() if package in one.packages), "")


def _frameworks() -> list[Framework]:
    return [FRAMEWORKS.find(name)() for name in FRAMEWORKS.names()]
