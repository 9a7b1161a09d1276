"""Writes the records of the admin API's answers from its OpenAPI document: ``python clients/python/make_admin_models.py``."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "src" / "weft_client" / "admin_models.py"
_HEAD = '''"""Records of the admin API's answers. ``clients/python/make_admin_models.py`` makes them of its document.

A field with a fixed set of words is a ``str``: a newer service may have more of them.
"""

from datetime import date, datetime
from decimal import Decimal
from typing import Any, Generic, TypeVar

from weft_client.models import Record

R = TypeVar("R", bound=Record)


class Page(Record, Generic[R]):
    """A page of a list, in order of ids. ``next``: what the next page asks for as ``after``; None: this is the last one."""

    items: list[R]
    next: str | None = None
'''
_KINDS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}
_FORMATS = {"date-time": "datetime", "date": "date"}
_DECIMALS = {
    ("AlertBody", "amount"),
    ("MoneyAlertReport", "amount"),
    ("MoneyBudgetReport", "amount"),
    ("MoneyBudgetReport", "spent"),
    ("PriceBody", "amount"),
}
"""Amounts of money, which JSON carries as text."""
_WIDTH = 126


def admin_models(document: dict[str, Any]) -> str:
    """Return the module's text."""
    schemas = document["components"]["schemas"]
    names = list(dict.fromkeys(name for name in _answered(document) for name in _with_parts(schemas, name)))
    records = [name for name in names if "properties" in schemas[name] and not name.startswith("Listed_")]
    return _HEAD + "".join(_record(schemas, name) for name in records)


def record_name(schema: str) -> str:
    """Return the name of the record, or of the records of a page, that a schema of an answer describes."""
    return schema.removeprefix("Listed_").removesuffix("_")


def _answered(document: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the schemas of answers, in order of their names."""
    found = set()
    for methods in document["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
                if status.startswith("2") and "$ref" in schema:
                    found.add(_referred(schema))
    yield from sorted(found)


def _with_parts(schemas: dict[str, Any], name: str) -> Iterator[str]:
    """Yield the names of the schemas that one is made of, and then its own."""
    for field in schemas[name].get("properties", {}).values():
        for part in _references(field):
            yield from _with_parts(schemas, part)
    yield name


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _referred(schema)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _referred(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _record(schemas: dict[str, Any], name: str) -> str:
    schema = schemas[name]
    about = " ".join(str(schema["description"]).split()).replace("null", "None")
    told = textwrap.wrap(about, _WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    quoted = f'    """{told[0]}"""' if len(told) == 1 else '    """' + "\n    ".join(told) + '\n    """'
    required = schema.get("required", ())
    kinds = {field: _kind(schemas, name, field, described) for field, described in schema["properties"].items()}
    kinds |= {field: f"{kind} | None" for field, kind in kinds.items() if field not in required and "None" not in kind}
    # A service of before the field does not send it.
    fields = [f"    {field}: {kind}" + (" = None" if kind.endswith("None") else "") for field, kind in kinds.items()]
    return f"\n\nclass {name}(Record):\n{quoted}\n\n" + "\n".join(fields) + "\n"


def _kind(schemas: dict[str, Any], name: str, field: str, schema: dict[str, Any]) -> str:
    if (name, field) in _DECIMALS:
        return "Decimal"
    if "$ref" in schema:
        referred = _referred(schema)
        return "str" if "enum" in schemas[referred] else referred
    if "anyOf" in schema:
        return " | ".join(_kind(schemas, name, field, one) for one in schema["anyOf"])
    if schema.get("type") == "null":
        return "None"
    if schema.get("type") == "array":
        return f"list[{_kind(schemas, name, field, schema['items'])}]"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"dict[str, {_kind(schemas, name, field, values) if isinstance(values, dict) else 'Any'}]"
    return _FORMATS.get(schema.get("format", ""), _KINDS.get(schema.get("type", ""), "Any"))


if __name__ == "__main__":
    # The service's own code renders its document.
    from cli.pages.admin_routes import admin_document

    TARGET.write_text(admin_models(admin_document()))
    sys.stdout.write(f"wrote {TARGET}\n")
