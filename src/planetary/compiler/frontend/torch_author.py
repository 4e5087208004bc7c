"""PyTorch's side of a module: loss and gradients, and rules of autograd beyond the operators."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planetary.compiler.frontend.torch_draws import draws_from


@dataclass(frozen=True)
class Backward:
    """What a backward pass of a module showed.

    Attributes:
        without: names of the parameters that got no gradient (`None`), although they ask for one.
        updated: names of the buffers that forward writes or replaces.
        own: parts of the gradient beyond the operators: custom functions and hooks, in words.
    """

    without: frozenset[str]
    updated: frozenset[str]
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchAuthor:
    """The author of a loss from PyTorch (`frontend.author.Author`).

    Attributes:
        module: takes a batch, returns the loss.
        names: the module's names of parameters and buffers by their names in the model.
        arrays: number of the arrays of a batch; the words of a random key may follow them.
        training: the mode that is trained.
    """

    module: Any
    names: Mapping[str, str]
    arrays: int
    training: bool

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        """Return `loss.backward()`'s loss and gradients in the mode that is trained.

        Computes in the floating-point type of `params`; in float32 if forward cannot work in float64.
        """
        torch: Any = importlib.import_module("torch")

        wide = any(np.asarray(value).dtype == np.float64 for value in params.values())
        for double in (True, False) if wide else (False,):
            try:
                return self._computed(params, batch, torch.float64 if double else torch.float32)
            except (RuntimeError, TypeError, NotImplementedError):
                if not double:
                    raise
        raise AssertionError("not reached")

    def _computed(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray], dtype: Any
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        torch: Any = importlib.import_module("torch")

        given = {self.names[name]: torch.from_numpy(np.array(value)) for name, value in params.items()}
        arrays, rest = batch[: self.arrays], batch[self.arrays :]
        draws = draws_from(rest[0]) if rest else contextlib.nullcontext()
        with as_trained(self.module, self.training):
            state = state_of(self.module, given, dtype)
            with draws:
                data = [_cast(torch.from_numpy(np.array(one)), dtype) for one in arrays]
                loss = called(self.module, state, data, dtype)
            if loss.requires_grad:
                loss.backward()
        found = {}
        for name, inner in self.names.items():
            grad = state[inner].grad if inner in state else None
            found[name] = None if grad is None else _dense(grad).numpy()
        return float(loss.detach()), found


def backward_of(module: Any, batch: Sequence[Any]) -> Backward:
    """Run a module once and look at the gradients; the module stays unchanged.

    Args:
        module: takes a batch of tensors, returns the loss.
        batch: tensors.
    """
    state = state_of(module, {}, None)
    before = {name: (one, one._version) for name, one in state.items()}
    with _noted_hooks() as hooks:
        loss = called(module, state, batch, None)
    updated = frozenset(
        name for name, (one, version) in before.items() if state[name] is not one or one._version > version
    )
    own: tuple[str, ...] = ()
    if getattr(loss, "requires_grad", False):
        own = (*hooks, *_beyond_operators(loss))
        if loss.numel() == 1:
            loss.backward()
    without = frozenset(name for name, one in state.items() if one.requires_grad and one.is_leaf and one.grad is None)
    return Backward(without, updated, own)


@contextlib.contextmanager
def _noted_hooks() -> Iterator[list[str]]:
    """Note whether forward puts hooks on tensors."""
    torch: Any = importlib.import_module("torch")

    tensors: Any = torch.Tensor
    noted: list[str] = []
    plain = tensors.register_hook

    def register_hook(tensor: Any, hook: Any) -> Any:
        if "a hook on a tensor" not in noted:
            noted.append("a hook on a tensor")
        return plain(tensor, hook)

    tensors.register_hook = register_hook
    try:
        yield noted
    finally:
        tensors.register_hook = plain


def _beyond_operators(loss: Any) -> tuple[str, ...]:
    """Return the parts of the autograd graph of a loss beyond the operators' own derivatives."""
    torch: Any = importlib.import_module("torch")

    found: dict[str, None] = {}
    seen, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.setdefault(f"the custom function {type(node).__name__.removesuffix('Backward')}")
        if getattr(getattr(node, "variable", None), "_backward_hooks", None):
            found.setdefault("a hook on a parameter's gradient")
        pending += [one for one, _ in node.next_functions]
    return tuple(found)


@contextlib.contextmanager
def as_trained(module: Any, training: bool) -> Iterator[None]:
    """Put a module and all inside into the training or evaluation mode, and back."""
    modes = [(one, one.training) for one in module.modules()]
    try:
        if not training:  # a module in training mode may have parts in evaluation mode
            for one, _ in modes:
                one.training = False
        yield
    finally:
        for one, mode in modes:
            one.training = mode


def state_of(module: Any, given: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Return parameters and buffers of a module as tensors of their own: those of `given`, else copies of the module's.

    Floating-point tensors are of `dtype` (None: as they are). Parameters require gradients as the module's do.
    """
    state = {}
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        value = given.get(name, one).detach().reshape(one.shape)
        if not one.is_floating_point() and value.is_floating_point():
            value = value.round().to(one.dtype)  # a statistic of integers comes as a number that rounds average
        value = value.clone() if dtype is None else _cast(value, dtype).clone()
        state[name] = value.requires_grad_(one.requires_grad and value.is_floating_point())
    keep_hooks(module, state)
    return state


def keep_hooks(module: Any, state: Mapping[str, Any]) -> None:
    """Give the tensors that stand for a module's parameters the hooks of those."""
    for name, one in module.named_parameters():
        if state[name].requires_grad:
            for hook in (one._backward_hooks or {}).values():
                state[name].register_hook(hook)


def called(module: Any, state: dict[str, Any], batch: Sequence[Any], dtype: Any) -> Any:
    """Return the output of a module with other parameters and buffers; the process's random numbers are untouched.

    Buffers that forward replaces (`self.steps = self.steps + 1`) are replaced in `state`.
    """
    torch: Any = importlib.import_module("torch")
    from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportMissingImports] - `torch.func.functional_call` loses new buffers

    usual = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            with _reparametrize_module(module, state, tie_weights=True):
                output = module(*batch)
                state.update((name, one) for name, one in module.named_buffers() if name in state)
            return output
    finally:
        torch.set_default_dtype(usual)


def _cast(value: Any, dtype: Any) -> Any:
    return value.to(dtype) if value.is_floating_point() else value


def _dense(value: Any) -> Any:
    return value.to_dense() if value.is_sparse else value
