"""``tools`` and ``tool_choice`` of a chat: the functions that a model is told of, and the form that its calls must have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api.openai.text_form import check_schema
from api.openai.tool_calls import BEGIN, END
from api.wire.request_model import BodyPart, PlainJson
from contracts.errors import InvalidRequest
from contracts.logit_rules import Grammar

MOST_TOOLS = 128
_LONGEST_NAME = 64


class FunctionPart(BodyPart):
    """A function that a model may call. ``parameters`` is the JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: PlainJson[dict[str, Any]] | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of its arguments: any object without ``parameters``."""
        return self.parameters if self.parameters is not None else {"type": "object"}


class ToolPart(BodyPart):
    """A tool. Functions are the only kind."""

    type: str = "function"
    function: FunctionPart | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request.

    - ``functions``: those that the model is told of. None of them for ``tool_choice`` none.
    - ``must_call``: the answer is a call. ``several``: it may be several.
    - ``only``: the one function to call, None for any.
    """

    functions: Sequence[FunctionPart] = ()
    must_call: bool = False
    several: bool = True
    only: str | None = None

    @property
    def described(self) -> list[dict[str, Any]]:
        """The functions as chat templates take them."""
        return [{"type": "function", "function": function.model_dump(exclude_none=True)} for function in self.functions]

    @property
    def grammar(self) -> Grammar | None:
        """Form of an answer that must call, or in which a function's ``strict`` schema must hold; else None."""
        if not self.must_call and not any(function.strict for function in self.functions):
            return None
        tags = [_tag(function) for function in self.functions if self.only in (None, function.name)]
        calls: dict[str, Any] = {"tags": tags, "stop_after_first": not self.several}
        if self.must_call:
            calls |= {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
        else:
            calls |= {"type": "triggered_tags", "triggers": [BEGIN], "at_least_one": False}
        return Grammar("structural_tag", orjson.dumps({"type": "structural_tag", "format": calls}).decode())


def tool_use(tools: Sequence[ToolPart], choice: str | Mapping[str, Any] | None, *, several: bool) -> ToolUse:
    """Return the meaning of ``tools`` and ``tool_choice``. Raises ``InvalidRequest``."""
    functions = _functions(tools)
    names = [function.name for function in functions]
    if choice is None or choice == "auto" or choice == "none":
        return ToolUse(functions if choice != "none" else (), several=several)
    if not functions:
        raise InvalidRequest("tool_choice needs tools; send some, or leave it out")
    if choice == "required":
        return ToolUse(functions, must_call=True, several=several)
    named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(named, Mapping) or "name" not in named:
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}'
        )
    if named["name"] not in names:
        raise InvalidRequest(f"tool_choice names {str(named['name'])[:_LONGEST_NAME]!r}, which is none of the tools")
    return ToolUse(functions, must_call=True, several=False, only=str(named["name"]))


def _functions(tools: Sequence[ToolPart]) -> list[FunctionPart]:
    if len(tools) > MOST_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; send at most {MOST_TOOLS}")
    found = [tool.function for tool in tools if tool.type == "function" and tool.function is not None]
    if len(found) < len(tools):
        raise InvalidRequest("tools: only tools of type function are offered by this weft, each with its function")
    names = {function.name for function in found}
    if len(names) < len(found):
        raise InvalidRequest("tools: two functions have one name; give each a name of its own")
    if any(not _is_name(name) for name in names):
        raise InvalidRequest(
            f"tools: a function's name has 1 to {_LONGEST_NAME} letters, digits, underscores, dots and dashes"
        )
    check_schema([function.arguments_schema for function in found], "tools")
    return found


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _LONGEST_NAME and all(
        letter.isascii() and (letter.isalnum() or letter in "_-.") for letter in name
    )


def _tag(function: FunctionPart) -> dict[str, Any]:
    return {
        "begin": f'{BEGIN}\n{{"name": "{function.name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": function.arguments_schema},
        "end": f"}}\n{END}",
    }
