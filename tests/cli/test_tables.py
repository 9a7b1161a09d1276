"""Tables of operators' commands: with headings and colour on a terminal, and the same lines as ever in a pipe."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from api.admin.processes import PoolBody
from cli.trainers import living_pool
from store.tables import PoolState
from testing.operator_command import weft

SECONDS = 300.0
COMMANDS = {
    "tenant list": ("name", "id", "made", "state"),
    "tenant limits cats": ("limit", "value", "whose", "used", "beyond it"),
    "tenant usage": ("tenant", "day", "base model", "kind", "operations", "tokens"),
    "tenant shares": ("name", "state", "5 minutes", "an hour", "pending", "stored", "tokens"),
    "price list": ("meter", "base model", "amount", "currency", "from"),
    "audit list": ("time", "tenant", "actor", "door", "action", "thing", "outcome", "change"),
}
"""Headings of each command."""
_RUN = """
import sys
from cli.main import app
for line in sys.argv[2:]:
    print(f"<{line}>", flush=True)
    app([*line.split(), "--data", sys.argv[1]], standalone_mode=False)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two tenants, one of which has used and was given something, and a price."""
    data = tmp_path_factory.mktemp("tables") / "data"
    for name in ("cats", "[red]dogs"):
        weft(data, "tenant", "create", name)
    weft(data, "tenant", "set", "cats", "--limit", "open_runs=3")
    weft(data, "project", "create", "archive", "--tenant", "cats")
    weft(data, "price", "add", "train_tokens", "3.30")
    return data


def parts(printed: str) -> dict[str, str]:
    """Return what each command has printed."""
    _, *found = re.split(r"<(.*)>\n", printed)
    return dict(zip(found[::2], found[1::2], strict=True))


def command(data: Path) -> list[str]:
    """A process that runs all the commands."""
    return [sys.executable, "-c", _RUN, str(data), *COMMANDS]


@pytest.fixture(scope="module")
def piped(data: Path) -> dict[str, str]:
    """Text that a pipe gets, also one of a build that sets ``FORCE_COLOR``."""
    environment = os.environ | {"FORCE_COLOR": "1"}
    ended = subprocess.run(command(data), capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert ended.returncode == 0, ended.stderr
    return parts(ended.stdout)


@pytest.fixture(scope="module")
def shown(data: Path) -> dict[str, str]:
    """Text that a wide terminal gets."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "400"}
    environment = {name: value for name, value in environment.items() if name != "NO_COLOR"}
    printed = b""
    with subprocess.Popen(command(data), stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        while piece := _read(ours):
            printed += piece
        assert process.wait(SECONDS) == 0, process.communicate()[1]
    os.close(ours)
    return parts(printed.decode().replace("\r\n", "\n"))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:
        # Linux's way to say that the other side is closed.
        return b""


def test_a_pipe_gets_lines_of_cells_and_no_headings(piped: dict[str, str]) -> None:
    assert not [name for name, told in piped.items() if "\x1b" in told or "─" in told]
    cats, dogs = piped["tenant list"].splitlines()
    assert re.fullmatch(r"cats\t[0-9a-f]{32}\t\d{4}-\d\d-\d\d \d\d:\d\d\tworks", cats)
    assert dogs.startswith("[red]dogs\t")
    share, service_class, pending, *_ = piped["tenant limits cats"].splitlines()
    waits = "a training request beyond it waits, then is answered 429 and sent again by the SDK"
    assert (share, service_class) == ("share\t1", "class\tstandard")
    assert pending == f"pending_operations\t4096\tdefault\t0\t{waits}"
    assert piped["tenant usage"] == ""
    shares = piped["tenant shares"].splitlines()[1].split("\t")
    assert shares[:2] == ["cats", "works"]
    assert shares[4:] == ["0 pending", "0 bytes", "0 today"]
    assert re.fullmatch(r"train_tokens\t\*\t3\.3\tUSD\t\S+Z\n", piped["price list"])
    assert piped["audit list"].splitlines()[-1].split("\t")[1:2] == ["cats"]


def test_a_terminal_gets_the_same_cells_under_headings_in_colour(piped: dict[str, str], shown: dict[str, str]) -> None:
    for name, headings in COMMANDS.items():
        if not piped[name]:
            assert shown[name] == ""
            continue
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown[name])
        assert "\x1b[1;36m" in shown[name], name
        assert "\t" not in plain, name
        heads = [line.split("  ") for line in plain.splitlines()]
        assert [word for word in headings if word not in {cell.strip() for line in heads for cell in line}] == [], name
        cells = {cell for line in piped[name].splitlines() for cell in line.split("\t")}
        assert [cell for cell in cells if cell not in plain] == [], name


def test_a_process_that_works_is_told_in_the_word_of_every_list() -> None:
    told = {state: living_pool(PoolBody.model_construct(state=state)) for state in PoolState}
    assert told.pop(PoolState.WORKING) == "works"
    assert all(word == state for state, word in told.items())
