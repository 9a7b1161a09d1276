"""A client's script that says a word and waits for a line, so that a test can do something to its tenant meanwhile."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from tests.e2e.conftest import SDK_FOLDERS


def led(command: Sequence[str], sdk: str, *, obey: Callable[[str], None], seconds: float) -> dict[str, Any]:
    """Run the script with that SDK, calling ``obey`` with each word before it goes on; return its last line, JSON."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    if sdk != version("tinker"):
        environment["PYTHONPATH"] = str(SDK_FOLDERS / f"tinker-{sdk}")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as client:
        timer = threading.Timer(seconds, client.kill)
        timer.start()
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stderr is not None
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(client.stderr.read()), daemon=True)
        reading.start()
        try:
            last = ""
            for line in client.stdout:
                last = line.strip()
                if last.startswith("{"):
                    break
                obey(last)
                client.stdin.write("\n")
                client.stdin.flush()
            client.wait()
        except BaseException:
            # It waits for a line, and its pipes cannot be closed before it has ended.
            client.kill()
            raise
        finally:
            timer.cancel()
        reading.join()
        assert client.returncode == 0, errors[0][-4000:]
    seen: dict[str, Any] = json.loads(last)
    return seen
