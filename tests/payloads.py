"""Payloads as the ledger takes them, made from records."""

from contracts.codec import pack, request_digest
from contracts.ledger_records import StoredPayload
from contracts.operations import OperationKind, Payload


def stored(payload: Payload) -> StoredPayload:
    """Return the payload packed, in no file."""
    return StoredPayload(pack(payload))


def digest(payload: Payload) -> bytes:
    """Return the same bytes for equal payloads, as for a repeated request."""
    return request_digest(OperationKind.SAMPLE, pack(payload))
