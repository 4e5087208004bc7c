"""The model a gateway serves, or `generate` continues texts with: a run's newest checkpoint or another one, a
file of weights, a compiled graph, a pretrained folder, or the folder of an exported served model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np

from planetary.artifacts.checkpoint import list_checkpoints, load_checkpoint, load_latest
from planetary.artifacts.pretrained_weights import read_pretrained
from planetary.artifacts.store import BlobStore
from planetary.compiler.check.logits import Logits
from planetary.compiler.frontend.export import export_model, find_builder
from planetary.core import decoding
from planetary.core.config import load_config
from planetary.core.configuration.pretrained import CONFIG_FILE, TOKENIZER_FILE, is_pretrained, read_published
from planetary.core.configuration.schema import Config, is_function
from planetary.core.configuration.weight_file import pretrained_folder, weight_file
from planetary.core.errors import TrustError, UserError
from planetary.core.tensors import DTYPE_NAMES, TensorSpec
from planetary.core.trials.deviations import as_float
from planetary.data.tokenizer import BYTE_TOKENIZER, BYTE_VALUES, JsonTokenizer, Tokenizer, load_tokenizer
from planetary.data.tokenizer_settings import read_settings, read_template
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG, PRETRAINED
from planetary.models.context import CacheSizes, StateSizes
from planetary.models.initial import undrawn
from planetary.run.kinds import kind_of
from planetary.run.model.served_adapters import with_adapters
from planetary.run.model.trained_model import (
    all_values,
    fill_tree,
    graph_logits,
    model_of_run,
    tokenizer_of_run,
    tree_names,
    weights_in,
)
from planetary.runs.rounds.preparation.adapted_model import stored_names
from planetary.runs.rounds.preparation.model_code import code_of
from planetary.runs.rounds.preparation.options import builder_options, given_weights
from planetary.runs.rounds.preparation.run_model import model_of
from planetary.runs.serve.config import ServeConfig, is_graph
from planetary.runs.serve.program.exported_model import is_exported, read_exported
from planetary.runs.serve.program.kept_traces import MODELS, KeptTraces
from planetary.runs.serve.program.program import Decode
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.traced_model import TracedModel, decoded_widths
from planetary.runs.serve.program.weight_precision import narrowed

if TYPE_CHECKING:
    from planetary.runs.mixture.results.inference import RunnableModel

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"


def load_served(config: Config, store: BlobStore | None = None) -> ServedModel:
    """Return the model that `serve.model` names; `store`: where traces of its code are kept.

    Raises:
        UserError: there is none, it has no logits, or the tokenizer has more tokens than the model.
        TrustError: a file is damaged.
    """
    path = Path(config.of(ServeConfig).model)
    model = read_exported(path) if is_exported(path) else load_traced(config, store)
    if model.tokenizer.vocab_size > model.vocabulary:
        raise UserError(
            f"the tokenizer of {path} has {model.tokenizer.vocab_size} tokens, and the model knows {model.vocabulary}: "
            "it is another model's"
        )
    if config.of(ServeConfig).follow and model.refresh is None:
        raise UserError(f"there is nothing to follow in {path}: expected the folder of a run, whose checkpoints change")
    if adapters := config.of(ServeConfig).adapters:
        if is_exported(path):
            raise UserError(f"serve.adapters: the functions in {path} are compiled already, and take none")
        if config.of(ServeConfig).follow:
            raise UserError("serve.follow with serve.adapters: an adapter belongs to one version of its model")
    name, beside = config.of(ServeConfig).name or model.name, config.of(ServeConfig).models
    if twice := next((one for one in (name, *adapters) if one in beside or (one in adapters and one == name)), ""):
        raise UserError(f"serve: two models are named {twice!r}: give each another name (NAME=FOLDER, serve.name)")
    told: dict[str, Any] = {}
    if config.of(ServeConfig).chat_template:
        try:
            told["chat_template"] = Path(config.of(ServeConfig).chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot read the chat template {config.of(ServeConfig).chat_template}: {reason}"
            ) from error
        told["adapters"] = tuple(replace(one, chat_template="") for one in model.adapters)
    if config.of(ServeConfig).name:
        told["name"] = config.of(ServeConfig).name
    return _as_told(model, told)


def _as_told(model: ServedModel, told: Mapping[str, Any]) -> ServedModel:
    """Return a model, and every later version of it, with the operator's fields."""
    refresh = model.refresh

    def refreshed(version: int) -> ServedModel | None:
        assert refresh is not None
        newer = refresh(version)
        return None if newer is None else _as_told(newer, told)

    return replace(model, **told, refresh=None if refresh is None else refreshed)


def load_traced(config: Config, store: BlobStore | None = None) -> TracedModel:
    """Return the model that `serve.model` names, of which the code is here. Raises as `load_served`."""
    path, serve = Path(config.of(ServeConfig).model), config.of(ServeConfig)
    named: Callable[[str], str] = str
    if is_graph(path):
        model = _initial_graph(path, config)
    elif is_pretrained(folder := pretrained_folder(path)):
        model, named = _pretrained(path, folder, serve, store), read_published(folder)[0].stored_name
    else:
        model = _trained(path, serve, store)
        named = stored_names(load_config(_run_of(path)[0] / CONFIG))
    model = with_adapters(model, {name: Path(folder) for name, folder in serve.adapters.items()}, named)
    return narrowed(model, serve.weights)


def load_folder(path: Path) -> TracedModel:
    """Return the model of a run folder, a checkpoint folder of one, or a pretrained folder. Raises as `load_served`."""
    if is_exported(path):
        raise UserError(f"{path} has the functions of a served model, and no code to train it with")
    return load_traced(Config().having(ServeConfig(model=str(path))))


def new_model(config: Config) -> TracedModel:
    """Return the model that `[model]` describes, with the initial values.

    Raises:
        UserError: it has no `decode` (`models.context`), or is a compiled graph.
    """
    source = config.model.source
    if not is_function(source):
        raise UserError(f"the model {source} is a compiled graph, which has no cache of keys and values to sample with")
    options = builder_options(config, source)
    cached = _cached(source, {**config.model.options, **options})
    if cached is None:
        raise UserError(
            f"the model {source} does not say what it keeps of a text: add `decode(params, tokens, context, **options)`"
            " and `cache_sizes(**options)` beside it (docs/serving.md)"
        )
    _, params, _ = find_builder(source)(**options)
    if config.model.weights:
        initial = given_weights(export_model(source, options), config.model).initial("param")
        params = fill_tree(params, initial, source)
    tokenizer = load_tokenizer(config.data.tokenizer)
    end = tokenizer.end_of_document
    texts: dict[str, Any] = {"ends": frozenset() if end is None else frozenset({end})}
    if (beside := Path(config.data.tokenizer)).is_file():
        told = _texts_in(beside.parent, _json(beside.parent / CONFIG_FILE), tokenizer)
        texts = {**told, "ends": texts["ends"] | told["ends"]}
    return _served(
        config.run.name,
        cached[0],
        params,
        cached[1],
        window=config.train.sequence_length,
        tokenizer=tokenizer,
        **texts,
    )


def load_trained(run: Path, checkpoint: Path | None = None, experts: str = ServeConfig().experts) -> TracedModel:
    """Return the model of a run's newest checkpoint, or of `checkpoint`: a folder, or a safetensors file with all of
    the model's parameters.

    A model that is `module:build` has a sibling `decode` or `logits(params, tokens, **options)`. The logits of a
    StableHLO model are found in the graph, and proved (`planetary.compiler.check.logits`).

    With other `experts` than real ones (`runs.mixture.results.inference.experts_named`) it is a mixture's newest
    state, or the surrogates beside the file `checkpoint`. A saved training can stand for a run.

    Raises:
        UserError: no run, no checkpoint, a model that has no such function, or no such experts.
        TrustError: the checkpoint is damaged.
    """
    from planetary.runs.mixture.results.inference import experts_named
    from planetary.runs.mixture.results.run_state import is_run

    experts_named(experts)  # a wrong name is an error of the command line, whatever the folder is
    if not is_run(run):
        return _saved_training(run, checkpoint, experts)
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: expected {CONFIG} in it, as `planetary train` writes it")
    config = load_config(run / CONFIG)
    if experts != "real":
        return _with_surrogates(run, config, checkpoint, experts)
    if checkpoint is not None and checkpoint.is_file():
        return _with_values(run, config, weights_in(checkpoint, config.model), whole=True)[0]
    return _of_checkpoint(run, config, checkpoint)


def _run_of(path: Path) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint's where `path` is one."""
    return (path, None) if (path / CONFIG).is_file() else (path.parent.parent, path)


def _trained(path: Path, serve: ServeConfig, store: BlobStore | None) -> TracedModel:
    """Return the model of a run's folder, or of a checkpoint's folder in one."""
    run, checkpoint = _run_of(path)
    if not (run / CONFIG).is_file():
        raise UserError(
            f"there is no model in {path}: expected a run folder, a checkpoint folder of one, a .mlir file, the folder "
            "of an exported model, or of a pretrained model as `transformers` keeps it"
        )
    config = load_config(run / CONFIG)
    if serve.experts != "real":
        return _with_surrogates(run, config, checkpoint, serve.experts)
    return _of_checkpoint(run, config, checkpoint, store)


def _of_checkpoint(run: Path, config: Config, checkpoint: Path | None, store: BlobStore | None = None) -> TracedModel:
    """Return the model of a checkpoint; None: of the newest one, and later of newer ones."""
    found = load_latest(run / CHECKPOINTS) if checkpoint is None else load_checkpoint(checkpoint)
    model, read = _with_values(run, config, found.params, store, version=found.info.round)
    return model if checkpoint is not None else _followed(run, model, read)


def _with_values(
    run: Path,
    config: Config,
    values: Mapping[str, np.ndarray],
    store: BlobStore | None = None,
    *,
    whole: bool = False,
    **others: Any,
) -> tuple[TracedModel, Callable[[Mapping[str, np.ndarray]], Any]]:
    """Return a run's model with these parameters, and the function from other parameters to the pytree.

    `whole`: the values are those of all tensors, and not of the trained ones alone.
    """
    source, name = config.model.source, run.resolve().name
    texts = {**_texts_of(run, config), **others}
    if is_function(source):
        read = partial(_filled, run, config)
        return _coded(name, config, _filled(run, config, values, whole=whole), store, **texts), read
    graph, given = graph_logits(model_of_run(run, config), values)
    return _graph(name, source, graph, given, **texts), partial(_graph_values, graph, given)


def _followed(run: Path, model: TracedModel, read: Callable[[Mapping[str, np.ndarray]], Any]) -> TracedModel:
    """Return the model with `refresh`; `read` makes its parameters of a checkpoint's."""

    def refresh(version: int) -> TracedModel | None:
        entries = list_checkpoints(run / CHECKPOINTS)
        if not entries or entries[-1].round <= version:
            return None
        newest = load_latest(run / CHECKPOINTS)
        return _followed(run, replace(model, params=read(newest.params), version=newest.info.round), read)

    return replace(model, refresh=refresh)


def _coded(name: str, config: Config, params: Any, store: BlobStore | None, **texts: Any) -> TracedModel:
    """Return a model of a function or a PyTorch module: with a cache, or by whole forward passes."""
    source = config.model.source
    options = builder_options(config, source)
    options = {**config.model.options, **options}
    cached = _cached(source, options)
    if cached is not None:
        traces = KeptTraces(store, source, options) if store is not None and source.startswith(MODELS) else None
        return _served(name, cached[0], params, cached[1], traces, **texts)
    warning = (
        f"the model {source} does not say what it keeps of a text: every token takes a forward pass of the whole text. "
        "Add `decode(params, tokens, context, **options)` and `cache_sizes(**options)` beside it (docs/serving.md)"
    )
    logits, _ = code_of(config)
    return _served(name, partial(_whole_texts, logits), params, None, warning=warning, **texts)


def _filled(run: Path, config: Config, params: Mapping[str, np.ndarray], *, whole: bool = False) -> Any:
    """Return the pytree a model's code expects, with a checkpoint's parameters, or with those of all tensors."""
    source = config.model.source
    _, template, _ = find_builder(source)(**builder_options(config, source))
    values = params if whole else all_values(run, config, tree_names(template), params)
    return _host_values(fill_tree(template, values, source, whole=whole))


def _host_values(params: Any) -> Any:
    """Return a pytree as host arrays: every float as float32, integers and booleans as they are."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float32 if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else None),
        params,
    )


def _graph_values(
    graph: Logits, values: Mapping[str, np.ndarray], params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return graph.values({**values, **params})


def _graph(name: str, source: str, logits: Logits, values: dict[str, np.ndarray], **texts: Any) -> TracedModel:
    """Return a model whose only function is the loss, with the logits found in it."""
    batch, length, vocabulary = logits.shape
    return TracedModel(
        name=name,
        decode=partial(_whole_texts, logits.traced()),
        params=values,
        specs=tuple(_spec(key, values[key]) for key in sorted(values)),
        sizes=None,
        only_length=length,
        vocabulary=vocabulary,
        warning=(
            f"{source} is a compiled graph, which does not say what it keeps of a text: every token takes a forward "
            f"pass of its whole batch, {batch} x {length} tokens. A Python function with `decode` and `cache_sizes` is "
            "served from a cache (docs/serving.md)"
        ),
        **{**texts, "window": length},
    )


def _initial_graph(path: Path, config: Config) -> TracedModel:
    """Return a compiled graph with the initial parameters, or those of `model.weights`."""
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, source=str(path)))
    tokenizer = load_tokenizer(config.data.tokenizer)
    end = tokenizer.end_of_document
    graph = model_of(config)
    logits, values = graph_logits(graph, graph.start)
    return _graph(
        path.resolve().stem,
        str(path),
        logits,
        values,
        tokenizer=tokenizer,
        ends=frozenset() if end is None else frozenset({end}),
    )


def _spec(name: str, value: np.ndarray) -> TensorSpec:
    if value.dtype not in DTYPE_NAMES:
        raise UserError(f"the parameter {name!r} has elements of type {value.dtype}, with which no model is served")
    return TensorSpec(name, DTYPE_NAMES[value.dtype], value.shape)


def _with_surrogates(run: Path, config: Config, checkpoint: Path | None, experts: str) -> TracedModel:
    """Return a mixture with surrogates in place of all experts, or of those a composer does not own."""
    from planetary.runs.mixture.plan import model_of
    from planetary.runs.mixture.results.exported_files import SURROGATES
    from planetary.runs.mixture.results.inference import experts_named, model_with, with_surrogates
    from planetary.runs.mixture.results.run_state import read_run

    wanted, texts = experts_named(experts), _texts_of(run, config)
    name = f"{run.resolve().name}-{experts.replace(':', '-')}"
    if checkpoint is None:
        kind_of(config).check_surrogates(run)
        saved = read_run(run, config)
        version = saved.state.steps // config.train.inner_steps
        return _mixture(name, model_with(saved, wanted), version=version, **texts)
    if not checkpoint.is_file():
        raise UserError(
            f"cannot take surrogates from {checkpoint}: a checkpoint holds the model with its real experts only. Leave "
            f"it out and name the run {run}, whose newest state has the surrogates"
        )
    beside = checkpoint.with_name(SURROGATES)
    if wanted.kind == "composer" or not beside.is_file():
        raise UserError(
            f"cannot use other than real experts with {checkpoint}: expected --experts surrogates, and "
            f"{SURROGATES} beside it as `planetary moe export` writes it; what a composer has is in its run's "
            "folder only"
        )
    weights, stand_ins = (weights_in(path, config.model) for path in (checkpoint, beside))
    return _mixture(name, with_surrogates(weights, stand_ins, model_of(config)), **texts)


def _saved_training(folder: Path, checkpoint: Path | None, experts: str) -> TracedModel:
    from planetary.runs.mixture.results.inference import experts_named, model_with
    from planetary.runs.mixture.training.saved import read_training

    wanted = experts_named(experts)
    if checkpoint is not None:
        raise UserError(f"the saved training {folder} is a single state: leave --checkpoint {checkpoint} out")
    saved = read_training(folder)
    if saved.config.vocab_size > BYTE_VALUES:
        raise UserError(
            f"the saved training {folder} does not say which tokenizer its {saved.config.vocab_size} tokens come from: "
            "write its model with `planetary moe export --tokenizer`, and generate from that"
        )
    window, tokenizer = saved.config.sequence_length, load_tokenizer(BYTE_TOKENIZER)
    return _mixture(folder.resolve().name, model_with(saved, wanted), window=window, tokenizer=tokenizer)


def _mixture(name: str, model: RunnableModel, **texts: Any) -> TracedModel:
    config = model.config
    sizes = CacheSizes(config.n_layer, config.n_kv_head, config.n_embd // config.n_head)
    return _served(name, model.decode, model.params, sizes, **texts)


def _texts_of(run: Path, config: Config) -> dict[str, Any]:
    """Return a run's window, tokenizer, template and end tokens, as keyword arguments of a served model.

    The template and more end tokens are those of the pretrained folder the run started from.
    """
    tokenizer = tokenizer_of_run(run, config)
    end = tokenizer.end_of_document
    texts = {"begins": tokenizer.added[0], "ends": frozenset() if end is None else frozenset({end})}
    kept = run / PRETRAINED
    if (kept / TOKENIZER_FILE).is_file():
        told = _texts_in(kept, _json(kept / CONFIG_FILE), tokenizer)
        texts = {**texts, **told, "ends": texts["ends"] | told["ends"]}
    return {"window": config.train.sequence_length, "tokenizer": tokenizer, **texts}


def _texts_in(folder: Path, published: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return template, special and end tokens of a tokenizer's folder, as keyword arguments of a served model."""
    names = read_settings(folder).names
    ends = _json(folder / GENERATION_CONFIG).get("eos_token_id", published.get("eos_token_id"))
    if ends is None and isinstance(tokenizer, JsonTokenizer):  # a tokenizer without a model
        ends = tokenizer.id_of(dict(names).get("eos_token", ""))
    return {
        "chat_template": read_template(folder),
        "special_tokens": tuple(names),
        "begins": tokenizer.added[0],
        "ends": frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)),
    }


def _pretrained(path: Path, folder: Path, serve: ServeConfig, store: BlobStore | None) -> TracedModel:
    """Return the model of a folder; `path`: itself, or the GGUF file it stands for."""
    if serve.experts != "real":
        raise UserError(f"serve.experts = {serve.experts!r}: {path} is no mixture, whose run has surrogates")
    family, published = read_published(folder)
    options = family.options(published)
    specs, found = read_pretrained(folder)
    tensors = dict(found)  # not two copies of all: each is dropped once it is float32
    del found
    unneeded = family.unneeded(options)
    values = {
        spec.name: as_float(tensors.pop(spec.name), spec.dtype).astype(np.float32, copy=False)
        for spec in specs
        if not any(fnmatchcase(spec.name, pattern) for pattern in unneeded)
    }
    window = options.get("n_position") or published.get("max_position_embeddings") or 1024
    options = {**options, "sequence_length": 1, "batch_size": 1}
    cached = _cached(family.source, options)
    assert cached is not None, f"{family.source} has no decode"
    window = cached[1].positions or window
    with undrawn():
        _, template, _ = find_builder(family.source)(**options)
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(f"{folder} has no {TOKENIZER_FILE}, without which its tokens have no text")
    tokenizer = load_tokenizer(str(folder / TOKENIZER_FILE))
    return _served(
        path.resolve().stem if weight_file(path) else path.resolve().name,
        cached[0],
        fill_tree(template, values, family.source, whole=True),
        cached[1],
        None if store is None else KeptTraces(store, family.source, options),
        window=window,
        tokenizer=tokenizer,
        **_texts_in(folder, published, tokenizer),
        warning=_differences(folder, _json(folder / TOKENIZER_CONFIG), *tokenizer.added),
    )


def _cached(source: str, options: Mapping[str, Any]) -> tuple[Decode, CacheSizes | StateSizes] | None:
    """Return a model's decoding function and the sizes of the cache or state; None: it declares none."""
    place = source.rpartition(":")[0]
    sizes_of = _function(f"{place}:cache_sizes") or _function(f"{place}:state_sizes")
    decode = _function(f"{place}:decode")
    return None if sizes_of is None or decode is None else (partial(decode, **options), sizes_of(**options))


def _whole_texts(
    logits: Callable[[Any, jax.Array], jax.Array], params: Any, tokens: jax.Array, context: Any
) -> jax.Array:
    """Compute `decode` of a model that has `logits` alone, whose calls have whole texts."""
    return context.wanted(logits(params, tokens))


def _function(source: str) -> Callable[..., Any] | None:
    try:
        return find_builder(source)
    except UserError:
        return None


def _served(
    name: str,
    decode: Decode,
    params: Any,
    sizes: CacheSizes | StateSizes | None,
    traces: KeptTraces | None = None,
    **others: Any,
) -> TracedModel:
    params = _host_values(params)
    specs = tuple(map(_spec, tree_names(params), jax.tree.leaves(params)))

    def widths() -> bytes:
        return msgspec.json.encode(decoded_widths(decode, params))

    found = widths() if traces is None else traces.get(("widths", specs), widths)
    vocabulary, hidden = decoding.from_json(found, tuple[int, int])
    return TracedModel(
        name=name,
        decode=decode,
        params=params,
        specs=specs,
        sizes=sizes,
        vocabulary=vocabulary,
        hidden=0 if sizes is None else hidden,
        traces=traces,
        **others,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise TrustError(f"{path} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _differences(folder: Path, settings: Mapping[str, Any], begins: Sequence[int], after: Sequence[int]) -> str:
    """Return what may surprise who knows a folder's `tokenizer_config.json`; "": nothing."""
    if after:
        return (
            f"{folder / TOKENIZER_FILE} puts the tokens {list(after)} after every text: prompts are continued without "
            "them, because nothing follows the end of a text"
        )
    wanted = settings.get("add_bos_token")
    if isinstance(wanted, bool) and wanted != bool(begins):
        does = "adds a token before every text" if begins else "adds no token before a text"
        return (
            f"add_bos_token = {str(wanted).lower()} in {folder / TOKENIZER_CONFIG} has no effect, as in transformers 5:"
            f" the post-processor of {TOKENIZER_FILE} decides, which {does}"
        )
    return ""
