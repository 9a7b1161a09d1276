"""The processes of ``weft up``."""

import pytest

from cli.supervisor import Child
from cli.up import Sizes, children
from store.settings import Settings

BASES = ["org/one", "org/other"]


def pools(**given: object) -> list[Child]:
    settings = Settings.model_validate({"base_models": tuple(f"{name}=models/x" for name in BASES), **given})
    return [
        child
        for child in children(settings, Sizes(apis=1, trainers=1, pools=2), BASES, 8642)
        if child.label.startswith("pool")
    ]


@pytest.mark.parametrize(("given", "name"), [({}, "pool"), ({"pool_name": "east"}, "east")])
def test_every_pool_of_a_base_has_a_name(given: dict[str, object], name: str) -> None:
    found = [child.environment["WEFT_POOL_NAME"] for child in pools(**given)]
    assert found == [f"{name}-0", f"{name}-1"] * len(BASES)


def test_vllm_servers_leave_memory_to_the_trainers_beside_them() -> None:
    assert {child.environment["WEFT_BESIDE_TRAINER"] for child in pools()} == {"true"}


def test_threads_are_the_callers_if_it_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("WEFT_POOL_NAME", "east")
    assert {child.environment["OMP_NUM_THREADS"] for child in pools()} == {"7"}
    assert {child.environment["WEFT_POOL_NAME"] for child in pools()} == {"east-0", "east-1"}
