"""Table of the generated reference pages: a file name and the function that renders it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cli.pages import admin_routes, audit_log, commands, errors, metrics, routes, settings

PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "admin-routes.md": admin_routes.render,
        "commands.md": commands.render,
        "settings.md": settings.render,
        "routes.md": routes.render,
        "errors.md": errors.render,
        "metrics.md": metrics.render,
        "audit-log.md": audit_log.render,
    }
)
