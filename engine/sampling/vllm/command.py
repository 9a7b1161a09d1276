"""The command that starts a vLLM server: that of an interpreter, or of the vLLM that this machine has."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from contracts.errors import InvalidRequest

CHECKOUT = Path(__file__).resolve().parents[3]
"""Folder that holds weft's packages: the checkout, unless weft was installed from a wheel."""
_PYTHON = Path(".venv-vllm/bin/python")
"""Interpreter of the environment that ``make vllm`` makes."""
_LONGEST_LINE = 1000


def server_command(python: Path) -> tuple[str, ...]:
    """Return the command that starts the vLLM installed for the interpreter ``python``."""
    return (str(python), "-m", "vllm.entrypoints.openai.api_server")


def find_server_command(checkout: Path = CHECKOUT) -> tuple[str, ...]:
    """Return the command of the first vLLM that is found; vLLM is not imported for it.

    It is looked for in ``.venv-vllm`` of the current folder and of ``checkout``, in weft's own environment, and on the
    ``PATH``. Raises ``InvalidRequest`` that names these places.
    """
    folders = list(dict.fromkeys((Path.cwd(), checkout)))
    for folder in folders:
        if (folder / _PYTHON).exists():
            return server_command(folder / _PYTHON)
    module = find_spec("vllm")
    # A module without an origin is any folder of that name.
    if module is not None and module.origin is not None:
        return server_command(Path(sys.executable))
    program = shutil.which("vllm")
    if program is not None:
        return _program_command(Path(program).absolute())
    raise InvalidRequest(
        f"there is no vLLM: no {_PYTHON} in {' or '.join(map(str, folders))}, no module vllm for {sys.executable} and no "
        "program vllm on the PATH; run `make vllm` in weft's checkout, or set WEFT_VLLM_COMMAND"
    )


def _program_command(program: Path) -> tuple[str, ...]:
    """Return the command of an installed program ``vllm``: that of its interpreter, where its first line names one.

    The program asks for a distribution that is called vllm; builds for a CPU have another name.
    """
    with program.open("rb") as file:
        first = file.readline(_LONGEST_LINE)
    python = Path(os.fsdecode(first.removeprefix(b"#!").strip()))
    if first.startswith(b"#!/") and python.name.startswith("python") and python.exists():
        return server_command(python)
    return (str(program), "serve")
