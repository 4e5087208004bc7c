"""The shape of the batch a compiled model takes: the graph fixes it, not the configuration."""

from __future__ import annotations

import logging

import msgspec

from planetary.core.configuration.schema import Config, is_function
from planetary.core.errors import UserError

log = logging.getLogger(__name__)


def with_model_shapes(config: Config) -> Config:
    """Return `config` with the batch of the compiled model, read from the file; of other models it is returned as is.

    A multiple of the model's batch in `train.batch_size` is trained in as many micro-batches, which is the same update.
    Any other shape than the model's gives way to it, with a warning.

    Raises:
        UserError: the file is no model, or a model built by a function was given no batch.
        CompileError: the model cannot be parsed.
    """
    train, source = config.train, config.model.source
    if is_function(source):
        for key, value in (("batch_size", train.batch_size), ("sequence_length", train.sequence_length)):
            if not value:
                raise UserError(
                    f"train.{key}: expected a whole number >= 1, found 0: 0 stands for the shape of a compiled model, "
                    f"and {source} is a function that builds one"
                )
        return config
    from planetary.compiler.frontend.export import load_model

    model = load_model(source, roles=config.model.roles, values_follow=True)
    shapes = [spec.shape for spec in model.manifest.of_role("input", "target")]
    if not shapes or len(shapes[0]) != 2:
        return config  # no batch of sequences, an error when the model is prepared
    rows, length = shapes[0]
    micro = train.micro_batches
    if train.batch_size and micro == 1 and train.batch_size % rows == 0:
        micro = train.batch_size // rows
    found = msgspec.structs.replace(train, batch_size=rows * micro, sequence_length=length, micro_batches=micro)
    for key in ("batch_size", "sequence_length"):
        given, fixed = getattr(train, key), getattr(found, key)
        if given not in (0, fixed):
            log.warning("train.%s: %d instead of %d, because the graph of %s fixes it", key, fixed, given, source)
    if micro != train.micro_batches:
        log.warning(
            "train.micro_batches: %d, because train.batch_size is %d and the graph of %s takes %d sequences at a time",
            micro,
            found.batch_size,
            source,
            rows,
        )
    return msgspec.structs.replace(config, train=found)
