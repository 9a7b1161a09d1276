"""Requests to every route, with the scopes of which one is enough, for the matrix of rights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenants.rights import Scope

ANY: frozenset[Scope] = frozenset()
"""Any live key is enough."""


@dataclass(frozen=True)
class Call:
    """One request. ``{run}``, ``{session}`` and the like stand for ids of an owner's rows.

    - ``needs``: scopes of which one is enough.
    - ``names``: whether the request names a row, so that another owner's is 404.
    - ``body``: JSON object, None for none.
    - ``status``: answer to whoever may send it.
    """

    method: str
    path: str
    needs: frozenset[Scope]
    body: Mapping[str, Any] | None = None
    names: bool = True
    status: int = 200

    @property
    def is_followed(self) -> bool:
        """True if the answer comes with the sample's end, so that it needs a sampler's work."""
        return "stream_sample" in self.path or self.path.endswith("completions")


def needs(*scopes: Scope) -> frozenset[Scope]:
    """Return the scopes as a set."""
    return frozenset(scopes)


READ = needs(Scope.READ)
SAMPLES = needs(Scope.SAMPLE)
TRAINS = needs(Scope.TRAIN)
WRITES = needs(Scope.CHECKPOINTS_WRITE)
MOVES = needs(Scope.TRAIN, Scope.PROJECTS)
GATES = needs(Scope.GATES)
WEBHOOKS = needs(Scope.WEBHOOKS)
_RUN = "/api/v1/training_runs/{run}"
_WINDOW = "starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"
_LORA = {"base_model": "test/tiny", "model_seq_id": 900, "lora_config": {"rank": 4}}
_PATH = "tinker://{run}/weights/one"
_SAMPLER = {"session_id": "{session}", "sampling_session_seq_id": 900, "base_model": "test/tiny"}
_LOAD = {"session_id": "{session}", "model_seq_id": 901, "path": _PATH, "optimizer": False}
_SAMPLE = {
    "sampling_session_id": "{sampler}",
    "seq_id": 900,
    "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "sampling_params": {"max_tokens": 1},
}

CALLS = (
    Call("POST", "/api/v1/session_heartbeat", ANY, {"session_id": "{session}"}),
    Call("POST", "/api/v1/retrieve_future", ANY, {"request_id": "{request}"}, status=408),
    Call("GET", "/api/weft/v1/requests/{request}/waiting", ANY),
    Call("POST", "/api/v1/retrieve_futures", ANY, {"target": {"sampling_session_id": "{sampler}"}, "timeout": 0}),
    Call("POST", "/api/v1/create_session", ANY, {}, names=False),
    Call("POST", "/api/v1/client/config", ANY, {}, names=False),
    Call("POST", "/api/v1/client/dynamic_config", ANY, {}, names=False),
    Call("POST", "/api/v1/telemetry", ANY, {}, names=False),
    Call("POST", "/api/v1/auth/token", ANY, names=False),
    Call("GET", "/api/v1/auth/apikey/me", ANY, names=False),
    Call("GET", "/api/v1/get_server_capabilities", ANY, names=False),
    Call("GET", "/api/v1/sessions/{session}", READ),
    Call("GET", "/api/v1/sessions", READ, names=False),
    Call("POST", "/api/v1/sessions/search", READ, {}, names=False),
    Call("GET", "/api/v1/sessions/{session}/trace_export", READ),
    Call("GET", "/api/v1/training_runs", READ, names=False),
    Call("GET", _RUN, READ),
    Call("GET", "/api/weft/v1/runs", READ, names=False),
    Call("GET", "/api/weft/v1/runs/{run}", READ),
    Call("GET", "/api/weft/v1/runs/{run}/marks", READ),
    Call("GET", "/api/weft/v1/runs/{run}/points", READ),
    Call("GET", "/api/weft/v1/runs/{run}/metrics?name=x", READ),
    Call("GET", "/api/weft/v1/runs/{run}/waiting", READ),
    Call("POST", "/api/weft/v1/runs/{run}/points", TRAINS, {"points": [{"step": 1, "metrics": {"x": 1.0}}]}),
    Call("PUT", "/api/weft/v1/runs/{run}/weight", TRAINS, {"weight": 3.0}),
    Call("GET", _RUN + "/checkpoints", READ),
    Call("GET", "/api/v1/checkpoints", READ, names=False),
    Call("POST", "/api/v1/get_info", needs(Scope.READ, Scope.TRAIN), {"model_id": "{run}"}),
    Call("POST", "/api/v1/weights_info", needs(Scope.READ, Scope.TRAIN), {"tinker_path": _PATH}),
    Call("GET", "/api/v1/samplers/{sampler}", needs(Scope.READ, Scope.SAMPLE)),
    Call("GET", "/api/v1/samplers/{sampler}/staleness", needs(Scope.READ, Scope.SAMPLE)),
    Call("GET", "/v1/models", needs(Scope.READ, Scope.SAMPLE), names=False),
    Call("GET", "/v1/models/{run}", needs(Scope.READ, Scope.SAMPLE)),
    Call("GET", "/api/v1/adapters/{run}", needs(Scope.READ, Scope.GATES)),
    Call("GET", "/api/weft/v1/usage?since=2026-01-01T00:00:00Z", needs(Scope.READ, Scope.USAGE), names=False),
    Call("GET", "/api/weft/v1/usage/export?since=2026-01-01T00:00:00Z", needs(Scope.USAGE), names=False),
    Call("GET", "/api/v1/billing/usage/events?" + _WINDOW, needs(Scope.USAGE), names=False),
    Call("GET", "/api/v1/billing/usage/checkpoints/current", needs(Scope.USAGE), names=False),
    Call("GET", "/api/weft/v1/usage/standing", needs(Scope.READ, Scope.USAGE), names=False),
    Call("GET", "/api/v1/audit", needs(Scope.AUDIT), names=False),
    Call("GET", "/api/weft/v1/audit", needs(Scope.AUDIT), names=False),
    Call("GET", "/api/weft/v1/jobs", needs(Scope.READ, Scope.CHECKPOINTS_WRITE), names=False),
    Call("GET", "/api/weft/v1/adapters", needs(Scope.READ, Scope.GATES), names=False),
    Call("GET", "/api/weft/v1/checkpoints", READ, names=False),
    Call("GET", "/api/weft/v1/operations", READ, names=False),
    Call("GET", "/api/weft/v1/samples", needs(Scope.READ, Scope.SAMPLE), names=False),
    Call("GET", "/api/weft/v1/client-exceptions", READ, names=False),
    Call("GET", "/api/weft/v1/client-exceptions?session_id={session}", READ),
    Call("GET", "/api/weft/v1/client-exceptions?run_id={run}", READ),
    Call("GET", "/api/weft/v1/projects", needs(Scope.READ, Scope.PROJECTS), names=False),
    Call("POST", "/api/v1/create_sampling_session", SAMPLES, _SAMPLER),
    Call("POST", "/api/v1/join_sampling_session", SAMPLES, {"sampling_session_id": "{sampler}"}),
    Call("POST", "/api/v1/asample", SAMPLES, _SAMPLE),
    Call("POST", "/api/v1/create_model", TRAINS, {"session_id": "{session}", **_LORA}),
    Call(
        "POST", "/api/v1/load_weights", TRAINS, {"model_id": "{run}", "seq_id": 40, "path": _PATH, "optimizer": False}
    ),
    Call("POST", "/api/v1/load_weights", TRAINS, _LOAD),
    Call("POST", "/api/v1/forward", TRAINS, {"model_id": "{run}", "seq_id": 41}),
    Call("POST", "/api/v1/forward_backward", TRAINS, {"model_id": "{run}", "seq_id": 42}),
    Call("POST", "/api/v1/optim_step", TRAINS, {"model_id": "{run}", "seq_id": 43}),
    Call("POST", "/api/v1/save_weights", TRAINS, {"model_id": "{run}", "seq_id": 44, "path": "x"}),
    Call("POST", "/api/v1/save_weights_for_sampler", TRAINS, {"model_id": "{run}", "seq_id": 45, "path": "x"}),
    Call("POST", "/api/v1/save_weights_external", TRAINS, {"model_id": "{run}", "seq_id": 46, "path": "x"}),
    Call(
        "POST",
        "/api/v1/create_custom_loss",
        TRAINS,
        {"session_id": "{session}", "name": "x", "inputs": [], "graph": {}},
        status=400,
    ),
    Call(
        "PUT",
        "/api/v1/sessions/{session}/project",
        needs(Scope.TRAIN, Scope.PROJECTS),
        {"project_id": "{project}"},
        status=204,
    ),
    Call("PUT", _RUN + "/checkpoints/weights/one/ttl", WRITES, {"ttl_seconds": None}, status=204),
    Call("POST", _RUN + "/checkpoints/weights/one/publish", WRITES, status=204),
    Call("DELETE", _RUN + "/checkpoints/weights/one/publish", WRITES, status=204),
    Call("POST", "/api/v1/copy_weights", WRITES, {"source_path": _PATH}),
    Call("POST", "/api/weft/v1/merges", WRITES, {"path": _PATH, "name": "merged"}, status=202),
    Call("GET", _RUN + "/checkpoints/weights/one/archive", needs(Scope.CHECKPOINTS_DOWNLOAD), status=302),
    Call("GET", _RUN + "/checkpoints/weights/one/external_weights_urls", needs(Scope.CHECKPOINTS_DOWNLOAD)),
    Call("POST", "/api/v1/adapters/{run}/pause", GATES, {"timeout_seconds": 0, "ttl_seconds": 60}),
    Call("POST", "/api/v1/adapters/{run}/resume", GATES, {}),
    Call("POST", "/api/v1/adapters/{run}/reload", GATES, {}),
    Call("POST", "/api/v1/samplers/{sampler}/staleness", GATES, {"max_version_lag": None}, status=400),
    Call("POST", "/api/weft/v1/projects", needs(Scope.PROJECTS), {"name": "another"}, names=False),
    Call("GET", "/api/weft/v1/keys", needs(Scope.KEYS), names=False),
    Call("POST", "/api/weft/v1/keys", needs(Scope.KEYS), {"role": "viewer"}, names=False, status=201),
    Call("PUT", "/api/weft/v1/webhooks/bell", WEBHOOKS, {"url": "https://bell.example/"}, names=False),
    Call("GET", "/api/weft/v1/webhooks", WEBHOOKS, names=False),
    Call("GET", "/api/weft/v1/webhooks/bell/secret", WEBHOOKS, names=False),
    Call("POST", "/api/weft/v1/webhooks/bell/secret", WEBHOOKS, names=False),
    Call("POST", "/api/weft/v1/webhooks/bell/test", WEBHOOKS, names=False),
    Call("GET", "/api/weft/v1/webhooks/bell/events", WEBHOOKS, names=False),
    Call("DELETE", "/api/weft/v1/webhooks/bell", WEBHOOKS, names=False, status=204),
    Call("POST", "/v1/completions", SAMPLES, {"model": "{run}", "prompt": [1]}),
    Call("POST", "/v1/chat/completions", SAMPLES, {"model": "{run}", "messages": [{"role": "user", "content": "x"}]}),
    Call("POST", "/api/v1/stream_sample", SAMPLES, _SAMPLE),
    Call(
        "POST",
        "/api/weft/v1/checkpoints/delete",
        WRITES,
        {"paths": ["tinker://{run}/sampler_weights/two"]},
        names=False,
    ),
    Call("POST", "/api/v1/cancel_future", SAMPLES, {"request_id": "{request}"}, status=400),
    Call("POST", "/api/v1/unload_model", TRAINS, {"model_id": "{run}"}),
    Call("POST", "/api/v1/sessions/{session}/finish", ANY, {}, status=204),
    Call("DELETE", _RUN + "/checkpoints/weights/one", WRITES, status=204),
)
"""Requests that a fresh key can send one after the other."""

ELSEWHERE = frozenset(
    {
        "/api/weft/v1/keys/{key_id}/rotate",
        "/api/weft/v1/keys/{key_id}",
        "/api/weft/v1/keys/{key_id}/limits",
        "/api/v1/auth/apikey/me",
        "/api/v1/samples/{request_id}",
        "/api/weft/v1/jobs/{job_id}",
        "/api/weft/v1/imports",
        "/api/weft/v1/imports/received",
        "/api/weft/v1/projects/{project}/limits",
        "/api/weft/v1/webhooks/{name}/events/{event_id}/retry",
    }
)
"""Paths whose rights other tests look at, since a matrix of equal requests would end its own keys or needs whole files."""


def filled(value: Any, ids: Mapping[str, str]) -> Any:
    """Return ``value`` with the ids in place of their names."""
    if isinstance(value, str):
        for name, id in ids.items():
            value = value.replace(f"{{{name}}}", id)
        return value
    if isinstance(value, Mapping):
        return {key: filled(one, ids) for key, one in value.items()}
    return [filled(one, ids) for one in value] if isinstance(value, list) else value
