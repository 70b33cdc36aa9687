-- What the catalog said of a table when it was copied, and since then: large for a table of many partitions, so not in its state.
CREATE TABLE headwater.table_fingerprints (
    pipeline_id bigint NOT NULL,
    table_id bigint NOT NULL,
    fingerprint text NOT NULL,
    PRIMARY KEY (pipeline_id, table_id)
);
