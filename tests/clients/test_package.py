"""The client package fits the service's OpenAPI document, both its halves fit each other, and its import is light."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel
from weft_client import calls, models
from weft_client.call import Call

from cli.pages.routes import openapi_document
from tests.conftest import ROOT

PACKAGE = ROOT / "clients" / "python"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
CALLS: dict[str, Call[Any]] = {
    "runs": calls.runs(
        {"project_id": "one", "base_model": "base", "state": "ready", "text": "x", "metadata": "a=b"},
        recent=1,
        limit=1,
        cursor="1-1",
    ),
    "run": calls.run("run", recent=1),
    "marks": calls.marks("run"),
    "points": calls.points("run", after=0, limit=1),
    "add_metrics": calls.add_metrics("run", {1: {"reward": 1.0}}),
    "metric": calls.metric("run", "reward", after=0, limit=1),
    "waiting": calls.waiting("run"),
    "request_waiting": calls.request_waiting("request"),
    "gate": calls.gate("run"),
    "adapters": calls.adapters(limit=1, cursor="1-x", offset=0),
    "pause": calls.pause("run", mode="keep", reason=None, ttl=None, wait_seconds=1.0, clear_cache=False, generation=1),
    "resume": calls.resume("run", generation=None),
    "reload": calls.reload("run", path=None),
    "staleness": calls.staleness("sampler"),
    "bound_staleness": calls.bound_staleness("sampler", max_version_lag=1, on_stale="fail", swap_policy=None),
    "report": calls.report("request"),
    "samples": calls.samples(limit=1, after="request"),
    "client_exceptions": calls.client_exceptions(session="one", run="run", limit=1, after=1),
    "operations": calls.operations(state="pending", lane="run", kind="sample", limit=1, after="request"),
    "checkpoints": calls.checkpoints(
        run="run", type="sampler", name="one", public=True, expires_within=1, limit=1, cursor="1-x", offset=0
    ),
    "usage": calls.usage(since=NOW, before=NOW, group_by=["run"], bucket_width="1h", limit=1, offset=0, cursor="x"),
    "export_usage": calls.export_usage(since=NOW, before=NOW, format="focus"),
    "standing": calls.standing(),
    "audit": calls.audit(
        action=["key_create"], resource=["key"], key="tml-1", since=NOW, until=NOW, cursor="1-1", limit=1
    ),
    "keys": calls.keys(),
    "make_key": calls.make_key({"note": "x", "expires_at": NOW}, idempotency_key=None),
    "rotate_key": calls.rotate_key(1, grace=0, idempotency_key=None),
    "bound_key": calls.bound_key(1, {"train_tokens_per_minute": 1}),
    "revoke_key": calls.revoke_key(1),
    "projects": calls.projects(),
    "make_project": calls.make_project("one"),
    "bound_project": calls.bound_project("one", {"sessions": 1}),
    "webhooks": calls.webhooks(),
    "set_webhook": calls.set_webhook("one", url="https://a.example", events=["*"], note="", is_enabled=True),
    "delete_webhook": calls.delete_webhook("one"),
    "webhook_secret": calls.webhook_secret("one"),
    "rotate_webhook_secret": calls.rotate_webhook_secret("one", idempotency_key=None),
    "test_webhook": calls.test_webhook("one", idempotency_key=None),
    "webhook_events": calls.webhook_events("one", before=1),
    "retry_webhook_event": calls.retry_webhook_event("one", "event"),
    "weigh_run": calls.weigh_run("run", 3.0),
    "delete_checkpoints": calls.delete_checkpoints(["tinker://run/weights/one"]),
    "merge": calls.merge("tinker://run/weights/one", "merged", ttl_seconds=None, dtype=None, idempotency_key=None),
    "import_archive": calls.import_archive(
        b"",
        base_model="base",
        name="one",
        segment="weights",
        ttl_seconds=1,
        offset=1,
        project=None,
        idempotency_key=None,
    ),
    "received": calls.received("one"),
    "jobs": calls.jobs(limit=1),
    "job": calls.job("job"),
    "cancel_job": calls.cancel_job("job"),
}
NOT_CALLS = {("GET", "/api/v1/samplers/{sampler_id}"), ("POST", "/api/v1/stream_sample")}
"""The SDK has the one; the other is a stream, no call."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_document()


def own_operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Operations that Tinker's API does not have, but gates of single tokens."""
    for path, methods in document["paths"].items():
        if path.startswith(("/api/weft/v1/", "/api/v1/adapters/", "/api/v1/samplers/", "/api/v1/samples/")):
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


def test_every_function_that_makes_a_call_is_among_those_that_are_compared() -> None:
    tree = ast.parse((PACKAGE / "src/weft_client/calls.py").read_text())
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert made == set(CALLS)


def test_every_operation_of_wefts_own_has_a_call(document: dict[str, Any]) -> None:
    called = {(call.method, operation_of(document, call)[0]) for call in CALLS.values()}
    offered = {(method, path) for method, path, _ in own_operations(document)}
    assert called == offered - NOT_CALLS


@pytest.mark.parametrize("name", CALLS)
def test_a_call_sends_what_its_operation_takes(document: dict[str, Any], name: str) -> None:
    call = CALLS[name]
    _, operation = operation_of(document, call)
    taken = {one["name"].lower() for one in operation.get("parameters", ())}
    assert set(call.query) <= taken
    assert {header.lower() for header in call.headers} - {"content-type"} <= taken
    if call.body is not None:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]
        assert set(call.body) <= set(schema_of(document, reference)["properties"])


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.answer is not None])
def test_a_record_has_the_fields_of_its_answer(document: dict[str, Any], name: str) -> None:
    _, operation = operation_of(document, CALLS[name])
    (answer,) = (found for status, found in operation["responses"].items() if status.startswith("2"))
    reference = answer["content"]["application/json"]["schema"]
    record = CALLS[name].answer
    assert record is not None
    assert record.__name__ == reference["$ref"].rpartition("/")[2]


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
