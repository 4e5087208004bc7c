"""GGUF files: headers are checked against the file, blocks and tokenizers are those of others."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planetary.artifacts.gguf.blocks import decoded, encoded_q8_0, read_tensor
from planetary.artifacts.gguf.families import family_of_file
from planetary.artifacts.gguf.header import KINDS, read_header
from planetary.artifacts.gguf.tokenizer import tokenizer_files, tokenizer_metadata
from planetary.artifacts.gguf.writer import gguf_pieces
from planetary.core.configuration.weight_file import pretrained_folder
from planetary.core.errors import TrustError, UserError
from planetary.data.tokenizer import ByteTokenizer, JsonTokenizer

MATRIX = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
TENSORS = {"token_embd.weight": MATRIX, "output_norm.weight": np.ones(3, np.float32)}
METADATA = {"general.architecture": "llama", "a.list": [1, 2], "texts": ["x", "é"], "flag": True, "number": 0.5}


def file_of(place: Path, metadata: dict[str, Any] = METADATA, kind: str = "f16") -> Path:
    path = place / "model.gguf"
    path.write_bytes(b"".join(gguf_pieces(metadata, TENSORS, kind)))
    return path


@pytest.mark.parametrize(("kind", "accuracy"), [("f16", 5e-4), ("q8_0", 5e-3)])
def test_a_file_is_read_back(tmp_path: Path, kind: str, accuracy: float) -> None:
    header = read_header(file_of(tmp_path, kind=kind))
    assert header.metadata.items() >= METADATA.items()
    assert {name: one.kind.name for name, one in header.tensors.items()} == {
        "token_embd.weight": kind,
        "output_norm.weight": "f32",
    }
    for name, value in TENSORS.items():
        np.testing.assert_allclose(read_tensor(header.path, header.tensors[name]), value, atol=accuracy)


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    raw = name.encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def raw_file(place: Path, *entries: bytes, size: int = 64, count: int | None = None) -> Path:
    """Write a file with these tensors' entries and `size` bytes of tensors."""
    whole = b"GGUF" + struct.pack("<IQQ", 3, len(entries) if count is None else count, 0) + b"".join(entries)
    place.write_bytes(whole.ljust(-(-len(whole) // 32) * 32, b"\0") + b"\0" * size)
    return place


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([entry("w", (16,), 0, 32)], r"was cut: tensor 'w' ends at byte \d+ of \d+"),
        ([entry("w", (16,), 0, 2**63)], "was cut"),
        ([entry("w", (16,), 0, 4)], "overlaps the header, or is not aligned"),
        ([entry("w", (8,), 0, 0), entry("v", (8,), 0, 0)], "overlaps tensor"),
        ([entry("w", (8,), 0, 0), entry("w", (8,), 0, 32)], "'w' is there twice"),
        ([entry("w", (10**9, 10**9), 0, 0)], "was cut"),
        ([entry("w", (2**62, 2**62, 2**62), 0, 0)], "impossible shape"),
        ([entry("w", (0,), 0, 0)], "impossible shape"),
        ([entry("w", (30,), 2, 0)], "impossible shape .* for q4_0"),
        ([struct.pack("<Q", 1) + b"w" + struct.pack("<I", 10**9)], "1000000000 dimensions: expected at most 4"),
        ([struct.pack("<Q", 2**60) + b"w"], "was cut, or its header is wrong: a tensor's name takes"),
    ],
)
def test_a_lying_header_is_refused_before_memory_is_taken(tmp_path: Path, entries: list[bytes], text: str) -> None:
    path = raw_file(tmp_path / "model.gguf", *entries)
    tracemalloc.start()
    try:
        with pytest.raises(TrustError, match=text):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_other_files_and_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="1152921504606846976 tensors do not fit"):
        read_header(raw_file(tmp_path / "count.gguf", count=2**60))
    with pytest.raises(UserError, match=r"'w' has elements of type iq4_nl: expected one of f32, .*q6_k"):
        read_header(raw_file(tmp_path / "kind.gguf", entry("w", (32,), 20, 0)))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK")
    with pytest.raises(TrustError, match="is no GGUF file"):
        read_header(other)
    other.write_bytes(b"GGUF" + struct.pack(">I", 3) + b"\0" * 16)
    with pytest.raises(TrustError, match="version 50331648: expected 2 or 3, little endian"):
        read_header(other)
    whole = file_of(tmp_path).read_bytes()
    for size in range(0, len(whole) - 32, 7):  # the last tensor is shorter than its place
        other.write_bytes(whole[:size])
        with pytest.raises(TrustError):
            read_header(other)


def test_an_unknown_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANETARY_CACHE", str(tmp_path))
    path = file_of(tmp_path, {"general.architecture": "rwkv7"})
    with pytest.raises(UserError, match=r"model\.gguf: general\.architecture is 'rwkv7'; GGUF files can be of 'llama'"):
        pretrained_folder(path)
    path = file_of(tmp_path, {"general.architecture": "llama", "llama.expert_count": 8})
    with pytest.raises(UserError, match=r"llama\.expert_count is 8, a setting that is not known here"):
        pretrained_folder(path)
    path = file_of(tmp_path, {"general.architecture": "llama", "tokenizer.ggml.model": "bert", "x.y": 1})
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.tokens is no list of texts"):
        pretrained_folder(path)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_junk_in_the_metadata_is_an_error_of_the_user(architecture: str) -> None:
    family = family_of_file(architecture)
    sizes = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    metadata: dict[str, Any] = {f"{architecture}.{name}": 4 for name in (*sizes, "attention.key_length")}
    metadata |= {f"{architecture}.rope.dimension_count": 4, f"{architecture}.attention.value_length": 4}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    metadata |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.pre": "smollm"}
    metadata |= {"tokenizer.ggml.scores": [0.0] * 3, "tokenizer.ggml.token_type": [1] * 3}
    shapes = {"token_embd.weight": (3, 4)}
    assert tokenizer_files(metadata)
    assert family.published(metadata, shapes)["hidden_size"] == 4
    for key in metadata:
        for value in ("x", "llama", -1, 0, 10**12, 0.5, True, [], ["x"], [1, 2], [0.5]):
            changed = {**metadata, key: value}
            with contextlib.suppress(UserError):
                tokenizer_files(changed)
            with contextlib.suppress(UserError):
                family.published(changed, shapes)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken': expected one of 'gpt-2', 'smollm'"),
        ({"tokenizer.ggml.token_type": [1]}, "has another length than the tokens"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores has another length"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused(changed: dict[str, Any], text: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    with pytest.raises(UserError, match=text):
        tokenizer_files({**metadata, **changed})


def test_sentence_pieces_merge_by_score() -> None:
    """The pieces of the highest score are put together first; unknown characters become bytes."""
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "ab", "bc", "▁ab"]
    metadata = {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens},
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, *[1] * 7],
        "tokenizer.ggml.scores": [*[0.0] * 5, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0],
        **{"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
    }
    files = tokenizer_files(metadata)
    made = JsonTokenizer(json.dumps(files["tokenizer.json"]).encode(), "made")
    assert made.encode(b"abc").tolist() == [5, 6, 10]
    assert made.encode("ab é".encode()).tolist() == [11, 5, 3, 4]
    assert made.added == ((1,), ())
    assert made.decode([11, 5, 3, 4]).decode() == "ab é"
    again = {**metadata, **tokenizer_metadata(files["tokenizer.json"], len(tokens))}
    other = JsonTokenizer(json.dumps(tokenizer_files(again)["tokenizer.json"]).encode(), "again")
    for text in ("abc", "ab é", "cab bc ab", "  a"):
        assert other.encode(text.encode()).tolist() == made.encode(text.encode()).tolist()
    assert again["tokenizer.ggml.token_type"][3:5] == [6, 6]
    assert files["tokenizer_config.json"]["eos_token"] == "</s>"


def test_a_tokenizer_is_written_and_read_back() -> None:
    whole = json.loads(ByteTokenizer().to_json())
    metadata = tokenizer_metadata(whole, 300)
    assert len(metadata["tokenizer.ggml.tokens"]) == 300
    again = JsonTokenizer(json.dumps(tokenizer_files(metadata)["tokenizer.json"]).encode(), "made")
    assert again.encode("é 12\n".encode()).tolist() == list("é 12\n".encode())
    whole["pre_tokenizer"]["use_regex"], whole["model"]["merges"] = False, [["a", "b"]]
    with pytest.raises(UserError, match=r"GGUF has no name for the way this tokenizer\.json splits"):
        tokenizer_metadata(whole, 300)


@pytest.mark.doors("gguf")
def test_numbers_are_those_of_the_gguf_package() -> None:
    from gguf import GGMLQuantizationType, quants

    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore", over="ignore"):
        for kind in KINDS.values():
            raw = rng.integers(0, 256, (64, kind.nbytes)).astype(np.uint8)
            expected = quants.dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind.name.upper()])
            np.testing.assert_array_equal(decoded(kind.name, raw), expected.reshape(-1), err_msg=kind.name)
    values = rng.normal(size=(8, 64)).astype(np.float32)
    values[1] = 0
    expected = quants.quantize(values, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(encoded_q8_0(values).reshape(-1), expected.reshape(-1))
