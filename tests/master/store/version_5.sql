BEGIN TRANSACTION;
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	number INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	slots JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	resumed_from VARCHAR, 
	resumed_steps BIGINT NOT NULL, 
	preempt_reason VARCHAR, 
	preempt_acknowledged BOOLEAN NOT NULL, 
	early_exit VARCHAR, 
	outcome VARCHAR, 
	error TEXT, 
	should_kill BOOLEAN NOT NULL, 
	control_version INTEGER NOT NULL, 
	exit JSON, 
	run_attempt INTEGER, 
	run_generation INTEGER, 
	last_record_at FLOAT, 
	PRIMARY KEY (id), 
	UNIQUE (trial_id, number), 
	FOREIGN KEY(trial_id) REFERENCES trials (id)
);
INSERT INTO "attempts" VALUES(1,1,1,1,'RUNNING','[0]',1.7953810043153426647e+09,1.79538100448510766025e+09,NULL,NULL,0,NULL,0,NULL,NULL,NULL,0,2,NULL,NULL,NULL,NULL);
INSERT INTO "attempts" VALUES(2,2,1,1,'PENDING','[1]',1.79538100431736898426e+09,NULL,NULL,NULL,0,NULL,0,NULL,NULL,NULL,0,1,NULL,NULL,NULL,NULL);
CREATE TABLE checkpoints (
	uuid VARCHAR NOT NULL, 
	trial_id INTEGER NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	steps_completed BIGINT NOT NULL, 
	state VARCHAR NOT NULL, 
	metadata JSON NOT NULL, 
	resources JSON NOT NULL, 
	size BIGINT NOT NULL, 
	storage VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	metric FLOAT, 
	PRIMARY KEY (uuid), 
	FOREIGN KEY(trial_id) REFERENCES trials (id)
);
CREATE TABLE chunks (
	id INTEGER NOT NULL, 
	series_id INTEGER NOT NULL, 
	first_step BIGINT NOT NULL, 
	last_step BIGINT NOT NULL, 
	kind VARCHAR NOT NULL, 
	steps BLOB NOT NULL, 
	times BLOB NOT NULL, 
	value_bytes BLOB NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(series_id) REFERENCES series (id)
);
CREATE TABLE events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	time FLOAT NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	trial_id BIGINT, 
	kind VARCHAR NOT NULL, 
	data JSON NOT NULL
);
INSERT INTO "events" VALUES(1,1.79538100408379888532e+09,1,NULL,'experiment_state','{"state":"ACTIVE","error":null}');
INSERT INTO "events" VALUES(2,1.79538100415553736688e+09,1,1,'trial_created','{"hparams":{"lr":0.07630828937395717}}');
INSERT INTO "events" VALUES(3,1.79538100417638516424e+09,1,2,'trial_created','{"hparams":{"lr":0.4555849133282118}}');
INSERT INTO "events" VALUES(4,1.79538100424885201456e+09,1,NULL,'experiment_changed','{"fields":["notes"]}');
INSERT INTO "events" VALUES(5,1.79538100448557782174e+09,1,1,'attempt_started','{"number":1,"slots":[0]}');
INSERT INTO "events" VALUES(6,1.79538100452072858816e+09,1,1,'metrics','{"group":"training","rank":0,"steps_completed":1,"count":1,"metrics":{"loss":0.5}}');
INSERT INTO "events" VALUES(7,1.79538100452126717565e+09,1,1,'validation','{"steps_completed":1,"metrics":{"loss":0.25}}');
CREATE TABLE experiments (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	config JSON NOT NULL, 
	submitted_config TEXT, 
	context_digest VARCHAR, 
	warnings JSON NOT NULL, 
	seed BIGINT NOT NULL, 
	created_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	progress FLOAT NOT NULL, 
	best_trial_id BIGINT, 
	best_metric FLOAT, 
	error TEXT, 
	parent_trial_id BIGINT, 
	search_end VARCHAR, 
	retention_done BOOLEAN NOT NULL, 
	external_id VARCHAR, 
	external_path VARCHAR, 
	description TEXT DEFAULT '' NOT NULL, 
	labels JSON DEFAULT '[]' NOT NULL, 
	notes TEXT DEFAULT '' NOT NULL, 
	is_archived BOOLEAN DEFAULT 0 NOT NULL, 
	forked_from BIGINT, num_records_lost BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (external_id)
);
INSERT INTO "experiments" VALUES(1,'fifth version','ACTIVE','{"name":"second version","description":"Which rate?","labels":["digits","cpu"],"data":{},"searcher":{"name":"random","metric":"loss","smaller_is_better":true,"source_trial_id":null,"source_checkpoint_uuid":null,"stop_timeout":30.0,"max_length":null,"max_trials":2,"max_concurrent_trials":16},"hyperparameters":{"lr":{"type":"double","minval":0.0,"maxval":1.0}},"entrypoint":"python3 train.py","resources":{"slots_per_trial":1,"max_slots":null},"max_restarts":5,"checkpoint_policy":"best","checkpoint_storage":null,"reproducibility":{"experiment_seed":7},"environment":{"python":null,"variables":{},"working_dir":null},"profiling":{"enabled":false,"begin_on_batch":0,"end_after_batch":null,"sync_timings":true},"preemption_timeout":600.0,"debug":false,"min_validation_period":null,"min_checkpoint_period":null,"scheduling_unit":null,"perform_initial_validation":false,"optimizations":{"aggregation_frequency":1,"average_aggregated_gradients":true,"mixed_precision":"O0","average_training_metrics":null,"gradient_compression":null,"tensor_fusion_threshold":null,"tensor_fusion_cycle_time":null,"auto_tune_tensor_fusion":null,"grad_updates_size_file":null},"records_per_epoch":null}',NULL,NULL,'[]',7,1.79538100406580686564e+09,NULL,0.0,1,0.25,NULL,NULL,NULL,0,NULL,NULL,'Which rate?','["digits","cpu"]','# Notes',0,NULL,2);
CREATE TABLE journal_marks (
	attempt_id INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	sequence BIGINT NOT NULL, 
	PRIMARY KEY (attempt_id, generation, rank), 
	FOREIGN KEY(attempt_id) REFERENCES attempts (id)
);
INSERT INTO "journal_marks" VALUES(1,0,0,1);
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','5');
CREATE TABLE search_inputs (
	experiment_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	input JSON NOT NULL, 
	operations JSON NOT NULL, 
	PRIMARY KEY (experiment_id, number), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
INSERT INTO "search_inputs" VALUES(1,0,1.79538100414031171793e+09,'{"type":"started"}','[{"type":"create","request_id":"19c2a8c7-f629-4851-8396-3b70d3d06cfa","trial_seed":959775639,"hparams":{"lr":0.07630828937395717}},{"type":"train","request_id":"19c2a8c7-f629-4851-8396-3b70d3d06cfa","length":1},{"type":"create","request_id":"b9ecd94e-8edd-4a89-970a-8d43486e4980","trial_seed":372560217,"hparams":{"lr":0.4555849133282118}},{"type":"train","request_id":"b9ecd94e-8edd-4a89-970a-8d43486e4980","length":1}]');
CREATE TABLE search_snapshots (
	experiment_id INTEGER NOT NULL, 
	num_inputs INTEGER NOT NULL, 
	snapshot JSON NOT NULL, 
	PRIMARY KEY (experiment_id), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
CREATE TABLE series (
	id INTEGER NOT NULL, 
	trial_id BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	"group" VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	num_points BIGINT NOT NULL, 
	num_numbers BIGINT NOT NULL, 
	sum FLOAT, 
	min FLOAT, 
	max FLOAT, 
	last TEXT, 
	first_step BIGINT NOT NULL, 
	last_step BIGINT NOT NULL, 
	kind VARCHAR NOT NULL, 
	steps BLOB NOT NULL, 
	times BLOB NOT NULL, 
	value_bytes BLOB NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (trial_id, attempt, "group", "key")
);
INSERT INTO "series" VALUES(1,1,1,'training','loss',1,1,0.5,0.5,0.5,'0.5',1,1,'f',X'0100000000000000',X'0000000000000000',X'000000000000E03F');
INSERT INTO "series" VALUES(2,1,1,'validation','loss',1,1,0.25,0.25,0.25,'0.25',1,1,'f',X'0100000000000000',X'000000000000F03F',X'000000000000D03F');
CREATE TABLE sign_ins (
	digest VARCHAR NOT NULL, 
	user VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	PRIMARY KEY (digest)
);
CREATE TABLE time_marks (
	attempt_id INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	event VARCHAR NOT NULL, 
	steps_completed BIGINT NOT NULL, 
	seconds JSON NOT NULL, 
	PRIMARY KEY (attempt_id, generation, number), 
	FOREIGN KEY(attempt_id) REFERENCES attempts (id)
);
INSERT INTO "time_marks" VALUES(1,0,0,1795381004.6,'start',0,'{"data_wait":0.5}');
CREATE TABLE trials (
	id INTEGER NOT NULL, 
	experiment_id INTEGER NOT NULL, 
	request_id VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	hparams JSON NOT NULL, 
	seed BIGINT NOT NULL, 
	restarts INTEGER NOT NULL, 
	num_attempts INTEGER NOT NULL, 
	steps_completed BIGINT NOT NULL, 
	progress FLOAT, 
	status TEXT, 
	best_metric FLOAT, 
	best_step BIGINT, 
	latest_metric TEXT, 
	created_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	stop_reason VARCHAR, 
	error TEXT, 
	source_checkpoint VARCHAR, 
	uses_operations BOOLEAN NOT NULL, 
	target_length BIGINT, 
	operations_closed BOOLEAN NOT NULL, num_records_lost BIGINT DEFAULT '0' NOT NULL, metadata JSON, alerts JSON, 
	PRIMARY KEY (id), 
	UNIQUE (experiment_id, request_id), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
INSERT INTO "trials" VALUES(1,1,'19c2a8c7-f629-4851-8396-3b70d3d06cfa','ACTIVE','{"lr":0.07630828937395717}',959775639,0,1,1,NULL,NULL,0.25,1,'0.25',1.79538100414195442204e+09,NULL,NULL,NULL,NULL,0,1,0,2,'{"git":"abc"}','[{"title":"loss","text":"It is high.","level":"WARN"}]');
INSERT INTO "trials" VALUES(2,1,'b9ecd94e-8edd-4a89-970a-8d43486e4980','ACTIVE','{"lr":0.4555849133282118}',372560217,0,1,0,NULL,NULL,NULL,NULL,NULL,1.79538100417607545851e+09,NULL,NULL,NULL,NULL,0,1,0,0,NULL,NULL);
CREATE TABLE users (
	name VARCHAR NOT NULL, 
	password_hash VARCHAR NOT NULL, 
	changed_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE INDEX ix_experiments_state ON experiments (state);
CREATE INDEX ix_events_experiment ON events (experiment_id, id);
CREATE INDEX ix_trials_experiment ON trials (experiment_id, state);
CREATE INDEX ix_trials_best ON trials (experiment_id, best_metric);
CREATE INDEX ix_trials_state ON trials (state);
CREATE INDEX ix_chunks_series ON chunks (series_id, first_step, last_step);
CREATE INDEX ix_attempts_state ON attempts (state);
CREATE INDEX ix_checkpoints_experiment ON checkpoints (experiment_id, steps_completed);
CREATE INDEX ix_checkpoints_trial ON checkpoints (trial_id, steps_completed);
CREATE INDEX ix_checkpoints_metric ON checkpoints (experiment_id, metric);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',7);
COMMIT;
