"""A client whose tenant is suspended in each mode, and one of a viewer and of a project, through the public ``tinker`` SDK.

    python sdk_tenancy.py BASE_URL BASE_MODEL MEMBER_KEY VIEWER_KEY PROJECT_KEY PROJECT suspended|free

At each word that it prints it waits for a line, so that whoever runs it can suspend and resume the tenant meanwhile. Prints one
JSON line at its end.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types


def datum() -> types.Datum:
    """One sequence to learn."""
    tokens = list(b"meow meow")
    inputs = {"target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[len(tokens)])}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def begun(trainer: tinker.TrainingClient) -> tuple[Any, Any]:
    """A step that is sent and not waited for."""
    loss = trainer.forward_backward([datum()], "cross_entropy")
    return loss, trainer.optim_step(types.AdamParams(learning_rate=1e-3))


def ended(step: tuple[Any, Any]) -> float:
    """Loss of a step that was begun."""
    step[1].result()
    loss: float = step[0].result().metrics["loss:sum"]
    return loss


def created(service: tinker.ServiceClient, base_model: str) -> tinker.TrainingClient:
    """A training client of a new model. Old SDKs return it, newer ones a future of it."""
    made: Any = service.create_lora_training_client(base_model=base_model, rank=4, seed=1)
    return made.result() if hasattr(made, "result") else made


def pause(word: str) -> None:
    """Have whoever runs this do what belongs to the word."""
    print(word, flush=True)
    sys.stdin.readline()


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    """Kind, text and seconds of the error that ``call`` ends with."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told to whoever runs this
        status = getattr(error, "status_code", None)
        return {"status": status, "text": str(error), "seconds": time.monotonic() - started}
    return {"status": 200, "text": "", "seconds": time.monotonic() - started}


def suspensions(service: tinker.ServiceClient, base_model: str, *, suspends: bool) -> dict[str, Any]:
    """A run through every mode of suspension."""
    seen: dict[str, Any] = {}
    trainer = created(service, base_model)
    losses = [ended(begun(trainer))]
    pause("hold")
    held = begun(trainer)
    pause("resume")
    losses.append(ended(held))
    pause("read_only")
    # Only a suspended tenant's: a free one would train on.
    if suspends:
        seen["step"] = refused(lambda: ended(begun(trainer)))
    seen["model"] = refused(lambda: created(service, base_model))
    seen["listed"] = len(service.create_rest_client().list_training_runs().result().training_runs)
    pause("resume")
    losses.append(ended(begun(trainer)))
    pause("blocked")
    seen["blocked"] = refused(lambda: service.create_rest_client().list_training_runs().result())
    pause("resume")
    losses.append(ended(begun(trainer)))
    return {**seen, "losses": losses, "path": trainer.save_state("end").result().path}


def viewing(base_url: str, key: str, base_model: str) -> dict[str, Any]:
    """A viewer lists, and is refused training at once."""
    service = tinker.ServiceClient(base_url=base_url, api_key=key)
    listed = len(service.create_rest_client().list_training_runs().result().training_runs)
    return {"listed": listed, "model": refused(lambda: created(service, base_model))}


def in_project(base_url: str, key: str, base_model: str, project: str) -> dict[str, Any]:
    """A key of one project sees that project alone; where the SDK knows them, projects are filtered and searched."""
    seen: dict[str, Any] = {}
    service = tinker.ServiceClient(base_url=base_url, api_key=key)
    rest = service.create_rest_client()
    seen["before"] = len(rest.list_training_runs().result().training_runs)
    trainer = created(service, base_model)
    ended(begun(trainer))
    (run,) = rest.list_training_runs().result().training_runs
    if hasattr(rest, "assign_session_project"):
        session = run.training_run_id.partition(":")[0]
        rest.assign_session_project(session, project).result()
        seen["elsewhere"] = refused(lambda: rest.assign_session_project(session, "nowhere").result())
        seen["filtered"] = len(rest.list_training_runs(project_id=project).result().training_runs)
        seen["unknown"] = refused(lambda: rest.list_training_runs(project_id="nowhere").result())
    if hasattr(rest, "search_sessions"):
        found = rest.search_sessions(types.SessionSearchRequest(project_ids=[project])).result()
        seen["searched"] = [one.status.type for one in found.sessions]
    return seen


def main(base_url: str, base_model: str, keys: list[str], project: str, *, suspends: bool) -> dict[str, Any]:
    """Everything once."""
    member, viewer, of_project = keys
    service = tinker.ServiceClient(base_url=base_url, api_key=member)
    seen = suspensions(service, base_model, suspends=suspends)
    seen["viewer"] = viewing(base_url, viewer, base_model)
    seen["project"] = in_project(base_url, of_project, base_model, project)
    return seen


if __name__ == "__main__":
    from sdk_end import end

    url, base, *given, of, mode = sys.argv[1:]
    end(main(url, base, given, of, suspends=mode == "suspended"))
