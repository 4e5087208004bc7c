"""The compiled functions of composers and expert workers, in StableHLO: forward, backward and optimizer in the graph.

A composer's program has three functions over named tensors:

`gradients(dense..., experts..., held..., tokens, targets)` returns the loss, the cross-entropy, the gradients of the
dense parameters and (under direct ownership) of the owned experts, and of each layer u, the gates and g_y: what a
sketch is made of. Gradients and update are two functions because with a horizon of 1 the gradients are averaged
between them.

`update(dense..., state..., step, gradients...)` is one step of the optimizer; `evaluate` returns the cross-entropy and
each layer's router probabilities.

An expert worker's program is about the experts of one layer: `gradients` and `proxy` of the Taylor proxy Σ ⟨g_e g_y,
E_e(u)⟩ (13.5), and the same `update`. A composer with direct ownership uses that update too, so both ways give the same
bits.

Ownership and surrogates are ordinary arguments: one program serves all composers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.differentiate import (
    emit_backward,
    emit_forward,
    finish_module,
    load_for_differentiation,
)
from planetary.compiler.frontend import chlo
from planetary.compiler.ir import Value
from planetary.compiler.rewrites import normalise
from planetary.compiler.rewrites.bounds import bound_indices
from planetary.compiler.rewrites.precision import round_contractions
from planetary.compiler.step import optimizers
from planetary.compiler.step.accumulation import over_parts
from planetary.compiler.step.inner_optimizer import optimizer_of
from planetary.compiler.step.remat import rematerialise
from planetary.core.configuration.step_options import StepOptions, remat_budget
from planetary.core.errors import UserError
from planetary.core.step import GRADIENT, RATE, FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.models.initial import Draw, Params, flat_names
from planetary.models.latent_experts import mixture, used_weights
from planetary.models.latent_moe import (
    LatentMoeConfig,
    composer_forward,
    dense_parameters,
    expert_parameters,
    real_mixture,
)
from planetary.runs.mixture.methods.tiers import tier_of
from planetary.runs.mixture.program.signature import ComposerShape, in_layer
from planetary.runtime.device_program import Program


def dense_specs(config: LatentMoeConfig) -> tuple[TensorSpec, ...]:
    """Return the parameters that are no routed experts, in the order of the program's arguments."""
    return _specs(dense_parameters(config))


def mixture_program(
    config: LatentMoeConfig,
    shape: ComposerShape,
    tokens: int,
    *,
    dense: StepOptions,
    experts: StepOptions,
    functions: tuple[str, ...],
) -> Program:
    """Build the module of a mixture: the functions of all participants, so one artifact serves every role.

    `composer_gradients`, `composer_update`, `composer_evaluate`; `expert_update`, and under offload `expert_gradients`
    and `expert_proxy`; `whole_evaluate`, of the assembled model with all experts.

    Args:
        config: the model.
        shape: of a composer.
        tokens: of one composer's step.
        dense: of the optimizer of everything but the experts.
        experts: of the experts' optimizer.
        functions: of the part about experts.

    Raises:
        CompileError, UnsupportedOpError: the model cannot be differentiated.
    """
    whole = ComposerShape(config.n_expert, 0, config.batch_size)
    unbalanced = msgspec.structs.replace(config, balance=0.0)
    return combined(
        {
            "composer": (composer_program(config, shape, dense), ("gradients", "update", "evaluate")),
            "expert": (expert_program(unbalanced, shape.slots, tokens, experts), functions),
            "whole": (composer_program(config, whole, dense), ("evaluate",)),
        }
    )


def combined(parts: Mapping[str, tuple[Program, tuple[str, ...]]]) -> Program:
    """Return one program with some functions of several; each is named `<part>_<function>`."""
    with ir.new_context():
        module = ir.empty_module()
        functions = {}
        for part, (program, wanted) in parts.items():
            source = ir.parse_module(program.portable)
            found = ir.functions(source)
            for name in wanted:
                ir.copy_function(found[name], module, f"{part}_{name}")
                functions[f"{part}_{name}"] = program.functions[name]
        ir.verify(module)
        return Program(ir.to_portable_artifact(module), functions)


def composer_program(config: LatentMoeConfig, shape: ComposerShape, options: StepOptions) -> Program:
    """Build a composer's program.

    Args:
        config: the model; without its batch_size.
        shape: of the composer. Without training experts, it takes the experts' computing weights.
        options: of the optimizer of the dense parameters. Each tier is clipped by the tier's norm, because tiers
            synchronise at different times and a common norm would let one composer's backbone scale the router's step.
            With `micro_batches` the batch is taken in as many parts: loss and gradients are means over them, and a
            balance loss and a capacity are those of a part. `precision` is that of the factors in contractions of
            `gradients` and `evaluate`, `remat` decides the recomputed operations of `gradients`.

    Raises:
        CompileError, UnsupportedOpError: the model cannot be differentiated.
        UserError: the batch cannot be divided into the micro-batches, or an option is not for mixtures.
    """
    parts = options.micro_batches
    if shape.batch_size % parts:
        raise UserError(f"a composer's batch of {shape.batch_size} sequences has no {parts} equal micro-batches")
    if not shape.train_experts:
        config = msgspec.structs.replace(config, ternary=False)
    rows = shape.batch_size // parts
    tokens = shape.batch_size * config.sequence_length
    layers = range(config.n_layer)
    experts = expert_parameters(config, shape.slots)
    held: dict[str, Draw] = {"ownership": Draw((config.n_expert, shape.slots))}
    if shape.rank:
        held["a"] = Draw((config.n_expert, config.n_latent, config.read * shape.rank))
        held["b"] = Draw((config.n_expert, shape.rank, config.n_latent))
    batch = jax.ShapeDtypeStruct((rows, config.sequence_length), jax.numpy.int32)
    probe = jax.ShapeDtypeStruct((rows * config.sequence_length, config.n_latent), jax.numpy.float32)
    text = _lower(
        lambda p, e, h, q, x, y: composer_forward(p, e, h, q, (x, y), config=config, detach=shape.detach),
        [
            _shapes(dense_parameters(config)),
            [_shapes(experts) for _ in layers],
            [_shapes(held) for _ in layers],
            [probe for _ in layers],
            batch,
            batch,
        ],
    )
    dense = dense_specs(config)
    owned = _per_layer(config, "experts", experts)
    kept = _per_layer(config, "surrogates", held)
    data = (
        TensorSpec("tokens", "i32", (shape.batch_size, config.sequence_length)),
        TensorSpec("targets", "i32", (shape.batch_size, config.sequence_length)),
    )
    seen = [
        TensorSpec(in_layer(i, "seen", what), "f32", (tokens, width))
        for i in layers
        for what, width in (("u", config.n_latent), ("gates", config.n_expert))
    ]
    probes = [TensorSpec(in_layer(i, "seen", "g_y"), "f32", (tokens, config.n_latent)) for i in layers]
    routing = [TensorSpec(in_layer(i, "router", "probabilities"), "f32", (tokens, config.n_expert)) for i in layers]
    scalars = (TensorSpec("loss", "f32", ()), TensorSpec("cross_entropy", "f32", ()))
    trained = [*dense, *owned] if shape.train_experts else list(dense)
    arguments = (*dense, *owned, *kept, *data)
    first_probe = len(dense) + len(owned) + len(kept)

    gradients = [_gradient(spec) for spec in trained]
    budget = remat_budget(options.remat)

    def with_probes(values: Sequence[Value]) -> list[Value]:
        return [*values[:first_probe], *(ops.zeros(ir.tensor(probe.shape, ir.f32())) for _ in probes)]

    def gradient(main: ir.Operation, values: Sequence[Value]) -> list[Value]:
        held = with_probes(values)

        def of_part(part: list[Value]) -> list[Value]:
            made = emit_forward(main, [*held, *part])
            block = made.tape[-1].block
            count = len(ir.operations(block))
            wrt = [*range(len(trained)), *range(first_probe, first_probe + len(probes))]
            seeds = [ops.full_like(made.results[0], 1), *(None for _ in made.results[1:])]
            found = emit_backward(made, seeds, wrt)
            losses, observed = made.results[:2], made.results[2 : 2 + len(seen)]
            results = [*losses, *found[: len(trained)], *observed, *found[len(trained) :]]
            if budget is not None:
                rematerialise(block, count, part, results, budget)
            return results

        sums, stacks = [*scalars, *gradients], [*seen, *probes]
        found = over_parts(
            values[first_probe:], parts, of_part, summed=_tensors(sums), stacked=_tensors(stacks), unrolled=True
        )
        if parts == 1:
            return found
        # The whole batch's loss is the mean over parts, and so are the gradients, those of the probes (g_y) included.
        means, others = found[: len(sums)], found[len(sums) :]
        observed, g_y = others[: len(seen)], others[len(seen) :]
        return [*_divided(means, parts), *observed, *_divided(g_y, parts)]

    def evaluate(main: ir.Operation, values: Sequence[Value]) -> list[Value]:
        held = with_probes(values)

        def of_part(part: list[Value]) -> list[Value]:
            results = emit_forward(main, [*held, *part]).results
            return [results[1], *results[2 + len(seen) :]]

        data, summed = values[first_probe:], _tensors(scalars[1:])
        entropy, *probabilities = over_parts(
            data, parts, of_part, summed=summed, stacked=_tensors(routing), unrolled=True
        )
        return [*(_divided([entropy], parts) if parts > 1 else [entropy]), *probabilities]

    builder = _Builder(text, precision=options.precision)
    builder.add("gradients", arguments, (*scalars, *gradients, *seen, *probes), gradient)
    builder.add("evaluate", arguments, (scalars[1], *routing), evaluate)
    builder.add_update(dense, options)
    return builder.finish()


def expert_program(config: LatentMoeConfig, slots: int, tokens: int, options: StepOptions) -> Program:
    """Build the program about the experts of one layer, for sketches of `tokens` tokens.

    `gradients(experts..., u, g_y, gates)` returns the gradient of Σ ⟨g_y, Σ_e g_e E_e(u)⟩, `proxy` (same arguments) the
    value per slot, f32 [slots], and `update(experts..., state..., rate, gradients...)` one step of the optimizer,
    without clipping: a norm over several experts would tie together what is owned apart. `options.precision` is that of
    the factors in contractions of `gradients`; the proxy is computed in float32, because audits compare small
    differences of it.
    """
    experts = expert_parameters(config, slots)
    rows = jax.ShapeDtypeStruct((tokens, config.n_latent), jax.numpy.float32)
    gates = jax.ShapeDtypeStruct((tokens, slots), jax.numpy.float32)

    def proxies(weights: Params, u: Any, g_y: Any, g: Any) -> Any:
        total = jax.numpy.sum(real_mixture(weights, u, g, config) * g_y)
        one = jax.vmap(lambda w, column: real_mixture_of_one(w, u, column, config), in_axes=(0, 1))
        return total, jax.numpy.einsum("snl,nl->s", one(weights, g), g_y)

    text = _lower(proxies, [_shapes(experts), rows, rows, gates])
    specs = _specs(experts)
    arguments = (
        *specs,
        TensorSpec("u", "f32", (tokens, config.n_latent)),
        TensorSpec("g_y", "f32", (tokens, config.n_latent)),
        TensorSpec("gates", "f32", (tokens, slots)),
    )

    def gradients(main: ir.Operation, values: Sequence[Value]) -> list[Value]:
        forward = emit_forward(main, values)
        return emit_backward(forward, [ops.full_like(forward.results[0], 1), None], range(len(specs)))

    builder = _Builder(text, precision=options.precision)
    builder.add("gradients", arguments, tuple(_gradient(spec) for spec in specs), gradients)
    per_slot = (TensorSpec("proxy", "f32", (slots,)),)
    builder.add("proxy", arguments, per_slot, lambda m, v: [emit_forward(m, v).results[1]], rounds=False)
    # Here experts are named without where they are in a model.
    builder.add_update(specs, msgspec.structs.replace(options, clip_norm=0.0, matrix_stacks=("*",)))
    return builder.finish()


def real_mixture_of_one(weights: Params, u: jax.Array, gates: jax.Array, config: LatentMoeConfig) -> jax.Array:
    """Return g · E(u) [N, L] of a single expert, whose weights have no slot dimension; gates [N]."""
    single = {name: value[None] for name, value in weights.items()}
    return mixture(used_weights(single, config.ternary), u, gates[:, None])


def clip_each_tier(limit: float) -> optimizers.Transform:
    """Return the transform that clips the gradients of each tier by their own global norm."""

    def update(updates: optimizers.Values, inputs: optimizers.Inputs) -> list[Value]:
        result = list(updates)
        tiers = [tier_of(spec.name) for spec in inputs.specs]
        for tier in dict.fromkeys(tiers):
            mine = [i for i, other in enumerate(tiers) if other is tier]
            norm = optimizers.global_norm([updates[i] for i in mine])
            inside = ops.compare_number(norm, limit, "LE")  # NaN compares false and stays
            factor = ops.select(inside, ops.full_like(norm, 1.0), ops.divide(ops.full_like(norm, limit), norm))
            for i in mine:
                result[i] = optimizers.scaled(updates[i], factor)
        return result

    return optimizers.stateless(update)


Emit = Callable[[ir.Operation, Sequence[Value]], list[Value]]

_FACTORS: dict[str, Callable[[], ir.Type] | None] = {"f32": None, "bf16": ir.bf16}
"""Precision -> element type of rounded factors. f16 would need a loss scale shared by composers."""


class _Builder:
    """Collects functions over one lowered JAX function and emits them into one module."""

    def __init__(self, text: str, *, precision: str) -> None:
        if precision not in _FACTORS:
            raise UserError(f'a mixture multiplies in {" or ".join(_FACTORS)}, found train.precision = "{precision}"')
        self._text = text
        self._element = _FACTORS[precision]
        self._rounded: set[str] = set()  # functions whose contractions multiply in that type
        self._functions: dict[str, FunctionSpec] = {}
        self._emits: dict[str, Emit] = {}

    def add(
        self,
        name: str,
        arguments: Sequence[TensorSpec],
        results: Sequence[TensorSpec],
        emit: Emit,
        *,
        rounds: bool = True,
    ) -> None:
        self._functions[name] = FunctionSpec(tuple(arguments), tuple(results))
        self._emits[name] = emit
        if rounds:
            self._rounded.add(name)

    def add_update(self, params: Sequence[TensorSpec], options: StepOptions) -> None:
        plain = optimizer_of(msgspec.structs.replace(options, clip_norm=0.0))
        clip = [clip_each_tier(options.clip_norm)] if options.clip_norm else []
        transform = optimizers.chain(*clip, plain)
        state = transform.state(params)
        count = len(params)

        def emit(_: ir.Operation, values: Sequence[Value]) -> list[Value]:
            held, moments = values[:count], values[count : count + len(state)]
            rate, gradients = values[count + len(state)], values[count + len(state) + 1 :]
            norm = optimizers.global_norm(gradients)
            steps, new = transform.update(gradients, moments, optimizers.Inputs(params, held, rate, norm))
            return [*(ops.add(p, u) for p, u in zip(held, steps, strict=True)), *new, norm]

        gradients = [_gradient(spec) for spec in params]
        norm = TensorSpec("gradient_norm", "f32", ())
        self.add("update", (*params, *state, RATE, *gradients), (*params, *state, norm), emit, rounds=False)

    def finish(self) -> Program:
        with ir.new_context():
            module = load_for_differentiation(self._text)
            normalise.picks_to_selects(module)
            normalise.lookups_to_matmuls(module)
            bound_indices(module)
            main = ir.main_function(module)
            for name, spec in self._functions.items():
                with ir.new_function(module, name, [_tensor(s) for s in spec.arguments]) as (arguments, finish):
                    results = self._emits[name](main, arguments)
                    if self._element is not None and name in self._rounded:
                        round_contractions(ir.entry_block(ir.functions(module)[name]), self._element())
                    finish(results)
            ir.erase_function(main)
            finish_module(module)
            chlo.expand(module)
            ir.verify(module)
            portable = ir.to_portable_artifact(module)
        return Program(portable, dict(self._functions))


def _lower(function: Callable[..., Any], shapes: Sequence[Any]) -> str:
    return jax.jit(function, keep_unused=True).lower(*shapes).as_text()


def _shapes(tree: Params) -> Any:
    return jax.tree.map(lambda draw: jax.ShapeDtypeStruct(draw.shape, jax.numpy.float32), tree)


def _specs(tree: Params) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "f32", leaf.shape) for name, leaf in flat_names(tree).items())


def _per_layer(config: LatentMoeConfig, part: str, tree: Params) -> list[TensorSpec]:
    return [
        TensorSpec(in_layer(i, part, spec.name), spec.dtype, spec.shape)
        for i in range(config.n_layer)
        for spec in _specs(tree)
    ]


def _gradient(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(GRADIENT + spec.name, spec.dtype, spec.shape)


def _divided(values: Sequence[Value], count: int) -> list[Value]:
    return [ops.divide(value, ops.full_like(value, count)) for value in values]


def _tensors(specs: Sequence[TensorSpec]) -> list[ir.Type]:
    return [_tensor(spec) for spec in specs]


def _tensor(spec: TensorSpec) -> ir.Type:
    return ir.tensor(spec.shape, ir.i32() if spec.dtype == "i32" else ir.f32())
