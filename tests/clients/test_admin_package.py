"""The operators' client fits the admin API's OpenAPI document: each operation has one method, each record its schema's fields."""

import importlib.util
import re
from types import ModuleType
from typing import Any, get_args

import pytest
from weft_client import admin_models
from weft_client.call import Call

from cli.pages.admin_routes import admin_document
from tests.clients.admin_methods import METHODS, admins_call
from tests.conftest import ROOT

NO_METHOD = {("GET", "/admin/v1/openapi.json")}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return admin_document()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    place = importlib.util.spec_from_file_location("make_admin_models", ROOT / "clients/python/make_admin_models.py")
    assert place is not None
    assert place.loader is not None
    made = importlib.util.module_from_spec(place)
    place.loader.exec_module(made)
    return made


def operation_of(document: dict[str, Any], call: Call[Any]) -> tuple[str, dict[str, Any]]:
    """Return the template of the call's path, and its operation."""
    for path, methods in document["paths"].items():
        pattern = re.sub(r"\{[^}]*\}", "[^/]+", path)
        if call.method.lower() in methods and re.fullmatch(pattern, call.path):
            return path, methods[call.method.lower()]
    raise AssertionError(f"the admin API has no {call.method} {call.path}")


async def test_every_operation_of_the_admin_api_has_a_method(document: dict[str, Any]) -> None:
    called = set()
    for name in METHODS:
        call = await admins_call(name)
        called.add((call.method, operation_of(document, call)[0]))
    offered = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert called == offered - NO_METHOD


@pytest.mark.parametrize("name", METHODS)
async def test_a_method_sends_what_its_operation_takes_and_reads_its_answer(
    document: dict[str, Any], script: ModuleType, name: str
) -> None:
    call = await admins_call(name)
    _, operation = operation_of(document, call)
    taken = {one["name"].lower() for one in operation.get("parameters", ())}
    assert set(call.query) <= taken
    assert {header.lower() for header in call.headers} == taken & {"if-match", "idempotency-key"}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    assert (call.body is None) == (body is None)
    if body is not None and call.body is not None:
        described = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert set(call.body) == set(described["properties"])
    (answer,) = (found for status, found in operation["responses"].items() if status.startswith("2"))
    if call.answer is None:
        assert "content" not in answer
        return
    schema = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    is_page = call.answer.__name__.startswith("Page")
    record = call.answer.model_fields["items"].annotation if is_page else call.answer
    assert schema.startswith("Listed_") == is_page
    assert (get_args(record)[0] if is_page else record).__name__ == script.record_name(schema)


def test_the_records_are_made_of_the_document(document: dict[str, Any], script: ModuleType) -> None:
    path = ROOT / "clients/python/src/weft_client/admin_models.py"
    assert path.read_text() == script.admin_models(document), "run clients/python/make_admin_models.py"
    assert admin_models.Page.model_config["frozen"]
