"""The client's README has every group and method of the clients, and names no file that is not there."""

import re

import pytest
from weft_client.admin_async import AsyncWeftAdmin
from weft_client.asynchronous import AsyncWeft

from tests.clients.noted_calls import C, methods_of, resources, unconnected
from tests.conftest import ROOT

PACKAGE = ROOT / "clients" / "python"
README = (PACKAGE / "README.md").read_text()
NAME = re.compile(r"`(\w+)`")


@pytest.mark.parametrize(("head", "kind"), [("group", AsyncWeft), ("group of `admin`", AsyncWeftAdmin)])
def test_a_table_has_every_group_with_its_methods(head: str, kind: type[C]) -> None:
    table = README.partition(f"| {head} | methods | about |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    told = {name.strip("`"): set(NAME.findall(methods)) for name, methods, _ in rows}
    assert told == {name: methods_of(group) for name, group in resources(unconnected(kind)).items()}


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w*]+\.py)`", README))))
def test_every_file_that_is_named_is_there(file: str) -> None:
    assert [*PACKAGE.rglob(file)]
