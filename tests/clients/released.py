"""OpenAPI documents of releases, cut to what a client of that release sends and reads.

    python -m tests.clients.released 0.1

writes today's as that release's, of the tenants' API (weft's own operations) and of the operators'.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from cli.pages.admin_routes import admin_document
from cli.pages.routes import openapi_document
from tests.conftest import ROOT

Document = dict[str, Any]
APIS = ("tenants", "admin")
OWN = ("/api/weft/v1/", "/api/v1/adapters/", "/api/v1/samplers/", "/api/v1/samples/", "/api/v1/stream_sample")
"""Beginnings of the tenants' paths that Tinker's API does not have, but gates of single tokens."""
FOLDER = ROOT / "tests" / "clients" / "documents"
_KEPT = {"$ref", "type", "format", "enum", "anyOf", "items", "properties", "required", "additionalProperties"}
"""Words of a schema about its values; texts and bounds are left out."""


def released() -> dict[str, dict[str, Document]]:
    """Return the documents of each release by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def documents_now() -> dict[str, Document]:
    """Return the documents of each API as they are now."""
    return {"tenants": _cut(openapi_document(), OWN), "admin": _cut(admin_document(), ("/admin/",))}


def _cut(document: Document, beginnings: tuple[str, ...]) -> Document:
    paths = {
        path: {method: _operation(found) for method, found in methods.items()}
        for path, methods in document["paths"].items()
        if path.startswith(beginnings)
    }
    schemas = document["components"]["schemas"]
    kept: dict[str, Any] = {}
    waiting = list(_references(paths))
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = _schema(schemas[name])
            waiting += _references(kept[name])
    return {"paths": paths, "components": {"schemas": dict(sorted(kept.items()))}}


def _operation(found: Document) -> Document:
    cut: Document = {
        "parameters": [
            {"name": one["name"], "in": one["in"], "required": one["required"], "schema": _schema(one["schema"])}
            for one in found.get("parameters", ())
        ],
        "responses": {
            status: _contents(answer) for status, answer in found["responses"].items() if status.startswith("2")
        },
    }
    return cut | ({"requestBody": _contents(found["requestBody"])} if "requestBody" in found else {})


def _contents(found: Document) -> Document:
    contents = {kind: {"schema": _schema(one.get("schema", {}))} for kind, one in found.get("content", {}).items()}
    return {"content": contents} if contents else {}


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    cut = {word: _schema(value) for word, value in schema.items() if word in _KEPT and word != "properties"}
    if "properties" in schema:
        cut["properties"] = {name: _schema(value) for name, value in schema["properties"].items()}
    return cut


def _references(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        if isinstance(found.get("$ref"), str):
            yield found["$ref"].rpartition("/")[2]
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from _references(one)


def _lines(named: dict[str, Any]) -> Iterable[str]:
    texts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in named.items()]
    return [text + "," for text in texts[:-1]] + texts[-1:]


def written(documents: dict[str, Document]) -> str:
    """Return the text of a release's file: a line for each path and each schema, so that a change is a line's."""
    parts = []
    for api, document in documents.items():
        paths, schemas = _lines(document["paths"]), _lines(document["components"]["schemas"])
        joined = ["{", '"paths": {', *paths, "},", '"components": {"schemas": {', *schemas, "}}", "}"]
        parts.append(f"{json.dumps(api)}: " + "\n".join(joined))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{sys.argv[1]}.json").write_text(written(documents_now()))
