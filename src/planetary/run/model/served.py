"""The model that a gateway serves: a run's newest checkpoint, one of its checkpoints, or a pretrained folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from planetary.artifacts.checkpoint import list_checkpoints, load_checkpoint, load_latest
from planetary.artifacts.pretrained_weights import read_pretrained
from planetary.compiler.frontend.export import find_builder
from planetary.core.config import Config, is_function, load_config
from planetary.core.configuration.pretrained import TOKENIZER_FILE, is_pretrained, read_published
from planetary.core.deviations import as_float
from planetary.core.errors import TrustError, UserError
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import load_tokenizer
from planetary.fabric.gateway.run_files import CHECKPOINTS, CONFIG
from planetary.fabric.preparation.preparation import builder_options
from planetary.models.context import CacheSizes
from planetary.run.model.trained_model import fill_tree, tokenizer_of_run
from planetary.serve.program.served_model import ServedModel

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"


def load_served(config: Config) -> ServedModel:
    """Return the model that `serve.model` names.

    Raises:
        UserError: there is none, it has no `decode` (`models.context`), or its tokenizer has more tokens than it.
        TrustError: a file is damaged.
    """
    path = Path(config.serve.model)
    model = _pretrained(path) if is_pretrained(path) else _trained(path)
    if model.tokenizer.vocab_size > model.vocabulary:
        raise UserError(
            f"the tokenizer of {path} has {model.tokenizer.vocab_size} tokens, and the model knows {model.vocabulary}: "
            "it is another model's"
        )
    if config.serve.follow and model.refresh is None:
        raise UserError(f"there is nothing to follow in {path}: expected the folder of a run, whose checkpoints change")
    if config.serve.chat_template:
        try:
            model = replace(model, chat_template=Path(config.serve.chat_template).read_text())
        except OSError as error:
            raise UserError(
                f"cannot read the chat template {config.serve.chat_template}: {error.strerror or error}"
            ) from error
    return replace(model, name=config.serve.name) if config.serve.name else model


def _trained(path: Path) -> ServedModel:
    """Return the model of a run's folder, or of a checkpoint's folder in one."""
    run, checkpoint = (path, None) if (path / CONFIG).is_file() else (path.parent.parent, path)
    if not (run / CONFIG).is_file():
        raise UserError(
            f"there is no model in {path}: expected a run folder, a checkpoint folder of one, or the folder of a "
            "pretrained GPT-2, Llama or Qwen2"
        )
    config = load_config(run / CONFIG)
    source = config.model.source
    if not is_function(source):
        raise UserError(
            f"{run} was trained from a compiled graph ({source}), which has no cache of keys and values: `planetary "
            "generate` continues texts with it"
        )
    options = builder_options(config, source)
    _, template, _ = find_builder(source)(**options)
    found = load_latest(run / CHECKPOINTS) if checkpoint is None else load_checkpoint(checkpoint)

    def read(params: Mapping[str, np.ndarray]) -> Any:
        return fill_tree(template, params, source)

    def refresh(version: int) -> ServedModel | None:
        entries = list_checkpoints(run / CHECKPOINTS)
        if not entries or entries[-1].round <= version:
            return None
        newest = load_latest(run / CHECKPOINTS)
        return replace(model, params=read(newest.params), version=newest.info.round, refresh=refresh)

    tokenizer = tokenizer_of_run(run, config)
    end = tokenizer.end_of_document
    model = _model(
        run.resolve().name,
        source,
        {**config.model.options, **options},
        read(found.params),
        window=config.train.sequence_length,
        tokenizer=tokenizer,
        version=found.info.round,
        ends=frozenset() if end is None else frozenset({end}),
        refresh=refresh if checkpoint is None else None,
    )
    return model


def _pretrained(folder: Path) -> ServedModel:
    layout, published = read_published(folder)
    options = layout.options(published)
    specs, tensors = read_pretrained(folder)
    unneeded = layout.unneeded(options)
    values = {
        spec.name: as_float(tensors[spec.name], spec.dtype).astype(np.float32)
        for spec in specs
        if not any(fnmatchcase(spec.name, pattern) for pattern in unneeded)
    }
    window = options.get("n_position") or published.get("max_position_embeddings") or 1024
    options = {**options, "sequence_length": min(window, 1024), "batch_size": 1}
    _, template, _ = find_builder(layout.source)(**options)
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(f"{folder} has no {TOKENIZER_FILE}: nobody knows which text its tokens stand for")
    settings = _json(folder / TOKENIZER_CONFIG)
    special = _special_tokens(settings)
    tokenizer = load_tokenizer(str(folder / TOKENIZER_FILE))
    begin = tokenizer.encode(special["bos_token"].encode()) if "bos_token" in special else ()
    ends = _json(folder / GENERATION_CONFIG).get("eos_token_id", published.get("eos_token_id"))
    known = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    return _model(
        folder.resolve().name,
        layout.source,
        options,
        fill_tree(template, values, layout.source, whole=True),
        window=window,
        tokenizer=tokenizer,
        chat_template=_template(folder, settings),
        special_tokens=tuple(special.items()),
        begins=tuple(int(token) for token in begin) if settings.get("add_bos_token") is True else (),
        ends=frozenset(known),
    )


def _model(name: str, source: str, options: Mapping[str, Any], params: Any, **others: Any) -> ServedModel:
    place = source.rpartition(":")[0]
    try:
        decode, sizes_of = find_builder(f"{place}:decode"), find_builder(f"{place}:cache_sizes")
    except UserError as error:
        raise UserError(
            f"the model {source} does not say how it caches: {error}. Add `decode(params, tokens, context, **options)` "
            "and `cache_sizes(**options)` beside it (docs/serving.md)"
        ) from error
    sizes: CacheSizes = sizes_of(**options)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    specs = tuple(TensorSpec(name, "f32", tuple(leaf.shape)) for name, (_, leaf) in zip(names, leaves, strict=True))
    function = partial(decode, **options)
    return ServedModel(
        name=name,
        decode=function,
        params=params,
        specs=specs,
        sizes=sizes,
        vocabulary=_vocabulary(function, params),
        **others,
    )


def _vocabulary(decode: Callable[..., jax.Array], params: Any) -> int:
    """Return how many tokens a model gives log-probabilities of."""
    from planetary.models.context import WholeText

    def scores(params: Any, tokens: jax.Array) -> jax.Array:
        return decode(params, tokens, WholeText(tokens))

    return int(jax.eval_shape(scores, params, jax.ShapeDtypeStruct((1, 1), jax.numpy.int32)).shape[-1])


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise TrustError(f"{path} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text()
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else ""
