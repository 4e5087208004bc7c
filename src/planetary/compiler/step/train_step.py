"""From a model to one module with `train_step` and `eval_step`, as `planetary.core.step` describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.differentiate import (
    differentiate,
    emit_backward,
    emit_forward,
    finish_module,
    load_for_differentiation,
)
from planetary.compiler.autodiff.losses import tile_large_losses
from planetary.compiler.frontend import chlo
from planetary.compiler.frontend.export import Model
from planetary.compiler.frontend.index_limits import table_rows
from planetary.compiler.frontend.manifest import EVALUATION, LOSS, Manifest, Role
from planetary.compiler.ir import Value
from planetary.compiler.rewrites import normalise
from planetary.compiler.rewrites.precision import (
    LossScale,
    demote_f64,
    round_contractions,
    round_stochastically,
)
from planetary.compiler.step import optimizers
from planetary.compiler.step.accumulation import over_parts, whole_batch
from planetary.compiler.step.inner_optimizer import optimizer_of
from planetary.compiler.step.remat import rematerialise
from planetary.compiler.step.step_module import Plan, TrainStep
from planetary.compiler.step.widening import widen_at_each_use
from planetary.core.configuration.step_options import StepOptions, remat_budget
from planetary.core.errors import CompileError, UnsupportedOpError, UserError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec

__all__ = ["StepOptions", "TrainStep", "build_train_step"]


def build_train_step(
    model: Model, options: StepOptions | None = None, *, optimizer: optimizers.Transform | None = None
) -> TrainStep:
    """Differentiate a model and put clipping and optimizer around it, all in one graph.

    Args:
        model: the result of `export_model` or `load_model`. With `options.micro_batches` above 1 the batch is one
            micro-batch, and the step takes that many of them, one after the other along the first dimension; loss and
            gradients are the means over them.
        options: default: `StepOptions()`.
        optimizer: a transform to use instead of the one that `options` name.

    Raises:
        UnsupportedOpError: the loss depends on a parameter through an operation without a differentiation
            rule.
        CompileError: the model's StableHLO is not valid.
        UserError: the options do not fit together, or not the model.
    """
    options = options or StepOptions()
    transform = optimizer if optimizer is not None else optimizer_of(options)
    try:
        return _build(model, options, transform)
    except UnsupportedOpError as error:
        raise with_source_line(model, error) from None


def with_source_line(model: Model, error: UnsupportedOpError) -> UnsupportedOpError:
    """Return the error about a model's operation with the line of the author's source, where it is known."""
    positions = [i for i, argument in enumerate(model.manifest.arguments) if argument.role == "param"]
    try:
        if model.located:
            differentiate(model.located, positions)
    except UnsupportedOpError as known:
        return known
    return error


def _build(model: Model, options: StepOptions, transform: optimizers.Transform) -> TrainStep:
    manifest = model.manifest
    params, buffers = manifest.of_role("param"), manifest.of_role("buffer")
    statistics = manifest.of_role("statistic")
    parts = manifest.of_role("input", "target")
    batch = whole_batch([_fed(part) for part in parts], options.micro_batches)
    keys = whole_batch(manifest.of_role("key"), options.micro_batches)
    opt_state = (*transform.state(params), *(LossScale.STATE if options.precision == "f16" else ()))
    _check_rounding(options, params)
    with ir.new_context():
        module = load_for_differentiation(model.stablehlo)
        note = demote_f64(module, manifest.model)
        normalise.before_differentiation(module)
        tiled = tile_large_losses(module)
        main = ir.main_function(module)
        evaluation = main
        if EVALUATION in manifest.results:
            ir.copy_function(main, module, EVALUATION)
            evaluation = ir.functions(module)[EVALUATION]
            ir.keep_results(evaluation, [manifest.results.index(EVALUATION)])
            ir.keep_results(main, [manifest.results.index(name) for name in (LOSS, *(s.name for s in statistics))])
        narrow = [spec.name for one in model.narrow for spec in (one.codes, one.scales)]
        graph = _Graph(options, transform, main, evaluation, manifest, narrow, {}, [], tiled)
        for argument, kind in zip(manifest.arguments, ir.argument_types(main), strict=True):
            graph.elements[argument.name] = ir.element_of_type(kind)
        graph.check_statistics(statistics)
        weights = [graph.type_of(spec) for spec in (*params, *statistics, *buffers)]
        state_types = [ir.tensor(spec.shape, _element(spec.dtype)) for spec in opt_state]
        data = [ir.tensor(s.shape, ir.i32() if s.dtype == "i32" else graph.elements[s.name]) for s in batch]
        words = [ir.tensor(spec.shape, graph.elements[spec.name]) for spec in keys]
        inputs = [*weights, *state_types, ir.tensor((), ir.i32()), ir.tensor((), ir.f32()), *data, *words]
        with ir.new_function(module, "train_step", inputs) as (arguments, finish):
            finish(graph.train(_body(module, "train_step"), arguments, opt_state))
        with ir.new_function(module, "eval_step", [*weights, *data]) as (arguments, finish):
            finish([graph.evaluate(_body(module, "eval_step"), arguments, [*params, *statistics, *buffers])])
        for function in {main, evaluation}:
            ir.erase_function(function)
        finish_module(module)
        chlo.expand(module)
        ir.verify(module)
        text = ir.to_text(module)
        portable = ir.to_portable_artifact(module)  # last: it turns the module into the versioned dialect
    rows = table_rows(model)
    spec = StepSpec(
        model=manifest.model,
        params=(*params, *statistics),
        buffers=buffers,
        opt_state=opt_state,
        batch=batch,
        stablehlo_digest=hashlib.sha256(portable).hexdigest(),
        keys=keys,
        statistics=tuple(spec.name for spec in statistics),
        table_rows=tuple(rows.get(spec.name, 0) for spec in batch),
    )
    notes = (*model.notes, *([note] if note else []), *graph.notes)
    return TrainStep(text, spec, portable, graph.plans[0] if graph.plans else None, notes)


@dataclass(frozen=True)
class _Graph:
    """Emits the bodies of the two functions.

    Attributes:
        options: of the step.
        transform: the optimizer.
        main: the model, in training.
        evaluation: the model in evaluations; `main` itself where they are the same.
        manifest: of the model.
        narrow: names of the arguments that are matrices in fewer bits.
        elements: element type of each of the model's arguments.
        plans: of rematerialisation; one is added when gradients are emitted, if the options ask for it.
        notes: on the options, for reports.
    """

    options: StepOptions
    transform: optimizers.Transform
    main: ir.Operation
    evaluation: ir.Operation
    manifest: Manifest
    narrow: Sequence[str]
    elements: dict[str, ir.Type]
    plans: list[Plan]
    notes: list[str] = field(default_factory=list)

    def type_of(self, spec: TensorSpec) -> ir.Type:
        return ir.tensor(spec.shape, self.elements[spec.name])

    def check_statistics(self, statistics: Sequence[TensorSpec]) -> None:
        """Raise `CompileError` unless `main` gives each statistic a new value of the same type."""
        kinds = ir.result_types(self.main)[1:]
        for spec, kind in zip(statistics, kinds, strict=True):
            if kind != self.type_of(spec):
                raise CompileError(
                    f"model {self.manifest.model}: the new value of the statistic {spec.name!r} is {kind}, expected "
                    f"{self.type_of(spec)}"
                )

    def loss_and_gradients(
        self, values: dict[str, Value], wrt: Sequence[TensorSpec], scale: Value | None
    ) -> list[Value]:
        """Emit the f32 loss, the gradients of `scale` (f32 scalar; None: 1) times the loss, and new statistics."""
        order = [argument.name for argument in self.manifest.arguments]
        forward = emit_forward(self.main, [values[name] for name in order])
        block = forward.tape[-1].block
        count = len(ir.operations(block))
        seed = ops.full_like(forward.results[0], 1)
        if scale is not None:
            seed = ops.convert(scale, ir.element_of(seed))
        cotangents = [seed, *(None for _ in forward.results[1:])]
        gradients = emit_backward(forward, cotangents, [order.index(spec.name) for spec in wrt]) if wrt else []
        loss, *statistics = forward.results  # read now: the backward pass may have replaced a loop of the forward pass
        budget = remat_budget(self.options.remat)
        data = [values[spec.name] for spec in self.manifest.of_role(*_FED)]
        if wrt and budget is not None:
            self.plans.append(rematerialise(block, count, data, [loss, *gradients, *statistics], budget))
        widen_at_each_use(block, [values[name] for name in self.narrow], data)
        wide = [_element(optimizers.working_dtype(spec.dtype)) for spec in wrt]
        scaled = [ops.convert(g, e) for g, e in zip(gradients, wide, strict=True)]
        return [ops.convert(loss, ir.f32()), *scaled, *statistics]

    def over_batch(
        self,
        block: ir.Block,
        batch: Sequence[Value],
        work: Callable[[dict[str, Value]], list[Value]],
        wrt: Sequence[TensorSpec] = (),
        statistics: Sequence[Value] = (),
    ) -> list[Value]:
        """Emit the means of `work`'s results over the parts of a batch, then statistics; `block` has nothing else yet.

        With `marked_targets`, a part weighs as many targets as count in it.

        `work` takes the arguments of one micro-batch by name, and emits the loss and the gradients by `wrt`, then the
        `statistics` the next micro-batch begins with.
        """
        names = [spec.name for spec in self.manifest.of_role(*(_FED if wrt else _DATA))]
        names += [spec.name for spec in self.manifest.of_role("statistic")] if statistics else []

        count = self.options.micro_batches
        weighted = self.options.marked_targets and count > 1

        def of_part(part: list[Value]) -> list[Value]:
            found = work({n: ops.convert(value, self.elements[n]) for n, value in zip(names, part, strict=True)})
            if not weighted:
                return found
            weight = self._counted(part)
            means, after = found[: 1 + len(wrt)], found[1 + len(wrt) :]
            return [weight, *(optimizers.scaled(value, weight) for value in means), *after]

        wide = [ir.tensor(spec.shape, _element(optimizers.working_dtype(spec.dtype))) for spec in wrt]
        summed = [*[ir.tensor((), ir.f32())] * (1 + weighted), *wide]
        found = over_parts(batch, count, of_part, summed=summed, carried=statistics)
        if self.options.precision != "f32" and not round_contractions(block, _element(self.options.precision)):
            note = (
                f"precision {self.options.precision} changes nothing: model {self.manifest.model} has no contraction "
                "(dot_general, dot, convolution) of float32 tensors"
            )
            self.notes.extend([note] if note not in self.notes else [])
        if count == 1:
            return found
        sums, last = found[: len(summed)], found[len(summed) :]
        if weighted:
            inverse = ops.divide(ops.full_like(sums[0], 1), ops.maximum(sums[0], ops.full_like(sums[0], 1)))
            return [*(optimizers.scaled(value, inverse) for value in sums[1:]), *last]
        return [*(ops.divide(value, ops.full_like(value, count)) for value in sums), *last]

    def _counted(self, part: Sequence[Value]) -> Value:
        """Emit how many targets of a part are not negative, f32."""
        place = [spec.name for spec in self.manifest.of_role(*_DATA)].index(self.manifest.of_role("target")[0].name)
        is_counted = ops.convert(ops.compare_number(part[place], 0, "GE"), ir.f32())
        return ops.reduce_sum(is_counted, range(len(ir.shape_of(is_counted))))

    def train(
        self,
        block: ir.Block,
        arguments: Sequence[Value],
        opt_state: Sequence[TensorSpec],
    ) -> list[Value]:
        """Emit the results of `train_step` for the arguments."""
        given, manifest = iter(arguments), self.manifest
        params, statistics, buffers = (manifest.of_role(role) for role in ("param", "statistic", "buffer"))
        values = {spec.name: next(given) for spec in (*params, *statistics, *buffers)}
        state = [next(given) for _ in opt_state]
        step, rate, batch = next(given), next(given), list(given)
        stored = [values[spec.name] for spec in params]
        scaling = LossScale(state[-2], state[-1]) if self.options.precision == "f16" else None
        scale = None if scaling is None else scaling.factor
        used = values | dict(zip((spec.name for spec in params), self._rounded_weights(stored, step), strict=True))
        used |= {spec.name: ops.convert(step, self.elements[spec.name]) for spec in self.manifest.of_role("step")}
        before = [values[spec.name] for spec in statistics]
        loss, *found = self.over_batch(
            block, batch, lambda part: self.loss_and_gradients(used | part, params, scale), params, before
        )
        gradients, after = found[: len(params)], found[len(params) :]
        if scaling is not None:
            inverse = scaling.inverse
            gradients = [optimizers.scaled(g, inverse) for g in gradients]
        norm = optimizers.global_norm(gradients)
        wide = [_element(optimizers.working_dtype(spec.dtype)) for spec in params]
        held = [ops.convert(value, e) for value, e in zip(stored, wide, strict=True)]
        own = state if scaling is None else state[:-2]
        updates, new_state = self.transform.update(gradients, own, optimizers.Inputs(params, held, rate, norm))
        new = [
            self._stored(ops.add(p, u), ir.element_of(value), step, i)
            for i, (value, p, u) in enumerate(zip(stored, held, updates, strict=True))
        ]
        if scaling is None:
            return [*new, *after, *new_state, loss, norm]
        skipped = scaling.overflowed(norm)
        old = [*stored, *before, *own]
        kept = [ops.select(skipped, a, b) for a, b in zip(old, [*new, *after, *new_state], strict=True)]
        return [*kept, *scaling.advanced(skipped), loss, ops.select(skipped, ops.full_like(norm, 0), norm)]

    def evaluate(self, block: ir.Block, arguments: Sequence[Value], weights: Sequence[TensorSpec]) -> Value:
        """Emit the result of `eval_step` for the arguments."""
        values = {spec.name: v for spec, v in zip(weights, arguments, strict=False)}
        for spec in self.manifest.of_role("key", "step"):  # that of seed 0, and the first step
            values[spec.name] = ops.zeros(self.type_of(spec))
        order = [argument.name for argument in self.manifest.arguments]

        def loss_of(part: dict[str, Value]) -> list[Value]:
            given = values | part
            loss = ops.convert(emit_forward(self.evaluation, [given[name] for name in order]).results[0], ir.f32())
            widen_at_each_use(block, [given[name] for name in self.narrow], list(part.values()))
            return [loss]

        return self.over_batch(block, arguments[len(weights) :], loss_of)[0]

    def _rounded_weights(self, stored: Sequence[Value], step: Value) -> list[Value]:
        """Emit the weights of the arithmetic: float32 parameters rounded at random to the precision, if asked."""
        if self.options.rounding == "nearest" or self.options.precision == "f32":
            return list(stored)
        low = _element(self.options.precision)
        return [
            ops.convert(round_stochastically(value, low, step, len(stored) + i), ir.f32())
            if ir.element_of(value) == ir.f32()
            else value
            for i, value in enumerate(stored)
        ]

    def _stored(self, value: Value, element: ir.Type, step: Value, salt: int) -> Value:
        """Emit a new parameter in the type it is kept in."""
        if self.options.rounding == "stochastic" and str(element) in _LOW:
            return round_stochastically(value, element, step, salt)
        return ops.convert(value, element)


_LOW = ("bf16", "f16")
_DATA: tuple[Role, ...] = ("input", "target")
_FED: tuple[Role, ...] = (*_DATA, "key")  # parts of a micro-batch: each has a separate key


def _check_rounding(options: StepOptions, params: Sequence[TensorSpec]) -> None:
    if options.rounding == "stochastic" and options.precision == "f32" and all(p.dtype not in _LOW for p in params):
        raise UserError(
            "stochastic rounding would change nothing: parameters and contractions are float32; set precision to "
            '"bf16" or "f16", or rounding to "nearest"'
        )


def _fed(part: TensorSpec) -> TensorSpec:
    """Return how a part of the batch is handed in: 64-bit integers as i32.

    Tokens come from files with at most 32 bits, no table has 2^31 rows, and some devices have no i64.
    """
    return msgspec.structs.replace(part, dtype="i32") if part.dtype == "i64" else part


def _body(module: ir.Module, function: str) -> ir.Block:
    return ir.entry_block(ir.functions(module)[function])


def _element(dtype: str) -> ir.Type:
    return {"f32": ir.f32, "f64": ir.f64, "bf16": ir.bf16, "f16": ir.f16, "i32": ir.i32}[dtype]()
