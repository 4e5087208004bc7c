"""Turns a source into two token files, once: training tokens and held-out tokens, both shuffled in blocks.

A block is `sequence_length + 1` tokens: one sequence and its shifted target. Shuffling the blocks on disk
lets a lease be one contiguous range, read with one range request, while its batches are still drawn from
everywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from planetary.core.config import Config
from planetary.core.errors import ResourceError, UserError
from planetary.core.tensors import host_dtype
from planetary.data.flat_writer import FlatWriter
from planetary.data.shuffle import permutation
from planetary.data.slices import SliceOrder, eval_chunks
from planetary.data.sources import (
    documents,
    has_many_documents,
    is_held_out,
    is_token_file,
    source_digest,
    token_chunks,
    token_dtype,
)
from planetary.data.token_file import TokenFile, smallest_dtype
from planetary.data.tokenizer import BYTE_TOKENIZER, Tokenizer, load_tokenizer
from planetary.wire.messages import Slice

FORMAT = 1  # raised whenever the same source would be prepared differently
HELD_OUT_SEED = 0x6865_6C64  # not the run's seed: runs with different seeds are measured on the same batches
SHUFFLE_BYTES = 32 << 20  # copied at a time


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

    def order(self, config: Config) -> SliceOrder:
        """Return which lease stands for which tokens; raises `UserError` for less than one slice."""
        return SliceOrder(self.train, config.tokens_per_slice, self.block_tokens, config.run.seed)

    def eval_chunks(self, config: Config, batches_per_chunk: int | None = None) -> list[tuple[Slice, int]]:
        """Return the held-out batches that `config.eval.batches` asks for; see `slices.eval_chunks`."""
        return eval_chunks(self.held_out, config.eval.batches, config.tokens_per_batch, batches_per_chunk)


def prepare(config: Config, cache_dir: str | Path) -> PreparedData:
    """Tokenise, split, shuffle and cache the data that `config` names; the second call only checks digests.

    Documents (standard library files, JSON lines) are held out whole, by a hash of their name or text; of one
    long text or token file the end is held out.

    Args:
        config: reads `data`, `train.batch_size`, `train.sequence_length`, `train.inner_steps`,
            `eval.batches`, seed.
        cache_dir: the prepared folders are kept here under their key; made when missing.

    Raises:
        UserError: the source, the tokenizer or a token is not usable, or there is less than one slice of
            training data or fewer than `eval.batches` held-out batches.
        ResourceError: the disk is full or fails.
    """
    tokenizer = _tokenizer(config)
    block_tokens = config.train.sequence_length + 1
    digest = source_digest(config.data.source)
    key = _key(config, digest, tokenizer)
    folder = Path(cache_dir).absolute() / key[:32]
    preparation = _load(folder, key)
    if preparation is None:
        with _building(folder) as temporary:
            preparation = _build(config, tokenizer, digest, key, temporary)
    prepared = PreparedData(
        train=_token_file(folder, "train", preparation),
        held_out=_token_file(folder, "held_out", preparation),
        vocab_size=preparation.vocab_size,
        tokenizer=tokenizer,
        block_tokens=block_tokens,
        key=key,
        folder=folder,
        documents=preparation.documents,
    )
    prepared.order(config)
    prepared.eval_chunks(config)
    return prepared


def _tokenizer(config: Config) -> Tokenizer | None:
    if is_token_file(config.data.source) and config.data.tokenizer == BYTE_TOKENIZER:
        return None
    return load_tokenizer(config.data.tokenizer)


def _key(config: Config, digest: str, tokenizer: Tokenizer | None) -> str:
    parts = {
        "format": FORMAT,
        "source": digest,
        "kind": token_dtype(config.data.source) or ("documents" if _many(config) else "text"),
        "text_key": config.data.text_key,
        "tokenizer": tokenizer.digest if tokenizer else "",
        "held_out_fraction": config.data.held_out_fraction,
        "block_tokens": config.train.sequence_length + 1,
        "seed": config.run.seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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


def _build(config: Config, tokenizer: Tokenizer | None, digest: str, key: str, folder: Path) -> Preparation:
    block_tokens = config.train.sequence_length + 1
    flat, vocab_size, count = _write_flat(config, tokenizer, folder)
    blocks = {name: writer.count // block_tokens for name, writer in flat.items()}
    if not _many(config):
        # One long text: its last blocks are held out, at least one.
        held = max(1, round(blocks["train"] * config.data.held_out_fraction))
        sources = {"train": (0, blocks["train"] - held), "held_out": (blocks["train"] - held, held)}
        sources_of = dict.fromkeys(sources, flat["train"])
    else:
        sources = {name: (0, number) for name, number in blocks.items()}
        sources_of = flat
    dtype = smallest_dtype(vocab_size)
    digests, counts = {}, {}
    for name, (first, number) in sources.items():
        seed = config.run.seed if name == "train" else HELD_OUT_SEED
        if number < 1:
            raise UserError(
                f"the {name.replace('_', '-')} part of {config.data.source} has fewer than {block_tokens} "
                f"tokens (sequence_length + 1), of {sum(writer.count for writer in flat.values())} in all: "
                "give more data, change data.held_out_fraction, or lower train.sequence_length"
            )
        order = permutation(number, seed) + first
        digests[name] = _write_shuffled(
            sources_of[name].tokens(), order, block_tokens, folder / f"{name}.{dtype}", host_dtype(dtype)
        )
        counts[name] = number * block_tokens
    for writer in flat.values():
        writer.path.unlink()
    preparation = Preparation(
        format=FORMAT,
        key=key,
        source=config.data.source,
        source_digest=digest,
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


def _write_flat(config: Config, tokenizer: Tokenizer | None, folder: Path) -> tuple[dict[str, FlatWriter], int, int]:
    """Write all tokens in source order; return the two files, the vocabulary's size and the number of
    documents.
    """
    source = config.data.source
    raw_dtype = token_dtype(source)
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
            for tokens in token_chunks(source):
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
