"""Client of what weft adds to Tinker's API: runs' curves, gates, reports of samples, usage, keys, projects and jobs.

Tinker's own API is the ``tinker`` package's. Names are loaded when they are used, so that the import takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft_client.admin_async import AsyncWeftAdmin as AsyncWeftAdmin
    from weft_client.admin_sync import WeftAdmin as WeftAdmin
    from weft_client.asynchronous import AsyncWeft as AsyncWeft
    from weft_client.errors import WeftClientError as WeftClientError
    from weft_client.synchronous import Weft as Weft

_PLACES = {
    "AsyncWeft": "weft_client.asynchronous",
    "AsyncWeftAdmin": "weft_client.admin_async",
    "Weft": "weft_client.synchronous",
    "WeftAdmin": "weft_client.admin_sync",
    "WeftClientError": "weft_client.errors",
}
__all__ = ["AsyncWeft", "AsyncWeftAdmin", "Weft", "WeftAdmin", "WeftClientError"]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'weft_client' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
