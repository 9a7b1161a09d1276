"""The table of attacks. ``FAULTS`` rows in parentheses: A1 to A13 and B2 of the list of what weft must hold against."""

from collections.abc import Awaitable, Callable

from bench.hostile import bodies, connections, floods, lists, webhooks, weights
from bench.hostile.foothold import Foothold

Attack = Callable[[Foothold], Awaitable[None]]
"""Attacks until cancelled."""

ATTACKS: dict[str, Attack] = {
    "shape-dimensions": bodies.shape_dimensions,
    "json-bombs": bodies.json_bombs,
    "long-numbers": bodies.long_numbers,
    "record-counts": bodies.record_counts,
    "expanding-bodies": bodies.expanding_bodies,
    "long-texts": bodies.long_texts,
    "pending-training": floods.pending_training,
    "gaps": floods.gaps,
    "sessions-and-runs": floods.sessions_and_runs,
    "gates-and-saves": floods.gates_and_saves,
    "huge-samples": floods.huge_samples,
    "sample-flood": floods.sample_flood,
    "long-prompts": floods.long_prompts,
    "held-polls": floods.held_polls,
    "paused-samples": floods.paused_samples,
    "searches-and-lists": lists.searches_and_lists,
    "own-metrics": lists.own_metrics,
    "reloads": weights.reloads,
    "copies-and-downloads": weights.copies_and_downloads,
    "jobs": weights.jobs,
    "slow-webhooks": webhooks.slow_webhooks,
    "slow-strangers": connections.slow_strangers,
    "large-heads": connections.large_heads,
    "slow-bodies": connections.slow_bodies,
    "unread-answers": connections.unread_answers,
    "odd-headers": connections.odd_headers,
    "wrong-keys": connections.wrong_keys,
}
