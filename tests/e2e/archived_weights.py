"""The weights of a checkpoint as its owner downloads them, so that two can be compared to the bit."""

import hashlib
import io
import tarfile

import httpx

from tests.e2e.conftest import Service


def weights(service: Service, key: str, path: str) -> str:
    """Return the digest of a checkpoint's weights."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    url = f"{service.base_url}/api/v1/training_runs/{run}/checkpoints/{name}/archive"
    archive = httpx.get(url, headers={"X-API-Key": key}, follow_redirects=True, timeout=60).raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        member = next(one for one in files.getmembers() if one.name.endswith("adapter_model.safetensors"))
        content = files.extractfile(member)
        assert content is not None
        return hashlib.sha256(content.read()).hexdigest()
