"""Payloads as the ledger takes them, made from records."""

from contracts.codec import encoded_bytes, pack, request_digest
from contracts.ledger_records import StoredPayload
from contracts.operations import OperationKind, Payload


def stored(payload: Payload) -> StoredPayload:
    """Return the payload packed, in no file."""
    body = pack(payload)
    return StoredPayload(body, encoded_bytes=encoded_bytes(body))


def digest(payload: Payload) -> bytes:
    """Return the same bytes for equal payloads, as for a repeated request."""
    return request_digest(OperationKind.SAMPLE, pack(payload))
