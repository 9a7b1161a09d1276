"""A training script that dies of a KeyError of its own, reported by the public ``tinker`` SDK.

    python sdk_dies.py BASE_URL API_KEY BASE_MODEL

Prints the run's id first.
"""

import sys

import tinker

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


def main(base_url: str, api_key: str, base_model: str) -> None:
    """Make a run, and fail to find a column."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=1)
    trainer = getattr(trainer, "result", lambda: trainer)()
    print(trainer.model_id, flush=True)
    telemetry = trainer.get_telemetry()
    assert telemetry is not None
    with telemetry.capture_exceptions(fatal=True):
        columns: dict[str, str] = {}
        print(columns["prompt " + HOSTILE])


if __name__ == "__main__":
    main(*sys.argv[1:4])
