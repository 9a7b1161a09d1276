"""Messages of a chat, and the turns that the base model's template gets."""

from typing import Any

import orjson

from api.openai.text_form import MOST_NESTING, is_nested_too_deep
from api.wire.request_model import BodyPart, ListOf
from contracts.errors import InvalidRequest
from contracts.vocabulary import ChatMessage


class TextPart(BodyPart):
    """A piece of a message."""

    type: str = "text"
    text: str | None = None


class CalledFunction(BodyPart):
    """A function that the assistant has called; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = "{}"


class CallPart(BodyPart):
    """A tool call of the assistant."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction | None = None


class Message(BodyPart):
    """A turn of a conversation."""

    role: str
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[CallPart] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """The whole text. Raises ``InvalidRequest`` for a part of another type."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        if any(part.type != "text" or part.text is None for part in self.content):
            raise InvalidRequest("messages: only parts of type text are offered by this weft; leave the others out")
        return "".join(part.text or "" for part in self.content)

    @property
    def length(self) -> int:
        """Characters of the text and of the arguments of calls."""
        called = [call.function for call in self.tool_calls or () if call.function is not None]
        return len(self.text) + sum(len(function.name) + len(function.arguments) for function in called)

    def turn(self) -> ChatMessage:
        """Return the turn. Raises ``InvalidRequest`` for what weft does not offer."""
        for field in ("function_call", "audio", "refusal"):
            if getattr(self, field) is not None:
                raise InvalidRequest(f"messages: {field} is not offered by this weft; leave it out")
        extra: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls:
            extra["tool_calls"] = [_call(call) for call in self.tool_calls]
        return ChatMessage(self.role, self.text, {name: value for name, value in extra.items() if value is not None})


def _call(call: CallPart) -> dict[str, Any]:
    if call.type != "function" or call.function is None:
        raise InvalidRequest(
            "messages: only tool calls of type function are offered by this weft; leave the others out"
        )
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest("messages: the arguments of a tool call must be the text of a JSON object")
    # The base model's chat template writes them by functions that call themselves for each level.
    if is_nested_too_deep(arguments):
        raise InvalidRequest(
            f"messages: the arguments of a tool call are nested over {MOST_NESTING} deep; send flatter ones"
        )
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
