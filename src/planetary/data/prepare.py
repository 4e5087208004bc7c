"""Turns a source into two token files, once: training tokens and held-out tokens, both shuffled in blocks.

A block is `sequence_length + 1` tokens: one sequence and its shifted target. Shuffling the blocks on disk
lets a lease be one contiguous range, read with one range request, while its batches are still drawn from
everywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from planetary.core.config import Config
from planetary.core.errors import ResourceError, UserError
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import Slice
from planetary.data.flat_writer import FlatWriter
from planetary.data.shuffle import permutation
from planetary.data.slices import SliceOrder, eval_chunks
from planetary.data.sources import (
    SourceContents,
    documents,
    has_many_documents,
    is_held_out,
    source_contents,
    token_chunks,
    token_dtype,
)
from planetary.data.token_file import TokenFile, smallest_dtype
from planetary.data.tokenizer import (
    BYTE_TOKENIZER,
    CHAR_TOKENIZER,
    U16_TOKENS,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
)

log = logging.getLogger(__name__)

FORMAT = 1  # raised whenever the same source would be prepared differently
HELD_OUT_SEED = 0x6865_6C64  # not the run's seed: runs with different seeds are measured on the same batches
SHUFFLE_BYTES = 32 << 20  # copied at a time
SMALL_BATCHES = 8  # a source whose held-out bytes are fewer than so many batches has tokens is a small one


class Preparation(msgspec.Struct, frozen=True):
    """What `prepared.json` in the cache says; its presence says that the folder is complete."""

    format: int
    key: str
    source: str
    source_digest: str
    tokenizer_digest: str
    vocab_size: int
    block_tokens: int
    dtype: str
    documents: int  # 1: the held-out part is the end of one long text
    train_count: int
    train_digest: str
    held_out_count: int
    held_out_digest: str


class PreparedData(msgspec.Struct, frozen=True):
    """Token files that are ready to be trained on."""

    train: TokenFile
    held_out: TokenFile
    vocab_size: int  # every token is below it
    tokenizer: Tokenizer | None  # None: the source is a token file and no tokenizer.json was given
    block_tokens: int
    key: str  # sha256 (hex) of everything the files depend on: equal keys mean equal tokens in equal order
    folder: Path
    documents: int

    def order(self, config: Config, slice_tokens: int | None = None) -> SliceOrder:
        """Return which lease stands for which tokens; raises `UserError` for less than one slice.

        `slice_tokens`: of a lease; None: what one worker trains in a round.
        """
        return SliceOrder(
            self.train,
            config.tokens_per_slice if slice_tokens is None else slice_tokens,
            self.block_tokens,
            config.run.seed,
            config.data.sampling,
            config.data.shuffle_leases,
        )

    def eval_chunks(self, config: Config, batches_per_chunk: int | None = None) -> list[tuple[Slice, int]]:
        """Return the held-out batches that `config.eval.batches` asks for; see `slices.eval_chunks`."""
        return eval_chunks(self.held_out, config.eval.batches, config.tokens_per_batch, batches_per_chunk)


def prepare(config: Config, cache_dir: str | Path) -> PreparedData:
    """Tokenise, split, shuffle and cache the data that `config` names; the second call only checks digests.

    Documents (standard library files, JSON lines) are held out whole, by a hash of their name or text; of one
    long text or token file, and of documents too few for that, the end is held out. Whether there is enough for the
    run is judged by `data.fitting`.

    Args:
        config: reads `data`, `train.batch_size`, `train.sequence_length` and the seed.
        cache_dir: the prepared folders are kept here under their key; made when missing.

    Raises:
        UserError: the source, the tokenizer or a token is not usable, or there is no whole sequence to train on or to
            hold out.
        ResourceError: the disk is full or fails.
    """
    recipe = _recipe(config)
    folder = Path(cache_dir).absolute() / recipe.key[:32]
    preparation = _load(folder, recipe.key)
    if preparation is None:
        with _building(folder) as temporary:
            preparation = _build(config, recipe, temporary)
    return PreparedData(
        train=_token_file(folder, "train", preparation),
        held_out=_token_file(folder, "held_out", preparation),
        vocab_size=preparation.vocab_size,
        tokenizer=CharTokenizer.load(folder) if recipe.characters else recipe.tokenizer,
        block_tokens=config.train.sequence_length + 1,
        key=recipe.key,
        folder=folder,
        documents=preparation.documents,
    )


class _Recipe(msgspec.Struct, frozen=True):
    """What decides about the prepared files before the source is tokenised."""

    key: str
    source: SourceContents
    dtype: str | None  # of the tokens in the source; None: it is text
    tokenizer: Tokenizer | None  # None: tokens need none, or it is made of the data's characters
    characters: bool
    least_held_out: int  # blocks; 0: whatever `data.held_out_fraction` gives


def _recipe(config: Config) -> _Recipe:
    data, source = config.data, source_contents(config.data.source)
    dtype = _dtype_of_tokens(config)
    characters = dtype is None and data.tokenizer == CHAR_TOKENIZER
    needs_none = dtype is not None and data.tokenizer in {BYTE_TOKENIZER, CHAR_TOKENIZER, U16_TOKENS}
    tokenizer = None if characters or needs_none else load_tokenizer(data.tokenizer)
    # A small source must give a whole batch to measure on. The bound is generous, as a token may take many bytes; above
    # it the files do not depend on the batch.
    is_small = source.nbytes * data.held_out_fraction < SMALL_BATCHES * config.tokens_per_batch
    least = config.train.batch_size if is_small else 0
    parts = {
        "format": FORMAT,
        "source": source.digest,
        "kind": dtype or ("documents" if _many(config) else "text"),
        "text_key": data.text_key,
        "tokenizer": CHAR_TOKENIZER if characters else tokenizer.digest if tokenizer else "",
        "held_out_fraction": data.held_out_fraction,
        "block_tokens": config.train.sequence_length + 1,
        "seed": config.run.seed,
    }
    if data.sampling != "random":
        parts["in_order"] = True
    if least:
        parts["least_held_out"] = least
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _Recipe(key, source, dtype, tokenizer, characters, least)


def _dtype_of_tokens(config: Config) -> str | None:
    """Return the element type of a source that is a token file, and None for text."""
    dtype = token_dtype(config.data.source)
    if config.data.tokenizer != U16_TOKENS:
        return dtype
    if dtype not in (None, "ui16") or _many(config):
        raise UserError(
            f'data.tokenizer = "u16" is for a file of 16-bit tokens, but data.source is {config.data.source}: leave '
            "data.tokenizer out, or give the token file"
        )
    return "ui16"


def _many(config: Config) -> bool:
    return has_many_documents(config.data.source)


# --- the cache ----------------------------------------------------------------------------------------------


def _token_file(folder: Path, which: str, preparation: Preparation) -> TokenFile:
    count = preparation.train_count if which == "train" else preparation.held_out_count
    digest = preparation.train_digest if which == "train" else preparation.held_out_digest
    return TokenFile(str(folder / f"{which}.{preparation.dtype}"), preparation.dtype, count, digest)


def _load(folder: Path, key: str) -> Preparation | None:
    """Return a prepared folder's description when it is complete and intact; remove it when it is damaged."""
    try:
        preparation = msgspec.json.decode((folder / "prepared.json").read_bytes(), type=Preparation)
    except (OSError, msgspec.DecodeError):
        preparation = None
    if preparation is not None and preparation.key == key:
        files = [_token_file(folder, which, preparation) for which in ("train", "held_out")]
        if all(_file_digest(Path(file.url)) == file.digest for file in files):
            return preparation
    if folder.exists():
        shutil.rmtree(folder)  # it is a cache: what is damaged is made again
    return None


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` at the end, or vanishes on an error."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "prepared.json").is_file():  # otherwise another process was faster with the same data
                raise
    except OSError as error:
        raise ResourceError(f"writing the prepared data to {folder.parent} failed: {error}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


# --- building -----------------------------------------------------------------------------------------------


def _build(config: Config, recipe: _Recipe, folder: Path) -> Preparation:
    block_tokens = config.train.sequence_length + 1
    tokenizer = recipe.tokenizer
    if recipe.characters:
        texts = (document.text for document in documents(config.data.source, config.data.text_key))
        tokenizer = CharTokenizer.of_texts(texts, config.data.source)
        tokenizer.save(folder)
    flat, vocab_size, count = _write_flat(config, recipe.dtype, tokenizer, folder)
    parts = _split(config, recipe, {name: writer.count // block_tokens for name, writer in flat.items()})
    dtype = smallest_dtype(vocab_size)
    digests, counts = {}, {}
    for name, (origin, first, number) in parts.items():
        seed = config.run.seed if name == "train" else HELD_OUT_SEED
        if number < 1:
            if not any(writer.count for writer in flat.values()):
                raise UserError(f"the training data {config.data.source} is empty: expected text or tokens")
            raise UserError(
                f"the {name.replace('_', '-')} part of {config.data.source} has fewer than {block_tokens} "
                f"tokens (sequence_length + 1), of {sum(writer.count for writer in flat.values())} in all: "
                "give more data, change data.held_out_fraction, or lower train.sequence_length"
            )
        in_order = name == "train" and config.data.sampling != "random"
        order = (np.arange(number) if in_order else permutation(number, seed)) + first
        digests[name] = _write_shuffled(
            flat[origin].tokens(), order, block_tokens, folder / f"{name}.{dtype}", host_dtype(dtype)
        )
        counts[name] = number * block_tokens
    for writer in flat.values():
        writer.path.unlink()
    preparation = Preparation(
        format=FORMAT,
        key=recipe.key,
        source=config.data.source,
        source_digest=recipe.source.digest,
        tokenizer_digest=tokenizer.digest if tokenizer else "",
        vocab_size=vocab_size,
        block_tokens=block_tokens,
        dtype=dtype,
        documents=count,
        train_count=counts["train"],
        train_digest=digests["train"],
        held_out_count=counts["held_out"],
        held_out_digest=digests["held_out"],
    )
    with (folder / "prepared.json").open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(preparation), indent=2))
        file.flush()
        os.fsync(file.fileno())
    return preparation


def _split(config: Config, recipe: _Recipe, blocks: Mapping[str, int]) -> dict[str, tuple[str, int, int]]:
    """Return for either part which file its blocks come from, the first of them and their number."""
    train, held = blocks["train"], blocks["held_out"]
    if _many(config):
        if held >= max(1, recipe.least_held_out):
            return {"train": ("train", 0, train), "held_out": ("held_out", 0, held)}
        if train:
            log.warning(
                "%s: its documents are too few to hold %g of them out whole; the end of the last ones is held out",
                config.data.source,
                config.data.held_out_fraction,
            )
    # One long text: its last blocks are held out, at least one, and never more than half for the sake of a whole batch.
    share = round(train * config.data.held_out_fraction)
    held = max(1, share, min(recipe.least_held_out, train // 2))
    return {"train": ("train", 0, train - held), "held_out": ("train", train - held, held)}


def _write_flat(
    config: Config, raw_dtype: str | None, tokenizer: Tokenizer | None, folder: Path
) -> tuple[dict[str, FlatWriter], int, int]:
    """Write all tokens in source order; return the two files, the vocabulary's size and the number of
    documents.
    """
    source = config.data.source
    if raw_dtype is None:
        assert tokenizer is not None
        dtype = smallest_dtype(tokenizer.vocab_size)
    else:
        dtype = raw_dtype
    count = 0
    with (
        FlatWriter(folder / "train.flat", dtype) as train,
        FlatWriter(folder / "held_out.flat", dtype) as held,
    ):
        if raw_dtype is not None:
            for tokens in token_chunks(source, raw_dtype):
                train.write(tokens)
            count = 1
        else:
            assert tokenizer is not None
            many = _many(config)
            for document in documents(source, config.data.text_key):
                out = held if many and is_held_out(document.name, config.data.held_out_fraction) else train
                out.write(tokenizer.encode(document.text))
                count += document.last
                if many and document.last and tokenizer.end_of_document is not None:
                    out.write(np.array([tokenizer.end_of_document], host_dtype(dtype)))
    largest = max(train.largest, held.largest)
    vocab_size = tokenizer.vocab_size if tokenizer else largest + 1
    if largest >= vocab_size:
        raise UserError(
            f"{source} contains token {largest}, but the tokenizer {config.data.tokenizer} only has ids "
            f"below {vocab_size}: they do not belong together"
        )
    return {"train": train, "held_out": held}, vocab_size, count


def _write_shuffled(tokens: np.ndarray, order: np.ndarray, block_tokens: int, path: Path, dtype: np.dtype) -> str:
    """Write the blocks of `tokens` in `order` as `dtype`; return the sha256 of the file."""
    blocks = tokens[: tokens.size // block_tokens * block_tokens].reshape(-1, block_tokens)
    step = max(1, SHUFFLE_BYTES // (block_tokens * dtype.itemsize))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for first in range(0, order.size, step):
            part = blocks[order[first : first + step]].astype(dtype).tobytes()
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
