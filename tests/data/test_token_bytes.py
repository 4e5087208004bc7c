"""The bytes of single tokens, put together, are the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from planetary.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer

TEXT = "a small river \U0001f9ed past the\n old mill, é 3"


def byte_level() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|start|>", "<|é|>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(["a small river runs past the old mill"] * 20, trainer)
    return made


def with_fallback() -> Any:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,3", "▁a", "▁o"]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = models.BPE(vocabulary, [("▁", "a"), ("▁", "o")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return made


def joined(tokenizer: JsonTokenizer, text: str) -> bytes:
    return b"".join(tokenizer.token_bytes(int(token)) for token in tokenizer.encode(text.encode()))


def test_bytes_of_byte_level_tokens_are_the_text() -> None:
    tokenizer = JsonTokenizer(byte_level().to_str().encode(), "t")
    assert joined(tokenizer, TEXT) == TEXT.encode()
    parts = [tokenizer.token_bytes(int(token)) for token in tokenizer.encode("\U0001f9ed".encode())]
    assert len(parts) > 1
    assert "\U0001f9ed".encode().startswith(parts[0])
    assert joined(tokenizer, "<|é|>") == "<|é|>".encode()
    assert tokenizer.token_bytes(10**6) == "\ufffd".encode()


def test_fallback_bytes_are_the_text_after_its_first_space() -> None:
    tokenizer = JsonTokenizer(with_fallback().to_str().encode(), "t")
    assert joined(tokenizer, TEXT) == b" " + TEXT.encode()
    assert tokenizer.decode(tokenizer.encode(b"old").tolist()) == b"old"


@pytest.mark.parametrize(
    ("model", "decoder", "expected"),
    [
        (models.WordPiece({"[UNK]": 0, "mill": 1, "##s": 2}, unk_token="[UNK]"), decoders.WordPiece(), b" mills"),
        (models.BPE({"mill": 0, "s</w>": 1}, []), decoders.BPEDecoder(), b"mills "),
        (models.WordLevel({"mill": 0, "s": 1}, unk_token="s"), None, b" mill s"),
    ],
)
def test_bytes_of_other_decoders_have_their_spaces(model: Any, decoder: Any, expected: bytes) -> None:
    made = Tokenizer(model)
    if decoder is not None:
        made.decoder = decoder
    tokenizer = JsonTokenizer(made.to_str().encode(), "t")
    first = made.token_to_id("mill")
    assert tokenizer.token_bytes(first) + tokenizer.token_bytes(first + 1) == expected


def test_bytes_and_characters_are_their_own_tokens() -> None:
    assert ByteTokenizer().token_bytes(240) == b"\xf0"
    assert CharTokenizer("aé").token_bytes(1) == "é".encode()


def test_a_prompt_begins_with_the_tokens_of_the_post_processor() -> None:
    made = byte_level()
    first = made.token_to_id("<|start|>")
    made.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", first)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=16)
    tokenizer = JsonTokenizer(made.to_str().encode(), "t")
    bare = tokenizer.encode(TEXT.encode()).tolist()
    assert tokenizer.decode(bare) == TEXT.encode()  # neither cut nor filled up
    assert tokenizer.added == ((first,), ())
    assert ByteTokenizer().added == ((), ())
    assert json.loads(tokenizer.to_json())["truncation"] is not None  # the file itself is as it was
