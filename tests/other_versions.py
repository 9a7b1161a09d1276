"""Services of other versions, made of an OpenAPI document: their records, and an admin API that answers with them."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from cli.pages.admin_routes import admin_document

_TEXTS = {"date-time": "2026-01-01T00:00:00Z", "date": "2026-01-01"}
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Version(Enum):
    """Version of a service, against that of who asks."""

    OLDER = auto()
    SAME = auto()
    NEWER = auto()


class Service:
    """A service of a version: a newer one has a field and a word more wherever it may, an older one nothing optional."""

    def __init__(self, document: dict[str, Any], version: Version) -> None:
        self._schemas, self._version = document["components"]["schemas"], version

    def record(self, name: str) -> dict[str, Any]:
        """Return an answer of that schema."""
        schema = self._schemas[name]
        required = schema.get("required", ())
        made = {
            field: self._value(described)
            for field, described in schema["properties"].items()
            if self._version is not Version.OLDER or (field in required and not _is_nullable(described))
        }
        return made | ({"a_field_more": {"of": ["any", "kind"]}} if self._version is Version.NEWER else {})

    def _value(self, schema: dict[str, Any]) -> Any:
        if "anyOf" in schema:
            schema = next(one for one in schema["anyOf"] if one.get("type") != "null")
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if "properties" in self._schemas[name]:
                return self.record(name)
            schema = self._schemas[name]
        if "enum" in schema:
            return "a_word_more" if self._version is Version.NEWER else schema["enum"][0]
        kind = schema.get("type")
        if kind == "array":
            return [self._value(schema["items"])]
        if kind == "object":
            values = schema.get("additionalProperties")
            return {"one": self._value(values)} if isinstance(values, dict) else {}
        # Also an amount of money is text.
        texts = _TEXTS.get(schema.get("format", ""), "1.5")
        return {"string": texts, "integer": 1, "number": 1.5, "boolean": True}.get(kind)


def _is_nullable(schema: dict[str, Any]) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


@dataclass
class AdminService:
    """An admin API of a version.

    - ``asked``: methods and templates of the paths that were asked for, with the bodies. ``if_match``: the last one's.
    - ``told``: its answers. ``without``: fields that its answers lack besides, at any depth.
    """

    version: Version
    url: str = ""
    if_match: str | None = None
    asked: list[tuple[str, str, bytes]] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    without: set[str] = field(default_factory=set)

    def begin(self, version: Version) -> "AdminService":
        """Forget what was asked, and answer as that version from now on."""
        self.version = version
        for kept in (self.asked, self.told, self.without):
            kept.clear()
        return self

    def answer(self, document: dict[str, Any], method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the record of an answer, None for one without."""
        template = _template(document, method, path)
        self.asked.append((method, template, body))
        responses = document["paths"][template][method.lower()]["responses"]
        status = next(code for code in responses if code.startswith("2"))
        content = responses[status].get("content", {})
        if "application/json" not in content:
            return int(status), None
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        told = Service(document, self.version).record(name)
        if "next" in told:
            # The last page.
            told["next"] = None
        self.told.append(_less(told, self.without))
        return int(status), self.told[-1]


def _less(told: Any, without: set[str]) -> Any:
    if isinstance(told, list):
        return [_less(one, without) for one in told]
    if not isinstance(told, dict):
        return told
    return {name: _less(value, without) for name, value in told.items() if name not in without}


def _template(document: dict[str, Any], method: str, path: str) -> str:
    """Return the path's template, of several the one with the fewest variables."""
    fitting = [
        template
        for template, methods in document["paths"].items()
        if method.lower() in methods and re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", template), path)
    ]
    return min(fitting, key=lambda template: template.count("{"))


@contextmanager
def admin_service() -> Iterator[AdminService]:
    """Serve an admin API of another version over HTTP."""
    document, service = admin_document(), AdminService(Version.SAME)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: two wait for one another.
        wbufsize = -1

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            service.if_match = self.headers.get("if-match")
            status, told = service.answer(document, self.command, urlsplit(self.path).path, body)
            content = b"" if told is None else json.dumps(told).encode()
            self.send_response(status)
            if status != 204:
                self.send_header("content-length", str(len(content)))
            if service.version is not Version.OLDER:
                self.send_header("etag", '"1"')
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *given: Any) -> None:
            pass

    for method in _METHODS:
        setattr(Handler, f"do_{method}", Handler.answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
