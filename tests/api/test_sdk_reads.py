"""The unmodified SDK reads what weft lists: its validation is strict."""

import asyncio
import json
import os
import sys

from contracts.paths import Segment
from tests.conftest import ROOT


async def test_rest_client_reads_and_deletes(cats, dogs, service) -> None:
    run, foreign = await cats.run(), await dogs.run()
    await cats.checkpoint(run, "ck1")
    await cats.checkpoint(run, "ck1", segment=Segment.SAMPLER_WEIGHTS)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.api.sdk_reads",
        service.url,
        cats.key,
        run,
        foreign,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TINKER_TELEMETRY": "0"},
    )
    async with asyncio.timeout(120):
        output, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-3000:]
    session = run.partition(":")[0]
    assert json.loads(output) == {
        "models": ["test/tiny"],
        "runs": [run],
        "last_checkpoint": f"tinker://{run}/weights/ck1",
        "checkpoints_of_run": 2,
        "session_runs": [run],
        "sessions": [session],
        "checkpoints_after_delete": ["sampler_weights/ck1"],
        "foreign_run": "NotFoundError",
        "publish": "none",
        "wrong_key": "AuthenticationError",
    }
