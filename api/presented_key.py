"""The API key that a request carries, not yet checked."""

from starlette.datastructures import Headers


def presented_key(headers: Headers) -> str | None:
    """Return the key in ``X-API-Key`` or in ``Authorization: Bearer``, or None."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)
