"""The client package fits the service's OpenAPI document, both its halves fit each other, and its import is light."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from weft_client import models
from weft_client.asynchronous import AsyncWeft
from weft_client.call import Call

from cli.pages.routes import openapi_document
from tests.clients.noted_calls import methods_of, resources, unconnected
from tests.clients.released import OWN
from tests.clients.tenants_methods import METHODS, tenants_call
from tests.conftest import ROOT

PACKAGE = ROOT / "clients" / "python"


LISTS = [
    "gates.list",
    "samples.finished",
    "operations.list",
    "exceptions.list",
    "usage.query",
    "audit.entries",
    "webhooks.events",
    "checkpoints.list",
]
"""Methods that yield what is on several pages."""
PLACES = ("query", "header")
BY_ITSELF = {"cursor", "after", "before", "format"}
"""Parts of a query that a method sends by itself: the place of a page, the form of an answer."""
NOT_STREAMED = {
    "record_stability_info",
    "trajectory",
    "prompt_logprobs",
    "prompt_logprobs_last_n",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
}
"""Options of samples that only the SDK sends."""
COMBINED = {"runs.list", "runs.follow", "gates.paused", "jobs.wait"}
"""Methods that call others of their group."""
NO_METHOD = {("GET", "/api/v1/samplers/{sampler_id}")}
"""The SDK has it."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_document()


def own_operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the operations that Tinker's API does not have."""
    for path, methods in document["paths"].items():
        if path.startswith(OWN):
            for method, operation in methods.items():
                yield method.upper(), path, operation


def operation_of(document: dict[str, Any], call: Call[Any]) -> tuple[str, dict[str, Any]]:
    """Return the template of the call's path, and its operation."""
    for method, path, operation in own_operations(document):
        pattern = re.sub(r"\{[^}]*\}", "[^/]+", path)
        if method == call.method and re.fullmatch(pattern, call.path):
            return path, operation
    raise AssertionError(f"the service has no {call.method} {call.path}")


def schema_of(document: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
    return found


def test_every_method_is_among_those_that_are_compared() -> None:
    groups = resources(unconnected(AsyncWeft))
    assert {f"{name}.{method}" for name, group in groups.items() for method in methods_of(group)} == COMBINED | {
        *METHODS
    }


async def test_every_operation_of_wefts_own_has_a_method(document: dict[str, Any]) -> None:
    called = set()
    for name in METHODS:
        call = await tenants_call(name)
        called.add((call.method, operation_of(document, call)[0]))
    assert called == {(method, path) for method, path, _ in own_operations(document)} - NO_METHOD


@pytest.mark.parametrize("name", METHODS)
async def test_a_method_sends_what_its_operation_takes_and_reads_its_answer(
    document: dict[str, Any], name: str
) -> None:
    call = await tenants_call(name)
    _, operation = operation_of(document, call)
    taken = {
        place: {one["name"].lower() for one in operation.get("parameters", ()) if one["in"] == place}
        for place in PLACES
    }
    assert set(call.query) <= taken["query"] <= set(call.query) | BY_ITSELF
    assert {header.lower() for header in call.headers} - {"content-type"} == taken["header"]
    if call.body is not None:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]
        described = set(schema_of(document, reference)["properties"])
        assert set(call.body) == described - (NOT_STREAMED if name == "samples.stream" else set())
    if call.answer is not None:
        (answer,) = (found for status, found in operation["responses"].items() if status.startswith("2"))
        assert call.answer.__name__ == answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]


@pytest.mark.parametrize("name", LISTS)
async def test_a_list_asks_for_its_next_page_by_what_its_operation_takes(document: dict[str, Any], name: str) -> None:
    first, second = await tenants_call(name), await tenants_call(name, pages=1)
    _, operation = operation_of(document, second)
    taken = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
    assert set(second.query) <= taken
    assert (first.method, first.path) == (second.method, second.path)
    (place,) = {item for item in second.query.items() if item not in first.query.items()}
    assert place[1] == "next"


def test_records_have_the_fields_of_the_service_and_which_may_be_null(document: dict[str, Any]) -> None:
    records = {
        record.__name__: record
        for record in vars(models).values()
        if isinstance(record, type) and issubclass(record, BaseModel) and record not in (BaseModel, models.Record)
    }
    for name, record in records.items():
        properties = document["components"]["schemas"][name]["properties"]
        assert set(record.model_fields) == set(properties), name
        own = record.model_json_schema()["properties"]
        for field, described in properties.items():
            assert is_nullable(own[field]) == is_nullable(described), f"{name}.{field}"


def is_nullable(schema: dict[str, Any]) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def test_the_half_without_asyncio_is_made_of_the_other() -> None:
    place = importlib.util.spec_from_file_location("make_sync", PACKAGE / "make_sync.py")
    assert place is not None
    assert place.loader is not None
    script = importlib.util.module_from_spec(place)
    place.loader.exec_module(script)
    for source, target in script.FILES.items():
        text, committed = script.synchronous(source), target.read_text()
        assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(committed)), "run clients/python/make_sync.py"


@pytest.mark.parametrize(
    "used", ["Weft", "AsyncWeft", "WeftAdmin", "AsyncWeftAdmin", "WeftClientError", "cookbook.WeftLogger"]
)
def test_a_clients_import_loads_no_library_and_no_records(used: str) -> None:
    place, _, name = f"weft_client.{used}".rpartition(".")
    heavy = "{'httpx', 'pydantic', 'torch', 'tinker', 'weft_client.models', 'weft_client.admin_models'}"
    program = f"import sys; from {place} import {name}; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE / "src"
    )
    assert found.stdout.strip() == "[]"


def test_the_cookbooks_logger_has_no_method_that_ours_lacks() -> None:
    (path,) = (ROOT / ".venv/sdks").glob("tinker-cookbook-0.6.1/tinker_cookbook/utils/ml_log.py")
    from weft_client.cookbook import WeftLogger

    (logger,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Logger"
    )
    methods = {node.name: node for node in logger.body if isinstance(node, ast.FunctionDef)}
    assert set(methods) <= set(dir(WeftLogger))
    ours = ast.parse((PACKAGE / "src/weft_client/cookbook.py").read_text())
    own = {node.name: node for node in ast.walk(ours) if isinstance(node, ast.FunctionDef)}
    for name, method in methods.items():
        assert [one.arg for one in own[name].args.args] == [one.arg for one in method.args.args], name
