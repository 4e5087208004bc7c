"""PyTorch modules as JAX functions, through torchax. Needs `pip install torch torchax`, and only where a model
is exported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from planetary.core.errors import UserError


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
    module: Any, example_batch: Sequence[Any], loss: Callable[[Any, Any], Any] | None = None
) -> tuple[Callable[..., Any], dict[str, Any], Sequence[Any]]:
    """Return what a `build` returns, for a PyTorch module.

    Args:
        module: a `torch.nn.Module` on the CPU.
        example_batch: numpy arrays of the batch's shapes and types, the target last.
        loss: `loss(output, target)` on torch tensors, one scalar, where `output` is what the module makes of
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


def _with_loss(module: Any, loss: Callable[[Any, Any], Any]) -> Any:
    import torch  # pyright: ignore[reportMissingImports] - optional

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
            "cannot import a PyTorch model: torch and torchax are needed (`pip install torch torchax`), and "
            f"importing them failed: {type(error).__name__}: {error}"
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
