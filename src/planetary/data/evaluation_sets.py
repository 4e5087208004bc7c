"""Named sets of held-out tokens: a source of which every token is evaluated, in rows as training cuts its data."""

from __future__ import annotations

import hashlib
import re

import msgspec
import numpy as np

from planetary.artifacts.store import write_atomically
from planetary.core.configuration.schema import PREFERENCE, Config, DataSource
from planetary.core.errors import UserError
from planetary.core.tensors import host_dtype
from planetary.data.metrics import OWN_SET
from planetary.data.prepare import encoded
from planetary.data.prepared_data import PreparedData
from planetary.data.recipe import part_of
from planetary.data.token_file import TokenFile
from planetary.data.tokenizer import Tokenizer

_NAME = re.compile(r"[\w-]+")


def read_set(name: str, source: DataSource, tokenizer: Tokenizer | None, place: str, vocabulary: int) -> np.ndarray:
    """Return the tokens of a source, int64 [n]; complements of tokens that are no targets.

    Args:
        name: of the set, for error texts.
        source: as of `data.sources`; `text_key` is set.
        tokenizer: of the model; None: there is none, so the source must have tokens.
        place: path of its `tokenizer.json`, whose folder has the chat template, or a name as of `data.tokenizer`.
        vocabulary: of the model, in tokens.

    Raises:
        UserError: the source is not readable, empty, or has tokens that the model does not know.
        ResourceError: the host of a URL cannot be reached.
    """
    if source.format == PREFERENCE:
        raise UserError(
            f"the set {name} ({source.source}) has pairs of answers, and a set is texts of which every one is wanted: "
            "a run on pairs evaluates its own held-out part"
        )
    part = part_of(source, place)
    if tokenizer is None and part.dtype is None:
        raise UserError(
            f"the set {name} ({source.source}) is text, and the run's data is tokens: name their tokenizer.json as "
            "data.tokenizer"
        )
    found = [piece.astype(np.int64) for _, piece in encoded(part, tokenizer)]
    tokens = np.concatenate([np.empty(0, np.int64), *found])
    if tokens.size < 2:
        raise UserError(
            f"the set {name} ({source.source}) has {tokens.size} tokens: expected two at least, one to read and one "
            "to predict"
        )
    largest = int(np.where(tokens < 0, ~tokens, tokens).max())
    if largest >= vocabulary:
        raise UserError(
            f"the set {name} ({source.source}) has token {largest}, and the model knows {vocabulary}: it was made with "
            "another tokenizer"
        )
    if not (tokens[1:] >= 0).any():
        raise UserError(f"the set {name} ({source.source}) has no target: in its chats the assistant says nothing")
    return tokens


def cut_into_rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return tokens [n] as rows [R, length + 1], as training cuts them: a row's first token is read only.

    The rest is a row of its own, filled with the complement of token 0, which is no target. Rows without a target are
    left out.
    """
    rows = np.full((-(-tokens.size // (length + 1)), length + 1), ~0, np.int64)
    rows.reshape(-1)[: tokens.size] = tokens
    return rows[(rows[:, 1:] >= 0).any(1)]


def with_sets(config: Config, data: PreparedData) -> PreparedData:
    """Return the data with the files of `eval.sets`, beside the prepared ones: the rows that are evaluated.

    Raises:
        UserError: a set has no name of its own, has fewer rows than a batch, or is unlike the data; or as `read_set`.
        ResourceError: a file cannot be written.
    """
    if data.layout is not None and config.eval.sets:
        raise UserError(
            "eval.sets: sets are texts that are read one after the other, and the data of this run is examples of "
            "several arrays (data.columns, data.packing): leave it out"
        )
    return msgspec.structs.replace(data, sets={name: _set_file(config, data, name) for name in config.eval.sets})


def _set_file(config: Config, data: PreparedData, name: str) -> TokenFile:
    if name == OWN_SET or not _NAME.fullmatch(name):
        raise UserError(f"eval.sets: {name!r} is no name of a set: expected letters, digits, _ and -, but {OWN_SET}")
    source = DataSource(config.eval.sets[name], text_key=config.data.text_key, format=config.data.format)
    size = config.model.options.get("vocab_size")
    vocabulary = max(data.vocab_size, size) if isinstance(size, int) else data.vocab_size
    dtype = data.held_out.dtype  # a task has rows of every set in one array
    vocabulary = min(vocabulary, int(np.iinfo(host_dtype(dtype)).max) + 1)
    tokens = read_set(name, source, data.tokenizer, config.data.tokenizer, vocabulary)
    if (tokens < 0).any() and not data.held_out.is_marked:
        raise UserError(
            f"the set {name} ({source.source}) has chats, of which some tokens are no targets, and the run's data has "
            "none: the training step counts every target. `planetary evaluate` evaluates them"
        )
    blocks = cut_into_rows(tokens[: tokens.size // data.block_tokens * data.block_tokens], data.block_tokens - 1)
    batches = min(config.eval.batches, len(blocks) // config.train.batch_size)
    if not batches:
        raise UserError(
            f"the set {name} ({source.source}) has {len(blocks)} rows of {data.block_tokens} tokens, and a batch takes "
            f"{config.train.batch_size}: give more data, or lower train.batch_size or train.sequence_length"
        )
    raw = blocks[: batches * config.train.batch_size].astype(host_dtype(dtype)).tobytes()
    digest = hashlib.sha256(raw).hexdigest()
    path = data.folder / f"set-{digest[:32]}.{dtype}"
    if not path.is_file() or path.read_bytes() != raw:
        write_atomically(path, raw)
    return TokenFile(str(path), dtype, len(raw) // host_dtype(dtype).itemsize, digest)
