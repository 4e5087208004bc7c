"""Finds the logits in a model whose only function is the loss, and proves them.

A cross-entropy computes the loss from one tensor of a score for each token of the vocabulary. The value nearest to the
loss that has such a shape and does not depend on the targets is a candidate: the logits, or their log-softmax, which
gives the same probabilities. Shapes prove nothing, so the model is run: between the candidate's likeliest, least likely
and some random targets, the cross-entropy has to differ by as much as the model's own loss does. So a loss may have
other terms (a router's balance, a penalty on the scores) that do not depend on the targets; since a part of the
vocabulary passes then, too, the widest value is taken. And since a text is continued with it, a later token must not
change an earlier position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.compiler import ir
from planetary.compiler.autodiff import inline
from planetary.compiler.check.pieces import ARGUMENT, Key, Node, Outline, Piece, as_crossing, cut_out, outline
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model
from planetary.compiler.frontend.stablehlo_in_jax import jax_function
from planetary.core.errors import CompileError, UserError
from planetary.core.tensors import TensorSpec, host_dtype

TOLERANCE = 0.02
"""Accepted difference of the losses, as a part of the distance between the likeliest and the least likely targets: a
model in bfloat16 rounds the loss by a few thousandths of it."""

CAUSAL_TOLERANCE = 1e-3
"""Accepted change of an earlier position when a later token changes, as a part of the logits' spread."""

_CANDIDATES = 8  # values next to the loss that are tried
_NEEDED = (
    "Generating needs scores of shape [batch, sequence, vocabulary] whose cross-entropy with the targets is the loss, "
    "or its only term that depends on the targets; models that are Python functions say theirs with "
    "`logits(params, tokens, **options)` beside `build`"
)


@dataclass(frozen=True)
class Logits:
    """The part of a model from parameters, buffers and inputs to the logits.

    Attributes:
        piece: that part, as `pieces.cut_out` makes it.
        arguments: the model's arguments, in order.
        inputs: the position of the tokens among them.
        shape: [batch, sequence, vocabulary].
    """

    piece: Piece
    arguments: tuple[TensorSpec, ...]
    inputs: int
    shape: tuple[int, int, int]

    def traced(self) -> Callable[[Mapping[str, Any], jax.Array], jax.Array]:
        """Return a function for `jax.jit`, from parameters and buffers by name and tokens to logits.

        Tokens are i32 [1, T], T at most the graph's own sequence; the batch of a graph has one size, so the other rows
        are computed, too. Logits are f32 [1, T, V]. A bfloat16 is given as float32, a boolean as int8.
        """
        call = jax_function(self.piece.step.portable, "train_step")
        made = self.piece.step.spec.params[0]
        batch, length, _ = self.shape
        rest = [position for _, position in self.piece.inputs]

        def logits(values: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
            count = tokens.shape[1]
            padded = jnp.broadcast_to(jnp.pad(tokens, ((0, 0), (0, length - count))), (batch, length))
            given = [
                padded if position == self.inputs else jnp.asarray(values[self.arguments[position].name])
                for position in rest
            ]
            scores = call(jnp.zeros(made.shape, jnp.float32), *given, jnp.int32(0), jnp.float32(0))[0]
            return scores.astype(jnp.float32).reshape(self.shape)[:1, :count]

        return logits

    def values(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the parameters and buffers that `traced` takes, of host arrays by name; the graph's own are left as
        they are.

        Raises:
            UserError: an integer has more than 32 bits.
        """
        found = {}
        for _, position in self.piece.inputs:
            if position == self.inputs:
                continue
            spec = self.arguments[position]
            value = given[spec.name]
            if value.dtype != np.float32:  # a checkpoint has float32 for every float
                value = as_crossing(value, spec.dtype)
            narrow = {"i64": np.int32, "ui64": np.uint32, "f64": np.float32}.get(spec.dtype)
            if narrow is not None:
                value, wide = value.astype(narrow), value
                if spec.dtype != "f64" and not np.array_equal(value, wide):
                    raise UserError(f"{spec.name} has integers of more than 32 bits, which JAX does not compute with")
            found[spec.name] = value
        return found


def find_logits(model: Model) -> Logits:
    """Return the logits of a language model with a loss only.

    Raises:
        UserError: there is no value proved to be the logits; the text names the requirements.
    """
    arguments = tuple(TensorSpec(a.name, a.dtype, a.shape) for a in model.manifest.arguments)
    roles = [a.role for a in model.manifest.arguments]
    if roles.count("input") != 1 or roles.count("target") != 1:
        raise UserError(f"cannot generate with the model {model.manifest.model}: it has no single input. {_NEEDED}")
    inputs, targets = roles.index("input"), roles.index("target")
    if len(arguments[inputs].shape) != 2 or arguments[targets].shape != arguments[inputs].shape:
        raise UserError(
            f"cannot generate with the model {model.manifest.model}: inputs and targets are "
            f"{list(arguments[inputs].shape)} and {list(arguments[targets].shape)}, expected tokens of equal shape "
            f"[batch, sequence]. {_NEEDED}"
        )
    portable = _flat(model.stablehlo)
    whole = outline(portable, "main")
    values = _trial(model)
    tried, widest = 0, None
    for key, shape in _candidates(whole, arguments[inputs].shape, inputs, targets):
        piece = cut_out(portable, "main", 0, [key])
        found = Logits(piece, arguments, inputs, shape)
        others = _other_terms(model, found, values, targets)
        if others is not None and (widest is None or shape[-1] > widest.shape[-1]):
            widest = found
        if others == 0:
            return found
        tried += 1
        if tried == _CANDIDATES:
            break
    if widest is not None:
        return widest
    raise UserError(
        f"cannot generate with the model {model.manifest.model}: its graph shows no logits (values of a fitting shape "
        f"that were tried: {tried}). {_NEEDED}"
    )


def _flat(stablehlo: bytes) -> bytes:
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        inline.inline_calls(module)
        return ir.to_portable_artifact(module)


def _candidates(
    whole: Outline, tokens: Sequence[int], inputs: int, targets: int
) -> list[tuple[Key, tuple[int, int, int]]]:
    """Return values of a fitting shape that depend on the inputs and not on the targets, the last one first."""
    depends: dict[Key, tuple[bool, bool]] = {(ARGUMENT, inputs): (True, False), (ARGUMENT, targets): (False, True)}
    found = []
    for number, node in enumerate(whole.nodes):
        known = [depends.get(key, (False, False)) for key in node.operands]
        own = any(a for a, _ in known), any(b for _, b in known)
        for result in range(len(node.results)):
            depends[number, result] = own
            shape = _fitting(node, result, tokens)
            if own == (True, False) and shape is not None:
                found.append(((number, result), shape))
    return found[::-1]


def _fitting(node: Node, result: int, tokens: Sequence[int]) -> tuple[int, int, int] | None:
    text = node.results[result].removeprefix("tensor<").removesuffix(">")
    *sizes, element = text.split("x")
    if element not in ("f32", "f64", "bf16", "f16") or not all(size.isdigit() for size in sizes) or len(sizes) < 2:
        return None
    shape, places = [int(size) for size in sizes], math.prod(tokens)
    if shape[:-1] not in ([*tokens], [places]) or shape[-1] < 2:
        return None
    return tokens[0], tokens[1], shape[-1]


def _trial(model: Model) -> dict[str, np.ndarray]:
    """Return parameters around the initial ones, none of them zero, and the buffers."""
    rng = np.random.default_rng(0)
    values = {**model.initial("statistic"), **model.initial("buffer")}
    for name, initial in model.initial("param").items():
        spec = next(a for a in model.manifest.arguments if a.name == name)
        wide = as_crossing(initial, spec.dtype).astype(np.float32)
        noisy = wide + 0.05 * rng.standard_normal(wide.shape, np.float32)
        values[name] = (
            (noisy.view(np.uint32) >> 16).astype(np.uint16)
            if spec.dtype == "bf16"
            else noisy.astype(host_dtype(spec.dtype))
        )
    return values


def _other_terms(model: Model, found: Logits, values: Mapping[str, np.ndarray], targets: int) -> float | None:
    """Return the loss minus the cross-entropy of a candidate, 0 if equal; None: it is not the logits."""
    spec, rng = found.arguments[found.inputs], np.random.default_rng(1)
    tokens = rng.integers(0, found.shape[-1], spec.shape).astype(host_dtype(spec.dtype))
    scores = _run(found, values, tokens)
    if not np.isfinite(scores).all():
        return None
    drawn = rng.integers(0, found.shape[-1], spec.shape)
    choices = (scores.argmin(-1), scores.argmax(-1), drawn)
    expected = [_cross_entropy(scores, chosen) for chosen in choices]
    kind = found.arguments[targets]
    given = [
        _loss(model, values, {found.inputs: tokens, targets: chosen.astype(host_dtype(kind.dtype))})
        for chosen in choices
    ]
    distance = abs(expected[0] - expected[1])
    others = [loss - own for loss, own in zip(given, expected, strict=True)]
    if distance < 1e-3 or not max(others) - min(others) < TOLERANCE * distance:
        return None
    later = tokens.copy()
    later[:, -1] = (later[:, -1].astype(np.int64) + 1) % found.shape[-1]
    changed = np.abs(_run(found, values, later) - scores)[:, :-1]
    if changed.size and float(changed.max()) > CAUSAL_TOLERANCE * float(np.ptp(scores)):
        return None
    term = sum(others) / len(others)
    return term if abs(term) >= TOLERANCE * distance else 0.0


def _run(found: Logits, values: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    given = [
        tokens if position == found.inputs else as_crossing(values[spec.name], spec.dtype)
        for position, spec in ((position, found.arguments[position]) for _, position in found.piece.inputs)
    ]
    made = found.piece.step.spec.params[0]
    arguments = [made.zeros(), *given, np.zeros((), np.int32), np.zeros((), np.float32)]
    result = run_reference(found.piece.step.portable, "train_step", arguments, [made.dtype, "f32", "f32"])[0]
    return np.asarray(result, np.float64).reshape(found.shape)


def _loss(model: Model, values: Mapping[str, np.ndarray], batch: Mapping[int, np.ndarray]) -> float:
    named = [argument.name for argument in model.manifest.arguments]
    arguments = [batch[i] if i in batch else values[name] for i, name in enumerate(named)]
    try:
        return float(run_reference(model.stablehlo, "main", arguments, ["f32"])[0])
    except CompileError:
        return math.nan


def _cross_entropy(scores: np.ndarray, chosen: np.ndarray) -> float:
    top = scores.max(-1, keepdims=True)
    normal = top[..., 0] + np.log(np.exp(scores - top).sum(-1))
    return float((normal - np.take_along_axis(scores, chosen[..., None], -1)[..., 0]).mean())
