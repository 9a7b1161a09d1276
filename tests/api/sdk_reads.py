"""Reads of the service by the SDK's RestClient; run as a process of its own, because it never closes its connections.

Arguments: base URL, key, a run with the checkpoints ``weights/ck1`` and ``sampler_weights/ck1``, another tenant's run.
Prints one JSON object.
"""

import sys
from collections.abc import Callable
from typing import Any

import tinker

from tests.e2e.sdk_end import end


def refusal(call: Callable[[], Any]) -> str:
    """The name of the SDK's error."""
    try:
        call()
    except tinker.TinkerError as error:
        return type(error).__name__
    return "none"


def main(base_url: str, key: str, run: str, foreign: str) -> dict[str, Any]:
    """Read, change and delete through the SDK."""
    rest = tinker.RestClient(base_url=base_url, api_key=key)
    session = run.partition(":")[0]
    seen = {
        "models": [one.model_name for one in rest.get_server_capabilities().result().supported_models],
        "runs": [one.training_run_id for one in rest.list_training_runs().result().training_runs],
        "last_checkpoint": rest.get_training_run(run).result().last_checkpoint.tinker_path,  # type: ignore[union-attr]
        "checkpoints_of_run": len(rest.list_checkpoints(run).result().checkpoints),
        "session_runs": rest.get_session(session).result().training_run_ids,
        "sessions": rest.list_sessions().result().sessions,
    }
    rest.set_checkpoint_ttl_from_tinker_path(f"tinker://{run}/weights/ck1", 3600).result()
    rest.delete_checkpoint(run, "weights/ck1").result()
    kept = rest.list_user_checkpoints().result().checkpoints
    return seen | {
        "checkpoints_after_delete": [one.checkpoint_id for one in kept],
        "foreign_run": refusal(lambda: rest.get_training_run(foreign).result()),
        "publish": refusal(
            lambda: rest.publish_checkpoint_from_tinker_path(f"tinker://{run}/sampler_weights/ck1").result()
        ),
        "wrong_key": refusal(lambda: tinker.RestClient(base_url=base_url, api_key="tml-wrong")),
    }


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
