"""The pages that are photographed are those of the routes, so that a new page is not forgotten."""

from fastapi import APIRouter, FastAPI

from bench.screenshots.pages import address, name_of, operator_pages, templates, tenant_pages


def test_every_page_of_both_listeners_is_in_the_list() -> None:
    assert {"/ui", "/ui/login"} <= set(tenant_pages())
    assert {"/ops/overview", "/ops/tenants/{tenant_id}", "/ops/login"} <= set(operator_pages())
    assert all(one.startswith("/ui") for one in tenant_pages())
    names = [name_of(one) for one in (*tenant_pages(), *operator_pages())]
    assert len(set(names)) == len(names)


def test_a_page_that_is_added_is_in_the_list() -> None:
    app, router = FastAPI(openapi_url=None), APIRouter()
    router.add_api_route("/cats/{cat}", lambda cat: cat, methods=["GET"])
    router.add_api_route("/cats/{cat}", lambda cat: cat, methods=["POST"])
    app.include_router(router, prefix="/ui")
    assert "/ui/cats/{cat}" in templates(app)


def test_a_page_with_an_id_is_found_by_a_link_to_one() -> None:
    links = ["/ops/runs", "/ops/runs/a:train:0", "/ops/runs/a:train:0/history"]
    assert address("/ops/runs", []) == "/ops/runs"
    assert address("/ops/runs/{run_id}", links) == "/ops/runs/a:train:0"
    assert address("/ui/files/{name:path}", ["/ui/files/a/b"]) == "/ui/files/a/b"
    assert address("/ops/tenants/{tenant_id}", links) is None


def test_a_comparison_is_found_by_links_to_two_runs() -> None:
    links = ["/ui/runs/a%3Atrain%3A0", "/ui/runs/a%3Atrain%3A0", "/ui/runs/live"]
    assert address("/ui/runs/compare", links) is None
    links.append("/ui/runs/b%3Atrain%3A1")
    assert address("/ui/runs/compare", links) == "/ui/runs/compare?run=a%3Atrain%3A0&run=b%3Atrain%3A1"
