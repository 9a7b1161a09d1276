"""Forms of the command line beside its records: completion in a shell, and no colour in a pipe."""

import os
import subprocess
import sys
from pathlib import Path

from tests.other_versions import admin_service

SECONDS = 60.0
WEFT = Path(sys.executable).with_name("weft")
COMPLETED = """
source ~/.bashrc
function completed { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _weft_completion weft; echo "${COMPREPLY[@]}"; }
complete -p weft
completed weft gat
completed weft gate pause --mode ""
"""


def test_install_completion_makes_a_shell_complete_commands_and_words(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": f"{WEFT.parent}:{os.environ['PATH']}"}

    def bash(script: str) -> str:
        command = ["bash", "--noprofile", "--norc", "-c", script]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "bash completion installed" in bash("weft --install-completion; exit $?")
    declared, commands, words = bash(COMPLETED).splitlines()
    assert declared.endswith("weft")
    assert (commands, words) == ("gate", "abort wait keep")


def test_a_pipe_gets_one_look_without_colour() -> None:
    """``FORCE_COLOR``, which many builds set, makes no terminal of a pipe: it would be watched for ever."""
    with admin_service() as service:
        environment = os.environ | {"WEFT_ADMIN_URL": service.url, "WEFT_ADMIN_KEY": "tml-key", "FORCE_COLOR": "1"}
        shown = subprocess.run([WEFT, "top"], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert (shown.returncode, "tokens/s" in shown.stdout, "\x1b" in shown.stdout) == (0, True, False), shown.stderr
