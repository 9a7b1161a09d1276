"""Differences of two OpenAPI documents by which a client of the older one fails at a service of the newer one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.clients.released import Document

JSON = "application/json"
_ANY = "any"
"""Type of a schema that says none."""
Schema = dict[str, Any]


def breaks(old: Document, new: Document) -> list[str]:
    """Return a line for each difference that breaks a client of the old document."""
    return list(Comparison(old["components"]["schemas"], new["components"]["schemas"]).of_paths(_by_shape(old), new))


def _by_shape(document: Document) -> Document:
    return {_shape(path): methods for path, methods in document["paths"].items()}


def _shape(path: str) -> str:
    """Return the path without the names of its parts, which clients do not send."""
    return re.sub(r"\{[^}]*\}", "{}", path)


@dataclass(frozen=True)
class Comparison:
    """Comparison of operations whose schemas refer to these."""

    old: dict[str, Schema]
    new: dict[str, Schema]

    def of_paths(self, before: Document, document: Document) -> Iterator[str]:
        """Yield the breaks of all operations."""
        now = _by_shape(document)
        for path, methods in before.items():
            for method, operation in methods.items():
                name = f"{method.upper()} {path}"
                if method not in now.get(path, {}):
                    yield f"{name} is gone"
                    continue
                for found in self._of_operation(operation, now[path][method]):
                    yield f"{name}: {found}"

    def _of_operation(self, old: Document, new: Document) -> Iterator[str]:
        yield from self._of_parameters(_parameters(old), _parameters(new))
        sent, taken = _body(old), _body(new)
        if taken is not None and sent is None:
            yield "wants a body"
        elif sent is not None:
            yield from ["takes no body"] if taken is None else self._of_schemas(sent, taken, "body", is_answer=False)
        read, answered = _answer(old), _answer(new)
        if read is not None:
            yield from ["answers none"] if answered is None else self._of_schemas(read, answered, "", is_answer=True)

    def _of_parameters(self, old: dict[str, Schema], new: dict[str, Schema]) -> Iterator[str]:
        for name, parameter in new.items():
            if parameter["required"] and not old.get(name, {}).get("required", False):
                yield f"wants {name}"
        for name, parameter in old.items():
            if name not in new:
                yield f"takes no {name}"
            else:
                yield from self._of_schemas(parameter["schema"], new[name]["schema"], name, is_answer=False)

    def _of_schemas(self, old: Schema, new: Schema, at: str, *, is_answer: bool) -> Iterator[str]:
        before, now = _forms(old, self.old), _forms(new, self.new)
        # A client reads what the old service may say, and a service takes what the old client may send.
        known, met = (before, now) if is_answer else (now, before)
        for kind in sorted(_kinds(met) - _kinds(known)):
            if _ANY not in _kinds(known) and not (kind == "integer" and "number" in _kinds(known)):
                yield f"{at} {'may be' if is_answer else 'may not be'} {kind}"
        for form in before:
            alike = [other for other in now if other.get("type") == form.get("type")]
            found = [list(self._of_forms(form, other, at, is_answer=is_answer)) for other in alike]
            yield from min(found, key=len, default=[])

    def _of_forms(self, old: Schema, new: Schema, at: str, *, is_answer: bool) -> Iterator[str]:
        gone = set(old.get("enum", ())) - set(new["enum"]) if "enum" in new and not is_answer else ()
        yield from (f"{at} may not be {word}" for word in sorted(gone))
        for inside in ("items", "additionalProperties"):
            if isinstance(old.get(inside), dict) and isinstance(new.get(inside), dict):
                yield from self._of_schemas(old[inside], new[inside], f"{at}[]", is_answer=is_answer)
        fields, others = old.get("properties", {}), new.get("properties", {})
        required, demanded = set(old.get("required", ())), set(new.get("required", ()))
        if is_answer:
            yield from (f"{at}.{name} may be missing" for name in sorted(required - demanded) if name in others)
        else:
            yield from (f"{at}.{name} is wanted" for name in sorted(demanded - required))
        for name, field in fields.items():
            if name not in others:
                yield f"{at}.{name} is gone"
            else:
                yield from self._of_schemas(field, others[name], f"{at}.{name}", is_answer=is_answer)


def _parameters(operation: Document) -> dict[str, Schema]:
    return {f"{one['in']} {one['name']}": one for one in operation["parameters"] if one["in"] != "path"}


def _body(operation: Document) -> Schema | None:
    found: Schema | None = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
    return found


def _answer(operation: Document) -> Schema | None:
    (answer,) = operation["responses"].values()
    found: Schema | None = answer.get("content", {}).get(JSON, {}).get("schema")
    return found


def _forms(schema: Schema, schemas: dict[str, Schema]) -> list[Schema]:
    """Return a schema for each kind of value that one allows."""
    if "$ref" in schema:
        return _forms(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return [form for one in schema["anyOf"] for form in _forms(one, schemas)]
    return [schema]


def _kinds(forms: list[Schema]) -> set[str]:
    return {form.get("type", _ANY) for form in forms}
