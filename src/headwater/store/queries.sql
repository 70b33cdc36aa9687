-- The store's statements. Each is one statement, hence atomic, and may be sent again when it is unknown whether it ran.
--
-- Those that write begin with `WITH :run` and write only where `:ours` holds: the run that sends them is the one on record, or
-- it is a command, which has no token. The row of the run is share-locked by the statement, so a run that takes over waits
-- for it to end, and one that was sent later finds the new token. A statement that is refused touches no row.

-- name: begin_run
INSERT INTO headwater.runs AS r (pipeline_id, token) VALUES (%(pipeline)s, %(token)s)
ON CONFLICT (pipeline_id) DO UPDATE SET token = excluded.token, started_at = now()
WHERE r.token <> excluded.token

-- name: run_is_ours
SELECT true FROM headwater.runs WHERE pipeline_id = %(pipeline)s AND token = %(token)s

-- name: load_states
SELECT table_id, state FROM headwater.table_states WHERE pipeline_id = %(pipeline)s

-- name: update_states
-- A state that is already there is not written again: sent twice, it must not push itself into the history. Nor is one
-- written over an Init that this run has not seen: a user asked for a new copy, and must not be overruled before we noticed.
WITH :run
INSERT INTO headwater.table_states AS t (pipeline_id, table_id, state)
SELECT %(pipeline)s, u.table_id, u.state
FROM unnest(%(tables)s::bigint[], %(states)s::jsonb[]) AS u(table_id, state)
WHERE :ours
ON CONFLICT (pipeline_id, table_id) DO UPDATE
SET state = excluded.state,
    history = jsonb_path_query_array(jsonb_build_array(t.state) || t.history, '$[0 to 15]'),
    updated_at = now()
WHERE t.state IS DISTINCT FROM excluded.state
  AND (t.state ->> 'phase' <> 'init' OR t.table_id <> ALL (%(past_init)s::bigint[]))

-- name: current_state
SELECT state, history -> 0 FROM headwater.table_states WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s

-- name: rollback_state
-- Only from the state it was decided for: sent twice, it must not go back two steps.
WITH :run
UPDATE headwater.table_states
SET state = history -> 0, history = history - 0, updated_at = now()
WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND state = %(expected)s::jsonb AND history -> 0 IS NOT NULL
  AND :ours

-- name: get_progress
SELECT flush_lsn::text FROM headwater.replication_progress WHERE pipeline_id = %(pipeline)s AND worker = %(worker)s

-- name: upsert_progress
WITH :run
INSERT INTO headwater.replication_progress AS p (pipeline_id, worker, flush_lsn)
SELECT %(pipeline)s, %(worker)s, %(flush)s::pg_lsn WHERE :ours
ON CONFLICT (pipeline_id, worker) DO UPDATE
SET flush_lsn = greatest(p.flush_lsn, excluded.flush_lsn), updated_at = now()
RETURNING flush_lsn::text

-- name: delete_progress
WITH :run
DELETE FROM headwater.replication_progress WHERE pipeline_id = %(pipeline)s AND worker = %(worker)s AND :ours

-- name: get_lineage
SELECT system_identifier, timeline FROM headwater.lineages WHERE pipeline_id = %(pipeline)s

-- name: record_lineage
WITH :run
INSERT INTO headwater.lineages AS l (pipeline_id, system_identifier, timeline)
SELECT %(pipeline)s, %(system)s, %(timeline)s WHERE :ours
ON CONFLICT (pipeline_id) DO UPDATE SET system_identifier = excluded.system_identifier, timeline = excluded.timeline
WHERE (l.system_identifier, l.timeline) IS DISTINCT FROM (excluded.system_identifier, excluded.timeline)

-- name: load_fingerprints
SELECT table_id, fingerprint FROM headwater.table_fingerprints WHERE pipeline_id = %(pipeline)s

-- name: store_fingerprints
WITH :run
INSERT INTO headwater.table_fingerprints AS f (pipeline_id, table_id, fingerprint)
SELECT %(pipeline)s, u.table_id, u.fingerprint
FROM unnest(%(tables)s::bigint[], %(fingerprints)s::text[]) AS u(table_id, fingerprint)
WHERE :ours
ON CONFLICT (pipeline_id, table_id) DO UPDATE SET fingerprint = excluded.fingerprint
WHERE f.fingerprint <> excluded.fingerprint

-- name: load_metadata
SELECT table_id, metadata FROM headwater.destination_tables WHERE pipeline_id = %(pipeline)s

-- name: store_metadata
WITH :run
INSERT INTO headwater.destination_tables AS d (pipeline_id, table_id, metadata)
SELECT %(pipeline)s, u.table_id, u.metadata
FROM unnest(%(tables)s::bigint[], %(metadata)s::jsonb[]) AS u(table_id, metadata)
WHERE :ours
ON CONFLICT (pipeline_id, table_id) DO UPDATE SET metadata = excluded.metadata
WHERE d.metadata IS DISTINCT FROM excluded.metadata

-- name: load_schemas
SELECT table_schema FROM headwater.table_schemas WHERE pipeline_id = %(pipeline)s

-- name: get_schema
SELECT table_schema FROM headwater.table_schemas
WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND snapshot_id <= %(snapshot)s::pg_lsn
ORDER BY snapshot_id DESC LIMIT 1

-- name: store_schema
WITH :run
INSERT INTO headwater.table_schemas AS s (pipeline_id, table_id, snapshot_id, table_schema)
SELECT %(pipeline)s, %(table)s, %(snapshot)s::pg_lsn, %(schema)s::jsonb WHERE :ours
ON CONFLICT (pipeline_id, table_id, snapshot_id) DO UPDATE SET table_schema = excluded.table_schema
WHERE s.table_schema IS DISTINCT FROM excluded.table_schema

-- name: prune_schemas
-- Where nothing lies at or before the boundary, the inner max is NULL and nothing is removed.
WITH :run
DELETE FROM headwater.table_schemas s
USING unnest(%(tables)s::bigint[], %(boundaries)s::pg_lsn[]) AS b(table_id, boundary)
WHERE :ours AND s.pipeline_id = %(pipeline)s AND s.table_id = b.table_id
  AND s.snapshot_id < (
    SELECT max(k.snapshot_id) FROM headwater.table_schemas k
    WHERE k.pipeline_id = s.pipeline_id AND k.table_id = s.table_id AND k.snapshot_id <= b.boundary)

-- name: prepare_for_copy
WITH :run,
metadata AS (
    DELETE FROM headwater.destination_tables WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND :ours RETURNING 1),
schemas AS (
    DELETE FROM headwater.table_schemas WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND :ours RETURNING 1),
progress AS (
    DELETE FROM headwater.replication_progress WHERE pipeline_id = %(pipeline)s AND worker = %(worker)s AND :ours RETURNING 1)
SELECT (EXISTS (TABLE metadata) OR EXISTS (TABLE schemas) OR EXISTS (TABLE progress))::int

-- name: reset_for_resync
-- No history is kept: a rollback must not lead back to a state that relied on the progress deleted here.
WITH :run,
progress AS (
    DELETE FROM headwater.replication_progress WHERE pipeline_id = %(pipeline)s AND worker = 'apply' AND :ours),
lineage AS (
    DELETE FROM headwater.lineages WHERE pipeline_id = %(pipeline)s AND :ours),
states AS (
    UPDATE headwater.table_states
    SET state = %(init)s::jsonb || jsonb_build_object('copied', coalesce(state -> 'copied', 'false')),
        history = '[]', updated_at = now()
    WHERE pipeline_id = %(pipeline)s AND (state - 'copied' <> %(init)s::jsonb - 'copied' OR history <> '[]') AND :ours)
SELECT count(*) FROM headwater.table_states WHERE pipeline_id = %(pipeline)s AND :ours

-- name: delete_table
WITH :run,
metadata AS (
    DELETE FROM headwater.destination_tables WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND :ours RETURNING 1),
schemas AS (
    DELETE FROM headwater.table_schemas WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND :ours RETURNING 1),
progress AS (
    DELETE FROM headwater.replication_progress WHERE pipeline_id = %(pipeline)s AND worker = %(worker)s AND :ours RETURNING 1),
fingerprints AS (
    DELETE FROM headwater.table_fingerprints WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND :ours),
states AS (
    DELETE FROM headwater.table_states WHERE pipeline_id = %(pipeline)s AND table_id = %(table)s AND :ours RETURNING 1)
SELECT (EXISTS (TABLE metadata) OR EXISTS (TABLE schemas) OR EXISTS (TABLE progress) OR EXISTS (TABLE states))::int
