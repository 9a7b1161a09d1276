"""Count of a protobuf message's fields on the wire, before a parser builds an object for each of them.

An empty nested message takes two bytes on the wire and a hundred times that once it is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from contracts.errors import InvalidRequest


class TooManyFields(InvalidRequest):
    """Refusal of a message with more fields than a request may have."""


UNCOUNTED_BYTES = 4096
"""Largest message that is not counted: whatever it holds, it stays small."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_SKIPPED = {_FIXED64: 8, _FIXED32: 4}


@dataclass(slots=True)
class Layout:
    """The fields of a message type that cost more once built: nested messages, and packed numbers."""

    nested: dict[int, "Layout"] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)


def layout_of(message: type[Message]) -> Layout:
    """Return the layout of a message type and of all types within it."""
    return _layout(message.DESCRIPTOR, {})


def _layout(descriptor: Any, known: dict[str, Layout]) -> Layout:
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    layout = known[descriptor.full_name] = Layout()
    for one in descriptor.fields:
        if one.message_type is not None:
            layout.nested[one.number] = _layout(one.message_type, known)
        elif one.is_repeated and one.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            layout.packed.add(one.number)
    return layout


def check_field_count(body: bytes, layout: Layout, most: int) -> None:
    """Raise ``TooManyFields`` if ``body`` has more than ``most`` at all depths, ``InvalidRequest`` if it is no message.

    Each byte of packed numbers counts as a field. Stops at the first field too many.
    """
    if len(body) > UNCOUNTED_BYTES:
        _count(body, 0, len(body), layout, most, most)


def _count(body: bytes, at: int, end: int, layout: Layout, left: int, most: int) -> int:
    """Return how many fields are left after those of ``body[at:end]``."""
    nested: Mapping[int, Layout] = layout.nested
    while at < end:
        left -= 1
        tag, at = _varint(body, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == _LENGTH:
            size, at = _varint(body, at, end)
            if size > end - at:
                raise _no_message()
            inner = nested.get(number)
            if inner is not None:
                left = _count(body, at, at + size, inner, left, most)
            elif number in layout.packed:
                left -= size
            at += size
        elif wire == _VARINT:
            _, at = _varint(body, at, end)
        elif wire in _SKIPPED:
            at += _SKIPPED[wire]
        else:
            raise _no_message()
        if left < 0:
            raise TooManyFields(f"the body has more than {most} fields; send fewer sequences a request")
    return left


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and the place after it. Raises ``InvalidRequest`` for one that is cut off or too long."""
    value = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _no_message()


def _no_message() -> InvalidRequest:
    return InvalidRequest("the body is no protobuf message; send one, or JSON as application/json")
