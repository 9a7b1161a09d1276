"""``weft beat`` as a process of its own."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path


def test_beat_logs_as_the_settings_say(tmp_path: Path) -> None:
    with socket.socket() as taken:
        # Bound, and nobody listens: beat cannot reach its Redis and says so.
        taken.bind(("127.0.0.1", 0))
        environment = {
            "WEFT_DATABASE_URL": "postgresql+asyncpg://nobody@127.0.0.1/none",
            "WEFT_REDIS_URL": f"redis://127.0.0.1:{taken.getsockname()[1]}/0",
            "WEFT_LOG_FORMAT": "json",
        }
        command = [sys.executable, "-m", "cli.main", "beat", "--data", str(tmp_path)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
            # Ends the wait for a line that does not come.
            timer = threading.Timer(60, process.kill)
            timer.start()
            assert process.stderr is not None
            line = json.loads(process.stderr.readline())
            timer.cancel()
            process.terminate()
    assert (line["process"], line["logger"], line["level"]) == ("beat", "celery.beat", "error")
