"""Walks over a protobuf message's fields on the wire, before a parser builds an object for each of them.

An empty nested message takes two bytes on the wire and a hundred times that once it is built.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    # Fields are read in place, not by ``_field``: a hostile body has as many as may be.
    nested = layout.nested
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


def parted(body: bytes, number: int, most: int) -> tuple[bytes, list[slice]]:
    """Return the message without its nested messages of this field number, and where each of them is in ``body``.

    Raises ``InvalidRequest`` if ``body`` is no message, or has more than ``most`` bytes beside the nested messages.
    """
    rest, found, at, end = bytearray(), [], 0, len(body)
    while at < end:
        field = _field(body, at, end)
        if field.number == number and field.wire == _LENGTH:
            found.append(slice(field.begin, field.end))
        elif len(rest) + field.end - at > most:
            raise InvalidRequest(f"the body has more than {most} bytes beside its data; leave out what is no data")
        else:
            rest += body[at : field.end]
        at = field.end
    return bytes(rest), found


class _Field(NamedTuple):
    """A field on the wire. Its value is ``body[begin:end]``."""

    number: int
    wire: int
    begin: int
    end: int


def _field(body: bytes, at: int, end: int) -> _Field:
    """Return the field at ``at``. Raises ``InvalidRequest`` for one that is cut off or of no known kind."""
    tag, at = _varint(body, at, end)
    number, wire = tag >> 3, tag & 7
    if wire == _LENGTH:
        size, begin = _varint(body, at, end)
        ends = begin + size
    elif wire == _VARINT:
        begin, ends = at, _varint(body, at, end)[1]
    elif wire in _SKIPPED:
        begin, ends = at, at + _SKIPPED[wire]
    else:
        raise _no_message()
    if ends > end:
        raise _no_message()
    return _Field(number, wire, begin, ends)


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
