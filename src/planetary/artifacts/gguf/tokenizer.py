"""The tokenizer in a GGUF file as a `tokenizer.json` of the `tokenizers` library, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planetary.core.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens in a file."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _bytes(*, split: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gpt-2": [_bytes(split=True)],
    "smollm": [_DIGITS, _bytes(split=True)],
    "llama-bpe": [_split(_LLAMA3), _bytes(split=False)],
    "qwen2": [_split(_QWEN2), _bytes(split=False)],
}
"""`tokenizer.ggml.pre` -> steps that split a text into words, as in the published tokenizer.json of that name."""
_COMPOSED = ("qwen2",)  # tokenizers that compose characters of Unicode first
_SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, if any.

    Raises:
        UserError: the file's tokenizer is of a kind that is not known here, or malformed.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(one, str) for one in tokens):
        raise UserError("tokenizer.ggml.tokens is no list of texts: the file has no tokenizer")
    if not tokens:
        raise UserError("tokenizer.ggml.tokens is empty")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError("tokenizer.ggml.token_type has another length than the tokens, or a token is there twice")
    if kind == "gpt2":
        found = _byte_pairs(metadata, tokens)
    elif kind == "llama":
        found = _sentence_pieces(metadata, tokens, types)
    else:
        raise UserError(f"tokenizer.ggml.model is {kind!r}: expected 'gpt2' or 'llama'")
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMES.items()}
    named = {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    found["added_tokens"] = [
        {
            **{"id": i, "content": token, "special": kind != USER, "normalized": False},
            **{"single_word": False, "lstrip": False, "rstrip": False},
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER, UNKNOWN) or token in named.values()
    ]
    adds_start = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    if adds_start and "bos_token" in named:
        found["post_processor"] = _start_with(named["bos_token"], ids["bos_token"])
    settings = {**named, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files: dict[str, Any] = {"tokenizer.json": found, "tokenizer_config.json": settings}
    template = metadata.get("tokenizer.chat_template")
    return {**files, "chat_template.jinja": template} if isinstance(template, str) else files


def _whole(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **empty, **parts, "model": {"type": "BPE", "dropout": None, **model}}


def _byte_pairs(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(name, str) or name not in SPLITS:
        raise UserError(f"tokenizer.ggml.pre is {name!r}: expected one of {', '.join(map(repr, SPLITS))}")
    merges = metadata.get("tokenizer.ggml.merges") or []
    if not isinstance(merges, list) or not all(isinstance(one, str) and " " in one for one in merges):
        raise UserError("tokenizer.ggml.merges is no list of two tokens each")
    model = {
        **dict.fromkeys(("unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **{"fuse_unk": False, "byte_fallback": False, "ignore_merges": name == "llama-bpe"},
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in merges],
    }
    steps = list(SPLITS[name])
    return _whole(
        model,
        normalizer={"type": "NFC"} if name in _COMPOSED else None,
        pre_tokenizer=steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        decoder=_bytes(split=True),
    )


def _sentence_pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return SentencePiece's byte pairs: a merge's rank is the rank of the score of the token it makes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], int | float):
        raise UserError("tokenizer.ggml.scores has another length than the tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    plain = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    made = [
        (-scores[vocab[token]], vocab[token], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token in plain
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = {
        **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")),
        "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        **{"fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
        "vocab": vocab,
        "merges": [list(one[4:]) for one in sorted(made)],
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    begins = metadata.get("tokenizer.ggml.add_space_prefix", True)
    return _whole(
        model,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
        if begins
        else spaces,
        decoder={
            "type": "Sequence",
            "decoders": [
                *(back, {"type": "ByteFallback"}, {"type": "Fuse"}),
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []),
            ],
        },
    )


def _start_with(token: str, number: Any) -> dict[str, Any]:
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, start, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def tokenizer_metadata(whole: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the metadata of a `tokenizer.json`, for a model with `size` tokens.

    Raises:
        UserError: GGUF has no name for the way it splits a text into words, or it makes no byte pairs.
    """
    model = whole["model"]
    if model.get("type") != "BPE":
        raise UserError(f"a GGUF file is written with a tokenizer of byte pairs only, found {model.get('type')!r}")
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    tokens, types = [f"[unused{i}]" for i in range(size)], [UNUSED] * size
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, NORMAL
    for added in whole.get("added_tokens") or ():
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER
    starts = "TemplateProcessing" in str(whole.get("post_processor"))
    found = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": starts}
    kind = _pieces_metadata if model.get("byte_fallback") else _byte_pairs_metadata
    return {**found, **kind(whole, merges, tokens, types), "tokenizer.ggml.token_type": types}


def _byte_pairs_metadata(
    whole: Mapping[str, Any], merges: Sequence[tuple[str, ...]], tokens: Sequence[str], types: list[int]
) -> dict[str, Any]:
    found = whole.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    name = next((name for name, known in SPLITS.items() if _same_steps(steps, known)), None if merges else "gpt-2")
    if name is None or (whole.get("decoder") or {}).get("type") != "ByteLevel":
        raise UserError(
            "GGUF has no name for the way this tokenizer.json splits a text into words; known are those of "
            f"{', '.join(SPLITS)}"
        )
    pairs = [" ".join(merge) for merge in merges]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": pairs}


def _pieces_metadata(
    whole: Mapping[str, Any], merges: Sequence[tuple[str, ...]], tokens: Sequence[str], types: list[int]
) -> dict[str, Any]:
    """Return SentencePiece's scores: minus the rank of the first merge that makes a token."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    for i, token in enumerate(tokens):
        if types[i] == NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types[i] = BYTE
    steps = str([whole.get("normalizer"), whole.get("pre_tokenizer")])
    begins = "'Prepend'" in steps or ("'Metaspace'" in steps and "'never'" not in steps)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": begins}


def _same_steps(steps: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two lists of steps split alike; how offsets are trimmed is no matter."""
    return len(steps) == len(known) and all(
        {**step, "trim_offsets": True} == {**wanted, "trim_offsets": True}
        for step, wanted in zip(steps, known, strict=True)
    )
