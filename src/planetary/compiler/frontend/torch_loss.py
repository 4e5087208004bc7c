"""The loss of a PyTorch module as a JAX function whose gradient is PyTorch's.

Forward is PyTorch's functional graph, with marks where autograd stops. Where the gradient is not that of the graph
(custom functions, hooks), the joint graph of forward and backward gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from planetary.compiler.frontend import torch_lowering
from planetary.compiler.frontend.author import ATTRIBUTE
from planetary.compiler.frontend.markers import custom_vjp
from planetary.compiler.frontend.torch_author import Backward, TorchAuthor, as_trained, backward_of
from planetary.compiler.frontend.torch_draws import KEY_TYPE
from planetary.compiler.frontend.torch_graph import Graph, HiddenWriteError, capture, export_failed, tensors_of
from planetary.compiler.frontend.torch_joint import capture_joint
from planetary.core.errors import UserError

_CONSTANT_BYTES = 1 << 20  # largest untrained tensor that becomes part of the graph; a larger one is a buffer
_SHOWN = 4  # names in a note


@dataclass(frozen=True)
class _Tensors:
    """Parameters and buffers of a module, by their names in it.

    Attributes:
        outside: names in the model of those that are arguments of the loss.
        constants: values of the others.
        kinds: `parameter` or `buffer`.
    """

    outside: dict[str, str]
    constants: dict[str, Any]
    kinds: dict[str, str]

    def values(self, params: Mapping[str, Any], batch: Sequence[Any]) -> dict[tuple[str, str], Any]:
        """Return the values for `torch_lowering.run`."""
        state = self.constants | {inner: params[name] for inner, name in self.outside.items()}
        found = {(self.kinds[inner], inner): value for inner, value in state.items()}
        return found | {("input", str(i)): one for i, one in enumerate(batch)}


def torch_loss(
    module: Any, prefix: str, example_batch: Sequence[Any]
) -> tuple[Callable[..., Any], dict[str, Any], Sequence[Any]]:
    """Return the loss function, the parameters and the batch of a module that takes the batch and returns the loss.

    In training mode the function also takes `train` and, if forward draws random numbers, `key`; and it returns the
    new values of the buffers that forward updates. It has the attributes `planetary_author`, `planetary_roles` (role
    by name), `planetary_notes` and `planetary_constants` (values of untrained parameters that are no arguments).

    Args:
        module: a `torch.nn.Module` on the CPU.
        prefix: of the module's names, which the model's do without.
        example_batch: arrays.

    Raises:
        UserError: see `planetary.torch.from_torch`.
    """
    batch = tensors_of(example_batch)
    try:
        backward = backward_of(module, batch)
    except UserError:
        raise
    except Exception as error:  # any class: of the module
        raise UserError(export_failed(error)) from error
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    frozen = {n for n, p in parameters.items() if not (p.requires_grad and p.is_floating_point())}
    trained = [n for n in parameters if n not in frozen and n not in backward.without]
    graph, joint = _captured(module, batch, backward, trained)
    torch_lowering.check_operators(graph)
    draws = bool(torch_lowering.draws_of(graph))

    every = {**parameters, **buffers}
    fixed = {n: p for n, p in every.items() if n not in trained and n not in graph.updates}
    held = [n for n, p in fixed.items() if p.numel() * p.element_size() > _CONSTANT_BYTES]
    tensors = _Tensors(
        {n: n.removeprefix(prefix) for n in every if n not in fixed or n in held},
        {n: torch_lowering.array_of(p) for n, p in fixed.items() if n not in held},
        {n: "parameter" if n in parameters else "buffer" for n in every},
    )
    params = {name: _narrowed(torch_lowering.array_of(every[n])) for n, name in tensors.outside.items()}
    in_training = _trained_loss(graph, tensors)

    def loss_fn(params: Mapping[str, Any], *batch: Any) -> Any:
        return in_training(params, batch, None)[0]

    if draws or graph.updates:
        loss_fn = _of_both_modes(module, batch, backward, graph, tensors, in_training, draws=draws)
    vars(loss_fn).update(
        {
            ATTRIBUTE: TorchAuthor(
                module, {name: n for n, name in tensors.outside.items()}, len(batch), module.training
            ),
            "planetary_roles": {tensors.outside[n]: "buffer" for n in held},
            "planetary_notes": _notes(sorted(n.removeprefix(prefix) for n in backward.without), joint),
            "planetary_constants": {
                n.removeprefix(prefix): value for n, value in tensors.constants.items() if n in parameters
            },
        }
    )
    # An operator without a form in JAX is named here, not later.
    options = {"key": jax.random.key(0, impl=KEY_TYPE)} if draws else {}
    jax.eval_shape(lambda *given: loss_fn(*given, **options), params, *example_batch)
    return loss_fn, params, example_batch


def _narrowed(value: Any) -> Any:
    """Return an array in the type that JAX keeps it in: 64-bit integers are 32-bit ones."""
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype))


def torch_call(module: Any, arrays: Sequence[Any]) -> Graph:
    """Return the checked graph of a module's forward for arrays of these shapes."""
    graph = capture(module, tensors_of(arrays), torch_lowering.decompositions())
    torch_lowering.check_operators(graph)
    return graph


def _captured(module: Any, batch: Sequence[Any], backward: Backward, trained: Sequence[str]) -> tuple[Graph, str]:
    """Return the graph of forward if the gradient is autograd's, else the joint graph; and why it is the latter."""
    table = torch_lowering.decompositions()
    if backward.own:
        return capture_joint(module, batch, trained, table), f"the module has {', '.join(backward.own)}"
    try:
        graph = capture(module, batch, table)
        lost = sorted(backward.updated - set(graph.updates)) if module.training else []
        if not lost:
            return graph, ""
        return capture_joint(module, batch, trained, table), f"forward replaces {lost[0]}, which export of it loses"
    except HiddenWriteError as write:
        return capture_joint(module, batch, trained, table), f"{write} writes in place where autograd does not see it"
    except UserError as failed:
        try:
            return capture_joint(module, batch, trained, table), "PyTorch cannot export forward alone"
        except UserError:
            raise failed from failed.__cause__


_Trained = Callable[[Mapping[str, Any], Sequence[Any], Any], tuple[Any, list[Any]]]
"""Takes parameters, a batch and the words of a key; returns the loss and the new values of the graph's updates."""


def _trained_loss(graph: Graph, tensors: _Tensors) -> _Trained:
    place = len(graph.updates)
    names = {inner: tensors.outside[inner] for inner in graph.gradients}

    def values(params: Mapping[str, Any], batch: Sequence[Any], words: Any) -> tuple[Any, list[Any]]:
        *new, loss = torch_lowering.run(graph, tensors.values(params, batch), _key(words), results=range(place + 1))
        return loss, new

    def slopes(arguments: tuple[Any, ...], _: Any, cotangents: Any) -> Sequence[Any]:
        params, batch, words = arguments
        given = tensors.values(params, batch) | {("cotangent", ""): cotangents[0]}
        places = range(place + 1, place + 1 + len(graph.gradients))
        found = torch_lowering.run(graph, given, _key(words), results=places)
        zeros = jax.tree.map(jnp.zeros_like, arguments)
        return zeros[0] | dict(zip(names.values(), found, strict=True)), *zeros[1:]

    def in_training(params: Mapping[str, Any], batch: Sequence[Any], words: Any) -> tuple[Any, list[Any]]:
        arguments = jax.tree.map(jnp.asarray, (dict(params), tuple(batch), words))
        return custom_vjp(values, slopes)(*arguments) if graph.gradients else values(*arguments)

    return in_training


def _key(words: Any) -> Any:
    return None if words is None else jax.random.wrap_key_data(words, impl=KEY_TYPE)


def _of_both_modes(  # noqa: PLR0917 - the parts of a module
    module: Any,
    batch: Sequence[Any],
    backward: Backward,
    graph: Graph,
    tensors: _Tensors,
    in_training: _Trained,
    *,
    draws: bool,
) -> Callable[..., Any]:
    """Return the loss function of a module in training mode; evaluations have the module in evaluation mode."""
    with as_trained(module, training=False):
        evaluation, _ = _captured(module, batch, backward, [])
    torch_lowering.check_operators(evaluation)
    place = len(evaluation.updates)

    def evaluated(params: Mapping[str, Any], batch: Sequence[Any], key: Any) -> Any:
        return torch_lowering.run(evaluation, tensors.values(params, batch), key, results=[place])[0]

    def trained(params: Mapping[str, Any], batch: Sequence[Any], key: Any) -> Any:
        loss, new = in_training(params, batch, None if key is None else jax.random.key_data(key))
        updates = {tensors.outside[inner]: value for inner, value in zip(graph.updates, new, strict=True)}
        return (loss, updates) if updates else loss

    if not draws:

        def without_key(params: Mapping[str, Any], *batch: Any, train: bool = True) -> Any:
            return trained(params, batch, None) if train else evaluated(params, batch, None)

        return without_key

    def with_key(params: Mapping[str, Any], *batch: Any, key: Any = None, train: bool = True) -> Any:
        return trained(params, batch, key) if train else evaluated(params, batch, key)

    return with_key


def _notes(without: Sequence[str], joint: str) -> tuple[str, ...]:
    notes = []
    if without:
        more = f" and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
        notes.append(
            f"PyTorch gives no gradient to {', '.join(without[:_SHOWN])}{more} (detached or unused): these parameters "
            "are not trained and keep their values, as with PyTorch's optimizers"
        )
    if joint:
        notes.append(f"the gradient is PyTorch's own graph of forward and backward, since {joint}")
    return tuple(notes)
