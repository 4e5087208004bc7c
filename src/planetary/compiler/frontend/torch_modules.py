"""PyTorch modules as models. Needs `pip install 'planetary-compute[torch]'`, and only where a model is
exported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from planetary.compiler.frontend.framework import Framework, ModuleBuilder
from planetary.compiler.frontend.torch_author import as_trained
from planetary.core.errors import UserError

Loss = Callable[[Any, Any], Any]
"""`loss(output, target)` on torch tensors; one float scalar."""


def torch_function(module: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return a module's parameters by name and `function(params, *arrays)`, which calls `forward`.

    Parameters that are tied have one entry. `params` may leave out names: those keep the module's values of now, as all
    buffers do. The function is traced in the mode the module is in; it has no random numbers, and new values of buffers
    are lost.

    Args:
        module: a `torch.nn.Module` on the CPU.

    Raises:
        UserError: torch or torchax is missing or does not work here, or `module` is no module. From the function:
            forward cannot be exported, or draws random numbers.
    """
    _import()
    _check_module(module)
    from planetary.compiler.frontend import torch_lowering
    from planetary.compiler.frontend.torch_loss import torch_call

    state = {n: torch_lowering.array_of(one) for n, one in (*module.named_parameters(), *module.named_buffers())}
    names = [name for name, _ in module.named_parameters()]

    def call(params: Mapping[str, Any], *arrays: Any) -> Any:
        from torch.utils._pytree import tree_unflatten  # pyright: ignore[reportMissingImports]

        graph = torch_call(module, [np.zeros(np.shape(one), getattr(one, "dtype", None)) for one in arrays])
        values = {("parameter", name): params.get(name, state[name]) for name in names}
        values |= {("buffer", name): value for name, value in state.items() if name not in names}
        values |= {("input", str(i)): one for i, one in enumerate(arrays)}
        return tree_unflatten(torch_lowering.run(graph, values)[len(graph.updates) :], graph.structure)

    return {name: state[name] for name in names}, call


def from_torch(
    module: Any, example_batch: Sequence[Any], loss: Loss | None = None
) -> tuple[Callable[..., Any], dict[str, Any], Sequence[Any]]:
    """Return the loss function, the parameters and the batch of a PyTorch module, as a `build` function does.

    The loss has PyTorch's own gradient in the mode the module is in. Parameters that are frozen (`requires_grad` is
    False) or get no gradient are not trained: as buffers, they keep their values.

    Args:
        module: a `torch.nn.Module` on the CPU.
        example_batch: numpy arrays of the batch's shapes and types, the target last. They are called like the
            parameters of `forward`, and the target like the second parameter of `loss`.
        loss: `loss(output, target)` on torch tensors, one scalar, where `output` is the module's output for the batch
            without the last array. None: the module takes the whole batch and returns the loss.

    Raises:
        UserError: torch or torchax is missing; forward cannot be exported, or has no form in a compiled step. The text
            names the operator and the line.
    """
    _import()
    _check_module(module)
    from planetary.compiler.frontend.torch_loss import torch_loss

    whole, prefix = (module, "") if loss is None else (_with_loss(module, loss), "inner.")
    found = torch_loss(whole, prefix, example_batch)
    takes = [*_positional(module.forward)[: len(example_batch) - (loss is not None)]]
    takes += [] if loss is None else _positional(loss)[1:2]
    if len(takes) == len(example_batch):
        vars(found[0])["planetary_batch"] = takes
    return found


def _positional(function: Callable[..., Any]) -> list[str]:
    given = inspect.signature(function).parameters.values()
    return [one.name for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _check_module(module: Any) -> None:
    torch: Any = importlib.import_module("torch")

    if not isinstance(module, torch.nn.Module):
        raise UserError(f"cannot import a PyTorch model: expected a torch.nn.Module, found {type(module).__name__}")


class PyTorch(Framework):
    """Modules of PyTorch."""

    name = "torch"
    packages = ("torch", "torchax")
    install = "planetary-compute[torch]"

    def is_module(self, found: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        return isinstance(found, torch.nn.Module) or (inspect.isclass(found) and issubclass(found, torch.nn.Module))

    def builder(self, found: Any, loss: Loss | None, source: str) -> ModuleBuilder:
        return TorchBuilder(found, loss, source)


class TorchBuilder(ModuleBuilder):
    """Builds the model of a PyTorch module.

    The options are the arguments of the module's class, and the batch's shape.
    """

    def __init__(self, found: Any, loss: Loss | None, source: str) -> None:
        """Build from a class of modules, or from a module that is made already.

        Args:
            found: `torch.nn.Module` or a class of them; `forward` takes tokens, int32 [batch, sequence].
            loss: of the module's output and the next tokens. None: the mean cross-entropy of the output, or of the
                attribute `logits`: scores [batch, sequence, vocabulary].
            source: for error messages.
        """
        self._found, self._loss, self._source = found, loss, source
        own = list(inspect.signature(found).parameters.values()) if inspect.isclass(found) else []
        names = {one.name for one in own}
        shape = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in (("batch_size", 8), ("sequence_length", 128), ("seed", 0))
            if name not in names
        ]
        rest = [one for one in own if one.kind is one.VAR_KEYWORD]
        positional = [one for one in own if one.kind is not one.VAR_KEYWORD]
        self._own = names
        self.__signature__ = inspect.Signature([*positional, *shape, *rest])

    def __call__(self, **options: Any) -> tuple[Callable[..., Any], dict[str, Any], Sequence[Any]]:
        """Return `(loss_fn, params, example_batch)`.

        Raises:
            UserError: torch or torchax is missing, or the module's output has another shape than the loss expects.
        """
        given = inspect.signature(self).bind(**options)
        given.apply_defaults()
        batch = (given.arguments["batch_size"], given.arguments["sequence_length"])
        tokens = np.zeros(batch, np.int32)
        return from_torch(self._module(options), (tokens, tokens), self._loss or self._next_token_loss)

    def logits(self, params: dict[str, Any], tokens: Any, **options: Any) -> Any:
        module = _with_scores(self._module(options))
        with as_trained(module, training=False):
            return torch_function(module)[1]({f"inner.{name}": one for name, one in params.items()}, tokens)

    def _module(self, options: dict[str, Any]) -> Any:
        torch, _ = _import()
        if not inspect.isclass(self._found):
            return self._found
        torch.manual_seed(options.get("seed", 0))
        takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(self._found).parameters.values())
        ours = {"batch_size", "sequence_length", "seed"}
        own = {name: value for name, value in options.items() if name in self._own or (takes_any and name not in ours)}
        return self._found(**own)

    def _next_token_loss(self, output: Any, target: Any) -> Any:
        from torch.nn import functional  # pyright: ignore[reportMissingImports] - optional

        scores = getattr(output, "logits", output)
        shape = tuple(scores.shape) if hasattr(scores, "shape") else None
        if shape is None or len(shape) != 3 or shape[:2] != tuple(target.shape):
            found = type(scores).__name__ if shape is None else f"shape {list(shape)}"
            raise UserError(
                f"{self._source}: the default loss takes scores [batch, sequence, vocabulary] of tokens "
                f"{list(target.shape)}, and the module returns {found}; put a function loss(output, target) beside it"
            )
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten().long())


def _with_loss(module: Any, loss: Loss) -> Any:
    torch: Any = importlib.import_module("torch")  # a type checker finds planetary/torch.py where it is not installed

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *batch: Any) -> Any:
            return loss(self.inner(*batch[:-1]), batch[-1])

    return WithLoss()


def _with_scores(module: Any) -> Any:
    torch: Any = importlib.import_module("torch")

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, tokens: Any) -> Any:
            output = self.inner(tokens)
            return getattr(output, "logits", output)

    return Scores()


def _import() -> tuple[Any, Any]:
    try:
        import torch  # pyright: ignore[reportMissingImports]

        with _forgotten_overloads():
            import torchax  # pyright: ignore[reportMissingImports]

            torchax.default_env()  # loads the remaining tables
    except Exception as error:  # an import of two large libraries that need not fit each other
        raise UserError(
            "cannot import a PyTorch model: torch and torchax are needed (`pip install 'planetary-compute[torch]'`), "
            f"and importing them failed: {type(error).__name__}: {error}"
        ) from error
    return torch, torchax


@contextmanager
def _forgotten_overloads() -> Iterator[None]:
    """Let torchax list overloads of operators (on named dimensions) that torch 2.13 no longer has.

    torchax 0.0.13 cannot be imported without them, although nothing can call them.
    """
    from torch._ops import OpOverloadPacket  # pyright: ignore[reportMissingImports]

    original = OpOverloadPacket.__getattr__

    def lenient(packet: Any, key: str) -> Any:
        try:
            return original(packet, key)
        except AttributeError:
            if key.startswith("_"):
                raise
            return f"{packet}.{key}"

    OpOverloadPacket.__getattr__ = lenient  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = original  # type: ignore[method-assign]
