CREATE TABLE batches (
  id VARCHAR(64) NOT NULL,
  owner VARCHAR(512) NOT NULL,
  is_job BOOLEAN NOT NULL,
  endpoint VARCHAR(128) NOT NULL,
  status VARCHAR(16) NOT NULL,
  delegation TEXT NOT NULL,
  input_file_id VARCHAR(64) NOT NULL,
  output_file_id VARCHAR(64) NOT NULL,
  error_file_id VARCHAR(64) NOT NULL,
  details TEXT NOT NULL,
  times TEXT NOT NULL,
  created_at BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  total INTEGER NOT NULL,
  completed INTEGER NOT NULL,
  failed INTEGER NOT NULL,
  ends_as VARCHAR(16) NOT NULL,
  worker VARCHAR(256) NOT NULL,
  lease_until FLOAT NOT NULL,
  webhook TEXT NOT NULL,
  webhook_at FLOAT,
  webhook_failures INTEGER NOT NULL,
  PRIMARY KEY (id)
);
CREATE INDEX batches_by_age ON batches (created_at);
CREATE INDEX batches_by_owner ON batches (owner, created_at, id);
CREATE INDEX batches_by_status ON batches (status);
CREATE INDEX batches_by_webhook ON batches (webhook_at);
CREATE INDEX batches_by_worker ON batches (worker);
CREATE TABLE files (
  id VARCHAR(64) NOT NULL,
  owner VARCHAR(512) NOT NULL,
  filename VARCHAR(512) NOT NULL,
  purpose VARCHAR(64) NOT NULL,
  bytes BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  PRIMARY KEY (id)
);
CREATE INDEX files_by_age ON files (created_at);
CREATE INDEX files_by_owner ON files (owner, created_at, id);
CREATE TABLE lines (
  batch_id VARCHAR(64) NOT NULL,
  number INTEGER NOT NULL,
  custom_id VARCHAR(256) NOT NULL,
  body BYTEA NOT NULL,
  prefix BYTEA NOT NULL,
  state VARCHAR(16) NOT NULL,
  not_before FLOAT NOT NULL,
  worker VARCHAR(256) NOT NULL,
  lease_until FLOAT NOT NULL,
  take INTEGER NOT NULL,
  failures INTEGER NOT NULL,
  losses INTEGER NOT NULL,
  result BYTEA NOT NULL,
  PRIMARY KEY (batch_id, number),
  UNIQUE (batch_id, custom_id)
);
CREATE INDEX lines_by_worker ON lines (state, worker);
CREATE INDEX lines_in_their_order ON lines (batch_id, state, prefix, number);
