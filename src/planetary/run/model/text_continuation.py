"""Continue a text with a trained model in this process: the functions, the scheduler and the sampler of serving.

XLA compiles the functions a text needs. Equal parameters, prompt, options and seed give the text of a server.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from planetary.core.errors import NumericsError, UserError
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http.text_assembly import TextAssembly
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.local_sequences import LocalSequences
from planetary.runs.serve.program.shape import PAGE
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.scheduling.sampling import SamplingOptions, choice_seed, continued_seed
from planetary.runs.serve.scheduling.sequences import SequenceRequest, Token
from planetary.runtime.device_program import open_on_xla

SHORTEST = 8 * PAGE
"""Context, in tokens, of the functions for short texts; those for longer ones have four times as much, and so on."""


class TextContinuation:
    """A model that continues texts on this machine's CPU, one at a time. Functions are compiled at their first use."""

    def __init__(self, model: TracedModel) -> None:
        """`model`: served without limits; a text is as long as the context."""
        self._model = replace(model, window=max(model.window, PAGE))
        self._longest = self._model.shape(ServeConfig(batch=1)).window
        self._loaded: dict[int, LocalSequences] = {}  # by context
        self._numbers = itertools.count()

    def continue_text(self, prompt: str, options: SamplingOptions, most: int) -> Iterator[str]:
        """Return an iterator over pieces of text that continue `prompt`, to an ending token or `most` tokens.

        Raises:
            UserError: the prompt is empty, or `most` less than 1.
            NumericsError: the logits are not finite.
        """
        # An empty prompt stays one, which is refused: the tokens a tokenizer adds are no text.
        text = [int(token) for token in self._model.tokenizer.encode(prompt.encode())]
        if not text:
            raise UserError("the prompt is empty; give at least one character to continue")
        if most < 1:
            raise UserError(f"the most tokens to generate must be 1 or more, found {most}")
        return self._pieces([*self._model.begins, *text], options, most)

    def _pieces(self, prompt: Sequence[int], options: SamplingOptions, most: int) -> Iterator[str]:
        assembly = TextAssembly(self._model.tokenizer, before=prompt)
        for token in self.tokens(prompt, options, most):
            yield assembly.add([token]).text
        yield assembly.end().text

    def tokens(self, prompt: Sequence[int], options: SamplingOptions, most: int) -> Iterator[Token]:
        """Yield the tokens that continue a prompt of one token at least. Raises `NumericsError`.

        A server ends the text where the context is full; here every further token sees the newest tokens that fit.
        """
        context = SHORTEST
        while context < min(self._longest, len(prompt) + most):
            context *= 4
        context = min(context, self._longest)
        texts, known = self._texts(context), list(prompt)
        options = msgspec.structs.replace(options, seed=choice_seed(options.seed))
        for part in itertools.count():
            request = SequenceRequest(
                number=next(self._numbers),
                prompt=tuple(known[1 - context :]),
                most=len(prompt) + most - len(known),
                options=msgspec.structs.replace(options, seed=continued_seed(options.seed, part)) if part else options,
                ends=self._model.ends,
            )
            texts.submit(request)
            try:
                for output in texts.tokens():
                    for token in output.tokens:
                        if token.logprob is None or not math.isfinite(token.logprob):
                            raise NumericsError(
                                "the model's logits are not finite: its parameters are damaged or diverged"
                            )
                        known.append(token.token)
                        yield token
                    if output.finished == "stop":
                        return
            finally:
                texts.cancel(request.number)  # whoever reads may leave early
            if len(known) == len(prompt) + most:
                return

    def _texts(self, context: int) -> LocalSequences:
        if context not in self._loaded:
            model = self._model
            shape = model.shape(ServeConfig(batch=1, context=context))
            shape = msgspec.structs.replace(shape, scores_prompts=False)
            loaded = LoadedModel(open_on_xla(model.program(shape)), shape, model.arrays())
            self._loaded[context] = LocalSequences(loaded, shape, min(model.vocabulary, model.tokenizer.vocab_size))
        return self._loaded[context]
