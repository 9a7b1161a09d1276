"""``response_format``, and the JSON Schemas of requests, as grammars."""

from collections.abc import Mapping
from typing import Any

import orjson

from contracts.errors import InvalidRequest
from contracts.logit_rules import Grammar

MOST_SCHEMA_BYTES = 32 * 1024
"""Bytes of a request's JSON Schemas together. A server takes time for them that others share."""
MOST_NESTING = 32
"""Objects and lists within each other in a schema, or in the arguments of a call."""


def format_grammar(asked: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of a ``response_format``, None for plain text. Raises ``InvalidRequest``."""
    kind = asked.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind != "json_schema":
        raise InvalidRequest("response_format: type must be text, json_object or json_schema")
    described = asked.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise InvalidRequest("response_format: json_schema needs a schema, which is an object")
    schema: dict[str, Any] = described["schema"]
    check_schema(schema, "response_format")
    return Grammar("json_schema", orjson.dumps(schema).decode())


def check_schema(schema: Any, field: str) -> None:
    """Raise ``InvalidRequest`` for schemas that are too large or nested too deep; ``field`` is where they stand."""
    # First: what is nested deeper than orjson writes would be no InvalidRequest.
    if is_nested_too_deep(schema):
        raise InvalidRequest(f"{field}: a schema is nested over {MOST_NESTING} deep; send a flatter one")
    size = len(orjson.dumps(schema))
    if size > MOST_SCHEMA_BYTES:
        raise InvalidRequest(f"{field}: the schemas have {size} bytes; send at most {MOST_SCHEMA_BYTES}")


def is_nested_too_deep(value: Any) -> bool:
    """Return whether JSON has over ``MOST_NESTING`` objects and lists within each other; found without recursion."""
    level, depth = [value], 0
    while level and depth <= MOST_NESTING:
        depth += 1
        level = [child for node in level for child in _children(node)]
    return depth > MOST_NESTING


def _children(node: Any) -> list[Any]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [value for value in values if isinstance(value, dict | list)]
