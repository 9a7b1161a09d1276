"""Rows of many years: what clients made and left behind, in every table that grows."""

from time import perf_counter

import psycopg
from sqlalchemy import make_url

from bench.ledger.benchmark import server_url

_FILL = """
INSERT INTO sessions (id, tenant_id, tags, sdk_version, created_at, last_seen_at, ended_at, end_reason)
SELECT md5('s' || i), lpad(to_hex(i % {tenants}), 32, '0'), '[]', '0.38.0', at, at, CASE WHEN i % 1000 > 0 THEN at END,
  'timed_out'
FROM (SELECT i, now() - interval '120 days' * (1 - i / {rows}.0) - interval '2 hours' AS at
  FROM generate_series(1, {rows}) i) made;

INSERT INTO runs (id, tenant_id, session_id, model_seq_id, base_model, rank, alpha, seed, train_attn, train_mlp, train_unembed,
  state, next_seq_id, snapshot_seq_id, snapshot_dir, created_at, last_request_at)
SELECT id || ':train:0', tenant_id, id, 0, 'old', 8, 32, 1, true, true, true,
  CASE WHEN ended_at IS NULL OR n % 50 = 0 THEN 'ready' ELSE 'unloaded' END, 1, 0,
  CASE WHEN n % 20 = 0 THEN 'snapshots/' || id END, created_at, last_seen_at
FROM (SELECT *, row_number() OVER (ORDER BY created_at) AS n FROM sessions WHERE end_reason = 'timed_out') made WHERE n % 10 = 0;

INSERT INTO adapter_gates (run_id, tenant_id, base_model, generation, since)
SELECT id, tenant_id, base_model, 1, created_at FROM runs WHERE base_model = 'old';

INSERT INTO run_events (run_id, tenant_id, kind, trainer, lease_token, at)
SELECT id, tenant_id, CASE n % 4 WHEN 0 THEN 'released' WHEN 1 THEN 'claimed' WHEN 2 THEN 'restored' ELSE 'lost' END, 'a trainer',
  n / 4, created_at + interval '1 minute' * n
FROM runs, generate_series(1, 10) n WHERE base_model = 'old';

INSERT INTO checkpoints (id, tenant_id, run_id, segment, name, directory, size_bytes, listed, public, created_at, expires_at)
SELECT md5('c' || i), tenant_id, run, 'sampler_weights', 'v' || i, 'checkpoints/' || md5('c' || i), 1, n % 4 = 0, false,
  created_at + interval '1 minute', CASE WHEN n % 8 = 0 THEN now() - interval '1 hour' END
FROM (SELECT i, n, runs.id AS run, runs.tenant_id, runs.created_at FROM generate_series(1, {rows}) i
  JOIN (SELECT *, row_number() OVER (ORDER BY created_at) AS n FROM runs WHERE base_model = 'old') runs
  ON runs.n = 1 + i * (SELECT count(*) FROM runs WHERE base_model = 'old') / ({rows} + 1)) made;

INSERT INTO samplers (id, tenant_id, session_id, sampling_session_seq_id, base_model, checkpoint_id, created_at)
SELECT sessions.id || ':sample:0', sessions.tenant_id, sessions.id, 0, 'old', md5('c' || n), sessions.created_at
FROM (SELECT *, row_number() OVER (ORDER BY created_at) AS n FROM sessions WHERE end_reason = 'timed_out') sessions;

INSERT INTO samplers (id, tenant_id, session_id, sampling_session_seq_id, base_model, created_at)
SELECT id || ':sample:0', tenant_id, id, 0, '{base_model}', created_at FROM sessions WHERE end_reason IS NULL;

INSERT INTO samplers (id, tenant_id, session_id, sampling_session_seq_id, base_model, checkpoint_id, live_run_id, created_at)
SELECT id || ':sample:1', tenant_id, id, 1, '{base_model}', md5('c1'), id || ':train:0', created_at
FROM sessions WHERE end_reason IS NULL;

INSERT INTO api_keys (tenant_id, prefix, secret_hash, note, created_at, revoked_at)
SELECT lpad(to_hex(i % {tenants}), 32, '0'), 'tml-' || lpad(to_hex(i), 12, '0'), 'x', '', at, at
FROM (SELECT i, now() - interval '120 days' * (1 - i / ({rows} / 100.0)) - interval '2 hours' AS at
  FROM generate_series(1, {rows} / 100) i) made;

INSERT INTO usage_days (tenant_id, day, base_model, kind, operations, tokens)
SELECT lpad(to_hex(tenant), 32, '0'), to_char(now() - interval '1 day' * back, 'YYYY-MM-DD'), 'old', kind, 1, 1
FROM generate_series(0, {tenants} - 1) tenant, generate_series(1, 5 + {rows} / 1000) back,
  unnest(ARRAY['forward_backward', 'optim_step', 'sample']) kind;

UPDATE operations SET created_at = created_at - interval '3 days', finished_at = finished_at - interval '3 days',
  pruned_at = pruned_at - interval '3 days' WHERE pruned_at IS NOT NULL;

UPDATE operations SET state = 'failed', error_code = 'invalid_request', error_category = 'user', error_message = 'too large'
WHERE position IN (SELECT position FROM operations
  WHERE tenant_id = lpad(to_hex(1), 32, '0') AND state = 'done' AND pruned_at IS NULL ORDER BY position DESC LIMIT 60);

UPDATE runs SET payloads_dropped_to = CASE state WHEN 'unloaded' THEN next_seq_id - 1 ELSE greatest(0, snapshot_seq_id - 40) END
WHERE base_model = '{base_model}';
"""
"""Rows of each table. A call has the same work at every size: a page of tenant1's failed operations, forty payloads of a run."""


def fill(url: str, rows: int, *, tenants: int, base_model: str) -> None:
    """Add ``rows`` sessions, samplers and checkpoints, and their like, to a database that ``filled_database`` made."""
    started = perf_counter()
    with psycopg.connect(server_url(make_url(url)), autocommit=True) as connection:
        for statement in _FILL.format(rows=rows, tenants=tenants, base_model=base_model).split(";"):
            if statement.strip():
                connection.execute(statement.encode())
        connection.execute("VACUUM ANALYZE")
    print(f"{rows:,} rows of each table written in {perf_counter() - started:.0f} s", flush=True)
