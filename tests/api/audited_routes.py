"""Routes that change something, each with its entry in the audit log, or with the reason for which it has none."""

from collections.abc import Mapping

from tenants.audit_actions import Action

_RUN = "/api/v1/training_runs/*"

AUDITED: Mapping[str, Action] = {
    "PUT /api/v1/sessions/*/project": Action.SESSION_MOVE,
    "POST /api/v1/sessions/*/finish": Action.SESSION_END,
    "POST /api/v1/create_model": Action.RUN_CREATE,
    "POST /api/v1/create_sampling_session": Action.SAMPLER_CREATE,
    "POST /api/v1/samplers/*/staleness": Action.SAMPLER_SET,
    "PUT /api/weft/v1/runs/*/weight": Action.RUN_WEIGH,
    f"PUT {_RUN}/checkpoints/*/*/ttl": Action.CHECKPOINT_SET,
    f"DELETE {_RUN}/checkpoints/*/*": Action.CHECKPOINT_DELETE,
    "POST /api/weft/v1/checkpoints/delete": Action.CHECKPOINT_DELETE,
    f"GET {_RUN}/checkpoints/*/*/archive": Action.CHECKPOINT_READ,
    f"GET {_RUN}/checkpoints/*/*/external_weights_urls": Action.CHECKPOINT_READ,
    f"POST {_RUN}/checkpoints/*/*/publish": Action.CHECKPOINT_PUBLISH,
    f"DELETE {_RUN}/checkpoints/*/*/publish": Action.CHECKPOINT_UNPUBLISH,
    "POST /api/v1/copy_weights": Action.CHECKPOINT_CREATE,
    "POST /api/v1/adapters/*/pause": Action.GATE_PAUSE,
    "POST /api/v1/adapters/*/resume": Action.GATE_RESUME,
    "POST /api/v1/adapters/*/reload": Action.RUN_RELOAD,
    "POST /api/weft/v1/merges": Action.JOB_CREATE,
    "POST /api/weft/v1/imports": Action.JOB_CREATE,
    "DELETE /api/weft/v1/jobs/*": Action.JOB_CANCEL,
    "POST /api/weft/v1/projects": Action.PROJECT_CREATE,
    "PUT /api/weft/v1/projects/*/limits": Action.PROJECT_SET,
    "POST /api/weft/v1/keys": Action.KEY_CREATE,
    "POST /api/weft/v1/keys/*/rotate": Action.KEY_ROTATE,
    "DELETE /api/weft/v1/keys/*": Action.KEY_REVOKE,
    "PUT /api/weft/v1/keys/*/limits": Action.KEY_SET,
    "PUT /api/weft/v1/webhooks/*": Action.WEBHOOK_SET,
    "DELETE /api/weft/v1/webhooks/*": Action.WEBHOOK_DELETE,
    "GET /api/weft/v1/webhooks/*/secret": Action.WEBHOOK_READ,
    "POST /api/weft/v1/webhooks/*/secret": Action.WEBHOOK_ROTATE,
    "POST /api/weft/v1/webhooks/*/test": Action.WEBHOOK_TEST,
    "POST /api/weft/v1/webhooks/*/events/*/retry": Action.WEBHOOK_RETRY,
    "DELETE /api/v1/auth/apikey/me": Action.KEY_REVOKE,
}
"""Entry of each route, by its method and its path with ``*`` for ids."""

_LANE = "an operation of a run's lane: the ledger's row tells it, and the trainer's entry what it made or unloaded"
_SAMPLE = "a sample: the ledger's row tells it"
_READS = "it changes nothing"

UNAUDITED: Mapping[str, str] = {
    "POST /api/v1/create_session": "a client that begins; its session ends by itself",
    "POST /api/v1/session_heartbeat": "a client that is alive",
    "POST /api/v1/auth/token": "a token of an hour; what is done with it has the door `token`",
    "POST /api/v1/telemetry": _READS,
    "POST /api/v1/client/config": _READS,
    "POST /api/v1/client/dynamic_config": _READS,
    "POST /api/v1/sessions/search": _READS,
    "POST /api/v1/get_info": _READS,
    "POST /api/v1/weights_info": _READS,
    "POST /api/v1/create_custom_loss": "nothing is stored: the id is the loss",
    "POST /api/v1/retrieve_future": "a poll",
    "POST /api/v1/retrieve_futures": "a poll",
    "POST /api/v1/join_sampling_session": "a copy of a sampler's client gets a number",
    "POST /api/v1/asample": _SAMPLE,
    "POST /api/v1/stream_sample": _SAMPLE,
    "POST /api/v1/cancel_future": _SAMPLE,
    "POST /v1/completions": _SAMPLE,
    "POST /v1/chat/completions": _SAMPLE,
    "POST /api/v1/load_weights": _LANE,
    "POST /api/v1/forward": _LANE,
    "POST /api/v1/forward_backward": _LANE,
    "POST /api/v1/optim_step": _LANE,
    "POST /api/v1/save_weights": _LANE,
    "POST /api/v1/save_weights_for_sampler": _LANE,
    "POST /api/v1/save_weights_external": _LANE,
    "POST /api/v1/unload_model": _LANE,
    "POST /api/weft/v1/runs/*/points": "a user's own data, sent at each step",
}
"""Reason of each route without an entry."""
