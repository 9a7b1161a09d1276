"""Page of every route of the admin API, rendered from its own OpenAPI document."""

from typing import Any
from unittest.mock import create_autospec

from api.admin.app import create_admin_app
from api.admin.services import AdminServices
from cli.pages.markdown import GENERATED
from cli.pages.routes import sections

_HEAD = f"""# Admin routes

{GENERATED.format(source="api/admin/app.py")}

The admin API is on [a listener of its own](../how-to/operate-over-http.md), off by default, and takes
[operators' keys](../how-to/operate-over-http.md#a-key) only, as `X-API-Key: tml-…` or `Authorization: Bearer tml-…`. Its
document is at `/admin/v1/openapi.json`.

- A list answers `items` in order of their ids, at most `limit` (200), and `next`: what the next page asks for as `after`.
- A `PATCH` names the state that it changes: `If-Match` with the `ETag` of what was read. Another state answers 412
  `edit_conflict`.
- A `POST` that a repeat would do again takes an `Idempotency-Key`: the repeat is answered like the first, another body is
  refused.
- [Errors](errors.md) have one form: `detail`, `code`, `retryable`.

"""


def render() -> str:
    """Return the page."""
    return _HEAD + sections(admin_document())


def admin_document() -> dict[str, Any]:
    """Return the document of every admin route, without a service."""
    services = create_autospec(AdminServices, instance=True)
    return create_admin_app(services).openapi()
