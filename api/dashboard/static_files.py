"""The dashboard's own scripts and styles, and the vendored ones: a fixed list, read once, with their digests as tags."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response

from contracts.errors import NotFound

STATIC = Path(__file__).with_name("static")
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

router = APIRouter(tags=["static files"])


def install_static_files(app: FastAPI) -> None:
    """Read the files into the application."""
    files = [path for path in sorted(STATIC.rglob("*")) if path.suffix in _TYPES]
    app.state.static_files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in files}


@router.get("/static/{name:path}")
async def static_file(request: Request, name: str) -> Response:
    """Return the file, or 304 to a browser that has it. Raises ``NotFound`` for a name that is not in the list."""
    content: bytes | None = request.app.state.static_files.get(name)
    if content is None:
        raise NotFound("there is no such file")
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[Path(name).suffix], headers=headers)
