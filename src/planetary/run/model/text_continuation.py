"""Continue a text with a trained model's logits, one token at a time, in pieces of whole characters.

There is no cache of keys and values: each token costs one forward pass over the whole window. That needs nothing
from a model but `logits(params, tokens)`, and a small model answers faster than people read.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.core.errors import NumericsError, UserError
from planetary.data.tokenizer import Tokenizer
from planetary.run.model.text_sampling import Sampling
from planetary.run.model.trained_model import TrainedModel


def continue_text(model: TrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Return an iterator over pieces of text that continue `prompt`, to the document's end or the most tokens.

    Raises:
        UserError: the prompt is empty.
        NumericsError: the logits are not finite.
    """
    # An empty prompt stays one, which is refused: the tokens a tokenizer adds are no text.
    text = [int(token) for token in model.tokenizer.encode(prompt.encode())]
    ids = [*model.tokenizer.added[0], *text] if text else []
    size = model.tokenizer.vocab_size  # a model may have more tokens than there is text for

    def logits(params: Any, tokens: Any) -> Any:
        return model.logits(params, tokens)[..., :size]

    drawn = continue_tokens(logits, model.params, ids, window=model.window, sampling=sampling)
    end = model.tokenizer.end_of_document
    until_end = itertools.takewhile(lambda token: token != end, itertools.islice(drawn, sampling.max_tokens))
    return text_pieces(until_end, model.tokenizer, ids)


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer, before: Sequence[int] = ()) -> Iterator[str]:
    """Yield text as tokens arrive. A character spread over several tokens is held back until it is whole.

    `before`: tokens the text continues; some tokenizers leave out a space that begins a text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids = list(before)
    data = tokenizer.decode(ids)
    given = len(data) - len(_unfinished(data))
    for token in tokens:
        ids.append(token)
        # Some tokenizers join words differently depending on later tokens, so the whole is decoded each time.
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


def continue_tokens(
    logits: Callable[[Any, np.ndarray], jax.Array],
    params: Any,
    prompt: Sequence[int],
    *,
    window: int,
    sampling: Sampling,
) -> Iterator[int]:
    """Yield tokens that continue `prompt`, without end. Equal arguments give equal tokens.

    Args:
        logits: `logits(params, tokens i32 [1, window]) -> float [1, window, vocabulary]`, causal: position i does not
            depend on later tokens. Called once for each token: compiled, if it is to be fast.
        params: of the model.
        prompt: token ids, at least one.
        window: how many of the newest tokens the model sees.
        sampling: how a token is drawn.

    Raises:
        UserError: the prompt is empty.
        NumericsError: the logits are not finite.
    """
    if not prompt:
        raise UserError("the prompt is empty; give at least one character to continue")

    @jax.jit
    def draw(scores: jax.Array, last: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = scores[0, last].astype(jnp.float32)
        finite = jnp.all(jnp.isfinite(row))
        if sampling.temperature == 0:
            return jnp.argmax(row), finite
        if 0 < sampling.top_k < row.shape[-1]:
            values, tokens_by_value = jax.lax.top_k(row, sampling.top_k)
            return tokens_by_value[jax.random.categorical(key, values / sampling.temperature)], finite
        return jax.random.categorical(key, row / sampling.temperature), finite

    # The window is filled from the left and its unused end is invisible to a causal model; once full it
    # moves on.
    tokens = np.zeros(window, np.int32)
    newest = list(prompt)[-window:]
    used = len(newest)
    tokens[:used] = newest
    base = jax.random.key(sampling.seed)
    for position in _naturals():
        scores = logits(params, tokens[None])
        token, finite = draw(scores, np.int32(used - 1), jax.random.fold_in(base, position))
        if not bool(finite):
            raise NumericsError("the model's logits are not finite: its parameters are damaged or diverged")
        chosen = int(token)
        yield chosen
        if used == window:
            tokens = np.roll(tokens, -1)  # a new array: JAX may still be reading the old one
            tokens[-1] = chosen
        else:
            tokens = tokens.copy()
            tokens[used] = chosen
            used += 1


def _naturals() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
