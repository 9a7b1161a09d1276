"""Attacks by a checkpoint's files: reloads of many versions, copies, downloads, merges and archives to import (A5, A6)."""

import io
import tarfile
from itertools import count

import orjson

from bench.hostile.foothold import OWN_PREFIX, PREFIX, Foothold, again_and_again

_CONNECTIONS = 16
_VERSIONS = 24
_ARCHIVE_BYTES = 2**20


async def reloads(foothold: Foothold) -> None:
    """Point a run's samplers at one of its many versions after another."""
    run = await foothold.run()
    paths = [await foothold.checkpoint(run, seq_id) for seq_id in range(1, _VERSIONS + 1)]

    async def send(number: int) -> None:
        await foothold.post(f"adapters/{run}/reload", {"path": paths[number % _VERSIONS]})

    await again_and_again(_CONNECTIONS, send)


async def copies_and_downloads(foothold: Foothold) -> None:
    """Copy a checkpoint, ask for links to it, and leave its archive in the middle."""
    run = await foothold.run(rank=16)
    path = await foothold.checkpoint(run)
    archive = f"{PREFIX}/training_runs/{run}/checkpoints/sampler_weights/v1/archive"

    async def send(number: int) -> None:
        match number % 3:
            case 0:
                await foothold.post("copy_weights", {"source_path": path})
            case 1:
                await foothold.send("GET", archive)
            case _:
                await foothold.send(
                    "GET", f"{PREFIX}/training_runs/{run}/checkpoints/sampler_weights/v1/external_weights_urls"
                )

    await again_and_again(_CONNECTIONS, send)


async def jobs(foothold: Foothold) -> None:
    """Have a checkpoint merged under ever new names, and archives imported that are none or hold no adapter."""
    run = await foothold.run()
    path = await foothold.checkpoint(run)
    names = count()
    archives = [b"\0" * _ARCHIVE_BYTES, _archive({"adapter_config.json": b"[" * 10_000}), _archive({"x" * 90: b"y"})]
    query = f"{OWN_PREFIX}/imports?base_model={foothold.base_model}"

    async def send(number: int) -> None:
        if number % 2:
            body = orjson.dumps({"path": path, "name": f"merged-{next(names)}"})
            await foothold.send("POST", f"{OWN_PREFIX}/merges", body)
            return
        body = archives[number // 2 % len(archives)]
        await foothold.send("POST", query, body, {"Content-Type": "application/octet-stream"})

    await again_and_again(_CONNECTIONS, send)


def _archive(files: dict[str, bytes]) -> bytes:
    """Return a tar of ``files``."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return found.getvalue()
