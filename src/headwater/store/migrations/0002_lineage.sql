-- Whose WAL the recorded positions count: the cluster, and its timeline.
CREATE TABLE headwater.lineages (
    pipeline_id bigint PRIMARY KEY,
    system_identifier text NOT NULL,
    timeline bigint NOT NULL
);
