"""Text that a trained model continues, piece by piece."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from planetary.data.tokenizer import Tokenizer
from planetary.run.model.sampling import Sampling, continue_tokens
from planetary.run.model.trained_model import TrainedModel


def continue_text(model: TrainedModel, prompt: str, max_tokens: int, sampling: Sampling) -> Iterator[str]:
    """Return an iterator over pieces of text that continue `prompt`: at most `max_tokens`, or to the document's end.

    Raises:
        UserError: the prompt is empty.
        NumericsError: the logits are not finite.
    """
    ids = [int(token) for token in model.tokenizer.encode(prompt.encode())]
    size = model.tokenizer.vocab_size  # a model may have more tokens than there is text for

    def logits(params: Any, tokens: Any) -> Any:
        return model.logits(params, tokens)[..., :size]

    drawn = continue_tokens(logits, model.params, ids, window=model.window, sampling=sampling)
    end = model.tokenizer.end_of_document
    until_end = itertools.takewhile(lambda token: token != end, itertools.islice(drawn, max_tokens))
    return text_pieces(until_end, model.tokenizer)


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield text as tokens arrive. A character that is spread over several tokens is held back until it is
    whole.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids: list[int] = []
    given = 0
    data = b""
    for token in tokens:
        ids.append(token)
        # Some tokenizers join words differently depending on what follows, so the whole is decoded each time.
        data = tokenizer.decode(ids)
        whole = len(data) - len(_unfinished(data))
        if whole > given:
            yield decoder.decode(data[given:whole])
            given = whole
    yield decoder.decode(data[given:], final=True)


def _unfinished(data: bytes) -> bytes:
    """Return the replacement characters at the end of decoded text, which stand for a character cut in
    two.
    """
    mark = "\ufffd".encode()
    end = len(data)
    while data[:end].endswith(mark):
        end -= len(mark)
    return data[end:]
