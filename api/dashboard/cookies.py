"""The cookie of a web session, and the rule on which connections may carry it."""

from ipaddress import ip_address

from fastapi import Request, Response

from api.presented_session import COOKIE, INSECURE_COOKIE, presented_session
from contracts.errors import Forbidden


def is_secure(request: Request) -> bool:
    """Return whether the request came over https, or over loopback by its address and by the name that it was sent to."""
    if request.url.scheme == "https":
        return True
    # A proxy may name itself, so the sender counts too. A Unix socket has none.
    sender = None if request.client is None else request.client.host
    return _is_loopback(request.url.hostname or "") and (sender is None or _is_loopback(sender))


def _is_loopback(name: str) -> bool:
    host = name.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_secure(request: Request, *, may_be_insecure: bool) -> None:
    """Raise ``Forbidden`` for plain http from another machine, unless the service allows it."""
    if not is_secure(request) and not may_be_insecure:
        raise Forbidden(
            "logging in needs https, or an address of this machine such as http://127.0.0.1; over plain http everybody on the "
            "way could read the session"
        )


def session_cookie(request: Request) -> str | None:
    """Return the secret of the request's web session."""
    return presented_session(request.headers, COOKIE if is_secure(request) else INSECURE_COOKIE)


def set_session_cookie(request: Request, response: Response, token: str, *, seconds: int) -> None:
    """Have the browser keep the secret of a web session."""
    safe = is_secure(request)
    response.set_cookie(
        COOKIE if safe else INSECURE_COOKIE,
        token,
        max_age=seconds,
        path="/",
        secure=safe,
        httponly=True,
        samesite="lax",
    )


def drop_session_cookie(request: Request, response: Response) -> None:
    """Have the browser forget the secret."""
    safe = is_secure(request)
    name = COOKIE if safe else INSECURE_COOKIE
    response.delete_cookie(name, path="/", secure=safe, httponly=True, samesite="lax")
