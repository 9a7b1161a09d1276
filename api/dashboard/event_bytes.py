"""Events of server-sent streams as bytes."""


def encoded_event(name: str, data: bytes, id: str | None = None) -> bytes:
    """Return an event's bytes. A page that comes back sends the last ``id`` that it has seen as ``Last-Event-ID``."""
    begin = b"" if id is None else b"id: " + id.replace("\n", " ").encode() + b"\n"
    return begin + b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
