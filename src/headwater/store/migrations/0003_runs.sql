-- Whose writes count: the run that has the pipeline's lock puts its token here, and the statements of another are refused.
CREATE TABLE headwater.runs (
    pipeline_id bigint PRIMARY KEY,
    token text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
