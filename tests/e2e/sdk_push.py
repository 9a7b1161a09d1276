"""``tinker checkpoint push-hf`` of the SDK on the path, to a stand-in of the hub; run as a script.

    python sdk_push.py BASE_URL API_KEY OTHER_KEY BASE_MODEL

Prints one JSON object: the SDK's version, the repositories and files that were pushed, and the other tenant's exit code.
"""

import os
import sys
import tempfile
import threading
from importlib.metadata import version
from typing import Any

from tinker_command import Hub, address_of


def main(base_url: str, key: str, other_key: str, base_model: str) -> dict[str, Any]:
    """Save weights for sampling, push them, and have another tenant try the same."""
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    os.environ |= {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0", "HF_TOKEN": "hf_me"}
    os.environ |= {"HF_ENDPOINT": address_of(hub), "HOME": tempfile.mkdtemp()}
    import tinker
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    trainer = tinker.ServiceClient().create_lora_training_client(base_model=base_model, rank=4)
    path = trainer.save_weights_for_sampler("kept").result().path
    push = ["checkpoint", "push-hf", path, "--repo", "me/mine"]
    done = CliRunner().invoke(main_cli, push)
    if done.exit_code:
        raise RuntimeError(f"{done.exception!r} {done.output[-500:]}")
    os.environ["TINKER_API_KEY"] = other_key
    refused = CliRunner().invoke(main_cli, push).exit_code
    hub.shutdown()
    pushed, told = sorted(hub.files), version("tinker")
    return {"version": told, "repositories": hub.repositories, "pushed": pushed, "refused": refused}


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:5]))
