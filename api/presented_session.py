"""The secret of a web session that a request carries in a cookie, not yet checked."""

import re

from starlette.datastructures import Headers

COOKIE = "__Host-weft"
"""Name by which browsers accept the cookie only over https or loopback, for the whole host, and from the host itself."""
INSECURE_COOKIE = "weft-insecure"
"""Name over plain http with ``WEFT_INSECURE_UI``, where browsers refuse the other."""
OPERATOR_COOKIE = "__Host-weft-ops"
"""Name of the cookie of operators' pages."""
COOKIES = (COOKIE, INSECURE_COOKIE, OPERATOR_COOKIE)
_LONGEST = 100
_SECRET = {
    name: re.compile(rf'(?:^|;)[ \t]*{name}="?([A-Za-z0-9_-]{{1,{_LONGEST}}})"?[ \t]*(?:;|$)') for name in COOKIES
}


def presented_session(headers: Headers, name: str) -> str | None:
    """Return the secret in the cookie ``name``, or None. No other cookie is parsed, and no long value is taken."""
    for header in headers.getlist("cookie"):
        if name in header and (found := _SECRET[name].search(header)) is not None:
            return found[1]
    return None
