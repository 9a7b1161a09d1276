"""Every public method of the SDK's clients, called once, and once more where it has an ``_async`` twin; run as a script.

    python sdk_methods.py BASE_URL ADMIN_KEY BASE_MODEL PROJECT

Prints one JSON object: the names of all public methods, and for each that was called an empty text, or its error.
"""

import asyncio
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Awaitable
from datetime import UTC, date, datetime, timedelta
from itertools import count
from typing import Any

SEEN: dict[str, str] = {}
"""Outcome by method."""
NUMBERS = count()
TOKENS = [84, 104, 101, 32, 109]
NOT_CALLED = {
    "ServiceClient.holder",  # an attribute
    "SamplingClient.create",  # made for ServiceClient, of its internal holder
    "SamplingClient.on_queue_state_change",  # called by the SDK itself
}


def fresh() -> str:
    """A name that nothing has yet."""
    return f"n{next(NUMBERS)}"


async def awaited(made: Any) -> Any:
    """The result of an async method: some return a future."""
    while isinstance(made, Awaitable):
        made = await made
    return made


def call(client: Any, method: str, *given: Any, **named: Any) -> Any:
    """Call a method and its twin; return the first one's result. A callable argument is called for its value each time."""
    result = None
    for name in (method, f"{method}_async"):
        if not hasattr(client, name):
            continue
        args = [one() if callable(one) and one in (fresh,) else one for one in given]
        try:
            if name == method:
                made = getattr(client, name)(*args, **named)
                result = made.result() if hasattr(made, "result") else made
            else:
                asyncio.run(awaited(getattr(client, name)(*args, **named)))
            SEEN[f"{type(client).__name__}.{name}"] = ""
        except Exception as error:  # noqa: BLE001 - told to the test
            SEEN[f"{type(client).__name__}.{name}"] = f"{type(error).__name__}: {error}"
    return result


def public_methods(*clients: type) -> list[str]:
    """Names of all public methods."""
    found = {f"{one.__name__}.{name}" for one in clients for name, _ in inspect.getmembers(one) if name[0] != "_"}
    return sorted(found - NOT_CALLED)


def training(service: Any, base_model: str) -> tuple[Any, str, str, str]:
    """Train and save; return the client, and paths of a training, a sampler and an external checkpoint."""
    from tinker import types

    inputs: Any = {"target_tokens": TOKENS, "weights": [1.0] * len(TOKENS)}
    data = [types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)]
    trainer = call(service, "create_lora_training_client", base_model, 4)
    call(trainer, "forward", data, "cross_entropy")
    call(trainer, "forward_backward", data, "cross_entropy")
    call(trainer, "optim_step", types.AdamParams())
    handle = call(service, "create_custom_loss", lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1})
    bare = [types.Datum(model_input=data[0].model_input, loss_fn_inputs={"target_tokens": inputs["target_tokens"]})]
    call(trainer, "forward_backward_custom", bare, handle)
    for method in ("get_info", "get_tokenizer", "get_telemetry", "get_console_url"):
        call(trainer, method)
    state = call(trainer, "save_state", fresh).path
    call(trainer, "load_state", state)
    call(trainer, "load_state_with_optimizer", state)
    external = call(trainer, "save_weights_external", fresh).path
    return trainer, state, call(trainer, "save_weights_for_sampler", fresh).path, external


def sampling(service: Any, trainer: Any, path: str) -> None:
    """Sample and score."""
    from tinker import types

    call(service, "create_sampling_client", path)
    call(trainer, "create_sampling_client", path)
    sampler = call(trainer, "save_weights_and_get_sampling_client")
    prompt = types.ModelInput.from_ints(TOKENS)
    call(sampler, "sample", prompt, 1, types.SamplingParams(max_tokens=2))
    call(sampler, "compute_logprobs", prompt)
    for method in ("get_base_model", "get_tokenizer", "get_telemetry"):
        call(sampler, method)
    call(sampler, "from_sampler_handle", call(sampler, "get_sampler_handle"))


def reading(rest: Any, trainer: Any, paths: tuple[str, str, str], project: str) -> None:
    """Ask for, change and delete what there is."""
    from tinker import types

    state, sampler, external = paths
    run, session = trainer.model_id, trainer.model_id.partition(":")[0]
    for method in ("whoami", "get_telemetry", "get_server_capabilities", "list_sessions", "list_training_runs"):
        call(rest, method)
    call(rest, "list_user_checkpoints")
    call(rest, "search_sessions", types.SessionSearchRequest())
    call(rest, "assign_session_project", session, project)
    call(rest, "copy_weights", state, project)
    for method in ("export_session_trace", "get_session"):
        call(rest, method, session)
    for method in ("get_training_run", "list_checkpoints"):
        call(rest, method, run)
    call(rest, "get_sampler", f"{session}:sample:0")
    for method in (
        "get_training_run_by_tinker_path",
        "get_weights_info_by_tinker_path",
        "publish_checkpoint_from_tinker_path",
        "unpublish_checkpoint_from_tinker_path",
    ):
        call(rest, method, state)
    call(rest, "get_external_weights_urls", external)
    call(rest, "set_checkpoint_ttl_from_tinker_path", state, 3600)
    call(rest, "delete_checkpoint", run, state.partition(f"{run}/")[2])
    call(rest, "delete_checkpoint_from_tinker_path", sampler)


def billing(client: Any, project: str) -> None:
    """Ask for the audit log, usage and storage."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    call(client, "get_audit_log", "all", date.today())
    call(client, "get_billing_usage", hour - timedelta(hours=1), hour + timedelta(hours=2))
    given = (project,) if hasattr(client, "whoami") else ()
    call(client, "get_current_checkpoint_storage_usage", *given)


def main(base_url: str, key: str, base_model: str, project: str) -> dict[str, object]:
    """Call everything."""
    os.environ |= {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "TINKER_PROJECT_ID": project}
    os.environ |= {"HF_ENDPOINT": base_url, "HF_TOKEN": key, "HF_HOME": tempfile.mkdtemp()}
    import tinker

    service = tinker.ServiceClient()
    trainer, *paths = training(service, base_model)
    state, sampler, external = paths
    sampling(service, trainer, sampler)
    for method in ("get_console_url", "get_telemetry", "get_server_capabilities"):
        call(service, method)
    call(service, "copy_weights", state)
    for method in ("create_training_client_from_state", "create_training_client_from_state_with_optimizer"):
        call(service, method, state)
    rest, admin = call(service, "create_rest_client"), tinker.AdminClient()
    for client in (rest, admin):
        billing(client, project)
    call(admin, "get_telemetry")
    reading(rest, trainer, (state, sampler, external), project)
    call(service, "close", "success")
    clients = (
        tinker.ServiceClient,
        tinker.TrainingClient,
        tinker.SamplingClient,
        tinker.RestClient,
        tinker.AdminClient,
    )
    return {"public": public_methods(*clients), "called": SEEN}


if __name__ == "__main__":
    from sdk_end import end

    warnings.simplefilter("ignore")
    end(main(*sys.argv[1:5]))
