"""The vLLM that weft starts is found wherever weft itself is started."""

import sys
from pathlib import Path

import pytest

from contracts.errors import InvalidRequest
from engine.sampling.vllm.command import CHECKOUT, find_server_command, server_command


class Machine:
    """A machine without a vLLM, and ways to install one. ``here`` is the current folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.here, self.checkout, self.modules, self.programs = (
            folder / name for name in ("here", "checkout", "modules", "programs")
        )
        for made in (self.here, self.checkout, self.modules, self.programs):
            made.mkdir()
        monkeypatch.chdir(self.here)
        monkeypatch.setenv("PATH", str(self.programs))
        monkeypatch.setattr(sys, "path", [str(self.modules)])
        # pytest imports this folder of tests under that name.
        monkeypatch.delitem(sys.modules, "vllm", raising=False)

    def make_environment(self, folder: Path) -> Path:
        """Make the interpreter that ``make vllm`` makes in ``folder``."""
        return executable(folder / ".venv-vllm" / "bin" / "python")

    def make_module(self) -> None:
        """Install a module ``vllm`` for weft's own interpreter, which must not be imported."""
        (self.modules / "vllm").mkdir()
        (self.modules / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")

    def make_program(self) -> Path:
        """Put a program ``vllm`` on the ``PATH``."""
        return executable(self.programs / "vllm")

    def found(self) -> tuple[str, ...]:
        """Return the command that weft finds."""
        return find_server_command(self.checkout)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_nearer_vllm_wins(machine: Machine) -> None:
    program = machine.make_program()
    assert machine.found() == (str(program), "serve")
    machine.make_module()
    assert machine.found() == server_command(Path(sys.executable))
    beside = machine.make_environment(machine.checkout)
    assert machine.found() == server_command(beside)
    here = machine.make_environment(machine.here)
    assert machine.found() == server_command(here)


def test_a_program_of_a_relative_folder_is_named_in_full(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is started in another folder than weft's."""
    monkeypatch.setenv("PATH", "bin")
    program = executable(machine.here / "bin" / "vllm")
    assert machine.found() == (str(program), "serve")


def test_a_programs_own_interpreter_starts_the_server(machine: Machine) -> None:
    """A program of a build for a CPU does not start: it asks for the distribution vllm, which has another name there."""
    program, python = machine.make_program(), executable(machine.checkout / "python3")
    program.write_text(f"#!{python}\nimport vllm\n")
    assert machine.found() == server_command(python)
    for first in ("#!/usr/bin/env python3", f"#!{machine.here}/python3", "\x7fELF"):
        program.write_text(f"{first}\n")
        assert machine.found() == (str(program), "serve")


def test_a_folder_that_happens_to_be_called_vllm_is_no_module(machine: Machine) -> None:
    (machine.modules / "vllm").mkdir()
    with pytest.raises(InvalidRequest, match="no module vllm"):
        machine.found()


def test_without_a_vllm_all_places_and_the_setting_are_named(machine: Machine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        machine.found()
    places = (str(machine.here), str(machine.checkout), ".venv-vllm/bin/python", sys.executable, "PATH", "make vllm")
    assert [place for place in (*places, "WEFT_VLLM_COMMAND") if place not in refused.value.message] == []


def test_the_checkout_holds_wefts_packages() -> None:
    assert (CHECKOUT / "engine" / "sampling" / "vllm" / "command.py").is_file()
