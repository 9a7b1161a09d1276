"""Page of every HTTP route, rendered from the API's own OpenAPI document."""

import re
from typing import Any
from unittest.mock import create_autospec

from api.app import create_app
from api.services import ApiServices
from cli.pages.errors import errors
from cli.pages.markdown import GENERATED, prose, table

_HEAD = f"""# Routes

{GENERATED.format(source="api/app.py")}

A route wants an API key, as `X-API-Key: tml-…` or `Authorization: Bearer tml-…`. Three kinds do not: `/healthz`, `/readyz`, and
downloads, whose link holds a secret. The page of [errors](errors.md) explains
the codes.

"""


def render() -> str:
    """Return the page."""
    return _HEAD + sections(openapi_document())


def sections(document: dict[str, Any]) -> str:
    """Return a section with a table for each tag of the document."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            meaning, raised = _meaning(operation.get("description", ""))
            query = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            shown = f"`{method.upper()} {path}{'?' if query else ''}{'&'.join(query)}`"
            found.setdefault(operation["tags"][0], []).append((shown, meaning, raised))
    return "\n".join(
        f"## {tag.capitalize()}\n\n{table(('route', 'what it does', 'errors'), rows)}" for tag, rows in found.items()
    )


def openapi_document() -> dict[str, Any]:
    """Return the document of every route, without a service."""
    services = create_autospec(ApiServices, instance=True)
    return create_app(services).openapi()


def _meaning(description: str) -> tuple[str, str]:
    """Return a route's meaning and its errors: the docstring's first paragraph, and what follows its "Raises"."""
    meaning = prose(description).partition("Raises ")[0]
    raised = prose(description.partition("Raises ")[2])
    shown = {kind.__name__: f"{kind.status} `{kind.code}`" for kind, _ in errors()}
    return meaning.strip(), re.sub(r"`(\w+)`", lambda found: shown.get(found[1], found[0]), raised).removesuffix(".")
