"""A chat as the text a model knows: the template of the tokenizer, rendered as transformers renders it.

For training, the characters that the assistant said are found: where the template marks them by `{% generation %}`, as
transformers finds them; else as the difference of two renderings, with an assistant's turn and up to it.

The names, filters, tags and limits are those of `transformers.utils.chat_template_utils`. A template comes with a model
from anywhere: it runs in Jinja's immutable sandbox, and in a separate process (`template_process`), because a sandbox
bounds neither time nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from planetary.core.errors import UserError
from planetary.data.chat.messages import MOST_TEXT, TRAINING_DAY, Sample

_MOST_REASON = 500  # characters of an error
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates read the first


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Compile. Raises `UserError` for a text that is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": _strftime_now,
            "dict": _PlainDict(),
            "namespace": _PlainNamespace,
        }
        self._marks: _GenerationTag = environment.extensions[_GenerationTag.identifier]  # type: ignore[assignment]
        try:
            self._takes_parts = _loops_over_content(environment.parse(source))
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise UserError(f"it cannot be read: {_reason(error)}") from error

    def text(self, names: Mapping[str, Any]) -> str:
        """Return the prompt of a chat.

        Args:
            names: everything the template sees. `messages` is a list of objects; `tools` and `documents` are None where
                there are none, as `add_generation_prompt` is false.

        Raises:
            UserError: the template refuses the chat, fails, or makes more than `MOST_TEXT` characters.
        """
        return self._render(names)

    def samples(self, names: Mapping[str, Any], turns: Sequence[int]) -> list[Sample]:
        """Return the texts that train a chat's turns, each turn in one of them.

        A turn is trained behind the text that precedes it when a model is asked. Most templates only append, so that is
        one text for all turns. Where a later message changes earlier turns (reasoning that is left out of them), the
        turns before it have a text of their own. `strftime_now` is `TRAINING_DAY`: the same chats are the same tokens
        on any day.

        Args:
            names: as in `text`.
            turns: indices of the assistant's messages that are trained, ascending.

        Raises:
            UserError: as `text`; or the assistant's part cannot be told from what precedes it.
        """
        names = {**names, "strftime_now": TRAINING_DAY.strftime}
        messages, size = names["messages"], 0

        def rendered(count: int, ask: bool = False) -> str:
            nonlocal size
            text = self._render({**names, "messages": messages[:count], "add_generation_prompt": ask})
            size += len(text) * (not ask)
            if size > MOST_TEXT:
                raise UserError(f"its renderings have more than {MOST_TEXT} characters")
            return text

        if self._marks.is_used and list(turns) == [i for i, one in enumerate(messages) if one["role"] == "assistant"]:
            text = rendered(len(messages))
            return [Sample(text, self._marked(text), True)]
        said = {turn: rendered(turn + 1) for turn in turns}
        begins = {turn: _beginning(said[turn], rendered(turn, True), partial(rendered, turn)) for turn in turns}
        # Some templates close a chat that nothing is asked of; the assistant does not say that.
        eos, chat, asked = (names.get("eos_token") or "", rendered(turns[0]), rendered(turns[0], True))
        closing = eos if chat.endswith(eos) and not asked.startswith(chat) else ""
        ends = {turn: len(text.removesuffix(closing)) for turn, text in said.items()}
        if any(begins[turn] >= ends[turn] for turn in turns):
            raise UserError("it leaves out an assistant's turn")
        found, left = [], list(turns)
        while left:
            whole = said[left[-1]]
            inside = [turn for turn in left if whole.startswith(said[turn][: ends[turn]])]
            found.append(Sample(whole, tuple((begins[turn], ends[turn]) for turn in inside), False))
            left = [turn for turn in left if turn not in inside]
        return found[::-1]

    def _marked(self, text: str) -> tuple[tuple[int, int], ...]:
        found = [(begin, begin + len(part)) for begin, part in self._marks.found if part]
        if not found:
            raise UserError("it marks nothing of this chat by {% generation %}")
        if any(text[begin : begin + len(part)] != part for begin, part in self._marks.found):
            raise UserError("it has {% generation %} within a macro or a variable, where its place is not known")
        return tuple(found)

    def _render(self, names: Mapping[str, Any]) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": False, **names}
        given["messages"] = [self._message(one) for one in names["messages"]]
        parts, size, marks = [], 0, self._marks
        marks.position, marks.found = 0, []
        try:
            for part in self._template.generate(given):
                size += len(part)
                if size > MOST_TEXT:
                    raise UserError(f"it makes a text of more than {MOST_TEXT} characters")
                parts.append(part)
                marks.position = size
        except UserError:
            raise
        except Exception as error:  # a template can raise whatever Python can
            raise UserError(f"it refuses these messages: {_reason(error)}") from error
        return "".join(parts)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with the reasoning under every name, and text parts joined unless the template reads parts.

        vLLM and llama.cpp join them with line ends, too.
        """
        found = dict(message)
        reasoning = next((found[name] for name in _REASONING if found.get(name) is not None), None)
        if reasoning is not None:
            found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
        content = found.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str) and not self._takes_parts:
            found["content"] = "\n".join(str(part.get("text", "")) for part in content)
        return found


def _beginning(said: str, asked: str, before: Callable[[], str]) -> int:
    """Return where the assistant's part begins in the text that ends with it.

    Args:
        said: the chat up to the end of the turn.
        asked: the chat up to the turn, with the prompt for generation.
        before: gives the latter without that prompt, which need not all be in `said` (the mark of a thought, for one).

    Raises:
        UserError: the turn changes the text before it.
    """
    begin = len(asked)
    if not said.startswith(asked):
        if not said.startswith(chat := before()):
            raise UserError("an assistant's turn changes the text before it: mark its turns by {% generation %}")
        begin = max(len(chat), _common(said, asked))
    return begin


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class _GenerationTag(Extension):
    """`{% generation %}`: marks an assistant's text for trainers; to a prompt it adds nothing.

    Attributes:
        is_used: the template has the tag.
        position: characters rendered so far.
        found: marked parts of the rendering, each with its place.
    """

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it
    is_used = False
    position = 0
    found: list[tuple[int, str]] = []  # noqa: RUF012 - replaced by every rendering

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's own scope, as transformers has it."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        text = caller()
        self.found.append((self.position, text))
        return text


class _PlainDict:
    """`dict(...)` without the type, of which attributes would lead out of the sandbox."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _PlainNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *pairs = args
        attributes = dict(*pairs, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute: `{% set ns.name = value %}`."""
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: names may not begin with an underscore")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a template has a loop over a message's content, so it reads content that is a list of parts."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in named

    named = {"content"}  # variables and macro arguments, into which templates put a message's content
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return text[:_MOST_REASON] or type(error).__name__
