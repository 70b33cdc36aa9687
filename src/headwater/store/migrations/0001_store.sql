-- Rows that are rewritten often leave room on their page, so that an update touches neither index nor another page.

CREATE TABLE headwater.table_states (
    pipeline_id bigint NOT NULL,
    table_id bigint NOT NULL,
    state jsonb NOT NULL,
    -- Earlier states, newest first, as far as a rollback may want them.
    history jsonb NOT NULL DEFAULT '[]',
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (pipeline_id, table_id)
) WITH (fillfactor = 50);

CREATE TABLE headwater.table_schemas (
    pipeline_id bigint NOT NULL,
    table_id bigint NOT NULL,
    snapshot_id pg_lsn NOT NULL,
    table_schema jsonb NOT NULL,
    PRIMARY KEY (pipeline_id, table_id, snapshot_id)
);

CREATE TABLE headwater.destination_tables (
    pipeline_id bigint NOT NULL,
    table_id bigint NOT NULL,
    metadata jsonb NOT NULL,
    PRIMARY KEY (pipeline_id, table_id)
) WITH (fillfactor = 50);

CREATE TABLE headwater.replication_progress (
    pipeline_id bigint NOT NULL,
    -- 'apply', or 'table_sync:' and the table's oid.
    worker text NOT NULL,
    flush_lsn pg_lsn NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (pipeline_id, worker)
) WITH (fillfactor = 50);
