"""Operations are read from signatures: arguments of a request, refusals, and the document."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import httpx
import msgspec
from openapi_spec_validator import validate
from starlette.responses import Response

from planetary.core.configuration.ranges import Index
from planetary.core.errors import ConflictError, ResourceError
from planetary.web.access import Access, Scope
from planetary.web.application import application
from planetary.web.router import EVENTS, Caller, Media, Upload, operation


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 1


class Made(msgspec.Struct, frozen=True):
    text: str


class Shop:
    @operation("PUT", "/things/{thing:path}/role", group="things", scope=Scope.ADMIN, refuses=(409,))
    async def change(self, thing: str, by: Caller, body: Order) -> Made:
        """Change a thing."""
        if body.number == 13:
            raise ConflictError("not thirteen", code="no_hub")
        return Made(f"{by} {thing} {body.number}")

    @operation("GET", "/blue/things", name="list_blue", group="things", given={"colour": "blue"})
    @operation("GET", "/things", name="list_any", group="things", given={"colour": ""})
    async def listed(
        self,
        colour: str,
        after: Annotated[Index, "So many."] = 0,
        kind: Annotated[Literal["a", "b"] | None, "K."] = None,
    ) -> Annotated[Made | Response, Media(EVENTS)]:
        """List things,
        or some.
        """
        return Made(f"{colour} {after} {kind}")

    @operation("POST", "/orders", group="orders", status=202)
    async def order(self, body: Order | None = None) -> Made:
        """Order."""
        return Made(repr(body))

    @operation("POST", "/files", group="orders")
    async def upload(self, pieces: Upload) -> Made:
        """Upload."""
        return Made(str(sum([len(piece) async for piece in pieces])))

    @operation("GET", "/broken", group="orders")
    async def broken(self, how: Annotated[str, "How."] = "") -> Made:
        """Fail."""
        raise ResourceError("s3://u:p@h/x is full") if how else ValueError("hidden")


def ask(test: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    access = Access(anonymous=Scope.READ, known={"boss": (Scope.ADMIN, "t")})
    app = application([Shop()], access, title="t", text="t", document="/doc")

    async def whole() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            await test(client)

    asyncio.run(whole())


def test_arguments_come_from_path_query_body_and_token() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        headers = {"authorization": "Bearer t"}
        changed = await client.put("/things/a/b/role", json={"number": 2}, headers=headers)
        assert changed.json() == {"text": "boss a/b 2"}
        assert (await client.get("/things?after=7&kind=b")).json() == {"text": " 7 b"}
        assert (await client.get("/blue/things?after=")).json() == {"text": "blue 0 None"}
        ordered = await client.post("/orders", content=b" ")
        assert (ordered.status_code, ordered.json()) == (202, {"text": "None"})
        assert (await client.post("/orders", json={"number": 3})).json() == {"text": "Order(number=3)"}
        assert (await client.post("/files", content=b"x" * 9)).json() == {"text": "9"}
        assert (await client.head("/things")).status_code == 200

    ask(test)


def test_a_value_outside_the_signature_is_refused() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for path, param, words in (
            ("/things?after=-1", "after", "expected a whole number >= 0, found '-1'"),
            ("/things?after=x", "after", "expected a whole number >= 0, found 'x'"),
            (f"/things?after={'9' * 5000}", "after", "expected a whole number >= 0"),
            ("/things?kind=c", "kind", 'expected one of "a", "b", found \'c\''),
            ("/things?knd=a", "knd", "did you mean kind? There are: after, kind"),
            ("/things?colour=red", "colour", "unknown parameter 'colour'"),
        ):
            answer = await client.get(path)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert words in error["message"]
        refused = await client.post("/orders", json={"numbr": 1})
        assert refused.json()["error"]["code"] == "unknown_parameter"

    ask(test)


def test_every_error_is_answered_in_one_form() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        headers = {"authorization": "Bearer t"}
        for answer, status, code in (
            (await client.put("/things/a/role", json={}), 401, "token_needed"),
            (await client.put("/things/a/role", json={"number": 13}, headers=headers), 409, "no_hub"),
            (await client.put("/things/a/role", content=b"", headers=headers), 400, "invalid_json"),
            (await client.get("/broken"), 500, "internal_error"),
            (await client.get("/broken?how=1"), 503, "unavailable"),
            (await client.get("/nothing"), 404, "no_such_path"),
            (await client.delete("/things"), 405, "wrong_method"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert "hidden" not in answer.text
            assert "u:p" not in answer.text

    ask(test)


def test_the_document_is_read_from_signatures() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        document: dict[str, Any] = (await client.get("/doc")).json()
        validate(document)
        change = document["paths"]["/things/{thing}/role"]["put"]
        assert (change["operationId"], change["summary"]) == ("change", "Change a thing.")
        assert [one["name"] for one in change["parameters"]] == ["thing"]
        assert change["requestBody"]["required"]
        assert set(change["responses"]) == {"200", "400", "401", "403", "409", "413", "429"}
        assert "scope admin" in change["description"]
        listed = document["paths"]["/blue/things"]["get"]
        assert (listed["operationId"], listed["summary"]) == ("list_blue", "List things, or some.")
        assert listed["parameters"][0] == {
            "name": "after", "in": "query", "description": "So many.", "schema": {"type": "integer", "minimum": 0},
        }  # fmt: skip
        assert set(listed["responses"]["200"]["content"]) == {"application/json", EVENTS}
        assert listed["security"] == []
        order = document["paths"]["/orders"]["post"]
        assert not order["requestBody"]["required"]
        assert set(order["responses"]) == {"202", "400", "413"}
        upload = document["paths"]["/files"]["post"]["requestBody"]
        assert set(upload["content"]) == {"application/octet-stream"}
        assert {"Order", "Made", "Error"} == set(document["components"]["schemas"])

    ask(test)
