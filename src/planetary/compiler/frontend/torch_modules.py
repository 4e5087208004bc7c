"""PyTorch modules as models, through torchax. Needs `pip install 'planetary-compute[torch]'`, and only where a model is
exported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from planetary.core.errors import UserError

Loss = Callable[[Any, Any], Any]
"""`loss(output, target)` on torch tensors; one float scalar."""


def torch_function(module: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return a module's parameters by name and `function(params, *arrays)`, which calls its `forward`.

    Parameters that are tied have one entry. Buffers become constants of the function: a module that changes
    its buffers while it runs (batch normalisation in training) keeps their values of now. The module is put
    into evaluation mode, since a compiled step has no random numbers for dropout.

    Args:
        module: a `torch.nn.Module` on the CPU.

    Raises:
        UserError: torch or torchax is missing or does not work here, or `module` is no module.
    """
    import jax

    torch, torchax = _import()
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"cannot import a PyTorch model: expected a torch.nn.Module, found {type(module).__name__}")
    states, function = torchax.extract_jax(module.eval())
    trained = {name for name, _ in module.named_parameters()}
    params = {name: value for name, value in states.items() if name in trained}
    buffers = {name: value for name, value in states.items() if name not in trained}

    def call(params: dict[str, Any], *arrays: Any) -> Any:
        with warnings.catch_warnings():
            # PyTorch wants 64-bit indices; JAX keeps them in 32 bits and says so each time.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")
            return function(*jax.tree.map(jax.numpy.asarray, ({**buffers, **params}, arrays)))

    return params, call


def from_torch(
    module: Any, example_batch: Sequence[Any], loss: Loss | None = None
) -> tuple[Callable[..., Any], dict[str, Any], Sequence[Any]]:
    """Return the loss function, the parameters and the batch of a PyTorch module, as a `build` function does.

    Args:
        module: a `torch.nn.Module` on the CPU.
        example_batch: numpy arrays of the batch's shapes and types, the target last.
        loss: `loss(output, target)` on torch tensors, one scalar, where `output` is the module's output for
            the batch without its last array. None: the module takes the whole batch and returns the loss.

    Raises:
        UserError: see `torch_function`.
    """
    if loss is None:
        params, call = torch_function(module)
        return call, params, example_batch
    params, call = torch_function(_with_loss(module, loss))
    # The module stands inside another one: its names are kept as they were.
    inside = {name.removeprefix("inner."): value for name, value in params.items()}

    def loss_fn(params: dict[str, Any], *batch: Any) -> Any:
        return call({f"inner.{name}": value for name, value in params.items()}, *batch)

    return loss_fn, inside, example_batch


def is_module(found: Any) -> bool:
    """Whether something is a PyTorch module, or a class of them. Imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(found, torch.nn.Module) or (inspect.isclass(found) and issubclass(found, torch.nn.Module))


class ModuleBuilder:
    """Builds the model of a PyTorch module that takes tokens, as a `build` function does in JAX.

    Its options are the arguments of the module's class, and the batch's shape.
    """

    def __init__(self, found: Any, loss: Loss | None, source: str) -> None:
        """Build from a class of modules, or from a module that is made already.

        Args:
            found: `torch.nn.Module` or a class of them; its `forward` takes tokens, int32 [batch, sequence].
            loss: of the module's output and the next tokens. None: the mean cross-entropy of the output, or of its
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
        """Return scores [batch, sequence, vocabulary], as a JAX array, of tokens int32 [batch, sequence]."""
        output = torch_function(self._module(options))[1](params, tokens)
        return getattr(output, "logits", output)

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


def _import() -> tuple[Any, Any]:
    try:
        import torch  # pyright: ignore[reportMissingImports]

        with _forgotten_overloads():
            import torchax  # pyright: ignore[reportMissingImports]

            torchax.default_env()  # loads the rest of its tables
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
