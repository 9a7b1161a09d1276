"""Table of the generated reference pages: a file name and the function that renders it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cli.pages import commands, errors, metrics, routes, settings

PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "commands.md": commands.render,
        "settings.md": settings.render,
        "routes.md": routes.render,
        "errors.md": errors.render,
        "metrics.md": metrics.render,
    }
)
