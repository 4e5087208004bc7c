"""Texts obey a JSON schema, whatever the model finds likely."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serving_model import BYTES, FakeService, FakeWorker
from test_endpoint import run

from planetary.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer
from planetary.models.context import CacheSizes
from planetary.runs.serve.http.grammar import Grammars, JsonSchemaFormat, ResponseFormat
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.scheduling.sampling import SamplingOptions
from planetary.runs.serve.scheduling.scheduler import Scheduler
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.web.api_errors import ApiError

pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = ResponseFormat("json_schema", JsonSchemaFormat(SCHEMA))


def model_of(tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> ServedModel:
    return TracedModel(
        name="m",
        decode=lambda *_: None,  # type: ignore[arg-type, return-value]
        params=None,
        specs=(),
        sizes=CacheSizes(1, 1, 1),
        vocabulary=vocabulary,
        window=128,
        tokenizer=tokenizer,
        ends=ends,
    )


BYTE = ByteTokenizer()
MODELS = {
    "bytes": model_of(BYTE, 256, frozenset({0})),
    "a tokenizer.json": model_of(JsonTokenizer(BYTE.to_json(), "test"), 256, frozenset({0})),
    "more tokens than the tokenizer": model_of(JsonTokenizer(BYTE.to_json(), "test"), 300, frozenset()),
    "characters, no end": model_of(CharTokenizer('{}":,ab 0123456789xy-'), 21, frozenset()),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_may_follow_is_always_json_of_the_schema(name: str) -> None:
    model, rng = MODELS[name], np.random.default_rng(0)
    make = Grammars(model).constraints(FORMAT.schema)
    assert make is not None
    for _ in range(5):
        constraint, tokens = make(), []
        while not constraint.is_complete(tokens) and (allowed := constraint.allowed(tokens)).any():
            assert len(allowed) == model.vocabulary
            token = int(rng.choice(np.flatnonzero(allowed)))
            if token in model.ends:
                break
            tokens.append(token)
        found = json.loads(model.tokenizer.decode(tokens))
        assert found.keys() == {"a", "b"}
        assert found["a"] <= 99
        assert found["b"] in ("x", "yy")


@pytest.mark.parametrize("seed", range(5))
def test_a_text_that_goes_on_elsewhere_obeys_its_schema_there(seed: int) -> None:
    """With workers that are lost at random the tokens are those of one worker."""
    model, texts = MODELS["bytes"], []
    for losses in (False, True):
        make = Grammars(model).constraints(FORMAT.schema)
        assert make is not None
        request = SequenceRequest(
            number=1, prompt=(1, 2, 3), most=60, options=SamplingOptions(seed=seed), ends=model.ends, constraint=make()
        )
        scheduler, worker, session = Scheduler(BYTES, 256), FakeWorker(vocabulary=256), 1
        scheduler.join(session)
        scheduler.submit(request)
        tokens, rng = [], np.random.default_rng(seed)
        while scheduler.has(1):
            if losses and rng.random() < 0.3:
                scheduler.lose(session)
                worker, session = FakeWorker(vocabulary=256), session + 1
                scheduler.join(session)
            for who, call in scheduler.next_calls():
                for given in scheduler.computed(who, worker.compute(call)):
                    tokens += [one.token for one in given.tokens]
        texts.append(tokens)
    assert texts[0] == texts[1]
    assert json.loads(bytes(texts[0])).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("format_", "words"),
    [
        (ResponseFormat("xml"), 'found "xml"'),
        (ResponseFormat("json_schema"), "needs json_schema.schema"),
        (ResponseFormat("json_schema", JsonSchemaFormat({"type": "strange"})), "strange"),
        (ResponseFormat("json_schema", JsonSchemaFormat({"$ref": "#"})), "no text has the form"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(format_: ResponseFormat, words: str) -> None:
    with pytest.raises(ApiError, match="response_format") as error:
        Grammars(MODELS["bytes"]).constraints(format_.schema)
    assert words in error.value.message


def test_openais_client_gets_json() -> None:
    async def test(service: FakeService, client: Any, web: Any) -> None:
        assert service.model is not None
        service.model = replace(service.model, ends=frozenset({0}))
        asked = {"model": "hash", "messages": [{"role": "user", "content": "a"}], "seed": 3}
        schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
        whole = await client.chat.completions.create(**asked, response_format=schema)
        assert json.loads(whole.choices[0].message.content).keys() == {"a", "b"}
        assert whole.choices[0].finish_reason == "stop"
        pieces = [
            one async for one in await client.chat.completions.create(**asked, response_format=schema, stream=True)
        ]
        assert "".join(one.choices[0].delta.content for one in pieces) == whole.choices[0].message.content

    run(test)
