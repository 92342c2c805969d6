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
	last_record_at FLOAT, node_id BIGINT, members JSON, meeting_port INTEGER, environment VARCHAR, node_name VARCHAR, restart_causes JSON, 
	PRIMARY KEY (id), 
	UNIQUE (trial_id, number), 
	FOREIGN KEY(trial_id) REFERENCES trials (id)
);
INSERT INTO "attempts" VALUES(1,1,1,1,'ENDED','[0]',1.79559948511443758008e+09,1.79559948513929247852e+09,1.79559948525152707102e+09,NULL,0,NULL,0,NULL,NULL,NULL,0,2,'{"reason":"runner_lost","code":null,"signal":null,"time":1795599485.251527,"detail":null,"outcome":null,"error":null}',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "attempts" VALUES(2,2,1,1,'ENDED','[1]',1.79559948512456750866e+09,NULL,1.79559948680464291572e+09,NULL,0,NULL,0,NULL,NULL,NULL,0,1,'{"reason":"start_failed","code":null,"signal":null,"time":1795599486.804643,"detail":"no such directory","outcome":null,"error":null}',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "attempts" VALUES(3,1,1,2,'ENDED','[0]',1.79559948529633831978e+09,1.79559948530862593645e+09,1.7955994853124442101e+09,'c1',1,NULL,0,NULL,NULL,NULL,0,1,'{"reason":"shortage","code":null,"signal":null,"time":1795599485.3124442,"detail":"[Errno 28] No space left on device","outcome":null,"error":null}',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "attempts" VALUES(4,1,1,3,'ENDED','[0]',1.7955994865357215404e+09,1.79559948673919749255e+09,1.79559948676598596568e+09,'c1',1,NULL,0,NULL,'error','ValueError: no',0,1,'{"reason":"exited","code":1,"signal":null,"time":1795599486.765986,"detail":null,"outcome":"error","error":"ValueError: no"}',NULL,NULL,NULL,1,NULL,NULL,NULL,'box','{"1":["worker 1 was ended by SIGKILL"]}');
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
INSERT INTO "checkpoints" VALUES('c1',1,1,1,1,'COMPLETED','{"steps_completed":1}','{"model":3}',3,'/nowhere',1.0,0.25);
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
CREATE TABLE counts (
	kind VARCHAR NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	state VARCHAR NOT NULL, 
	number BIGINT NOT NULL, 
	num_bytes BIGINT NOT NULL, 
	PRIMARY KEY (kind, experiment_id, state)
)
 WITHOUT ROWID

;
INSERT INTO "counts" VALUES('archived',0,'ACTIVE',0,0);
INSERT INTO "counts" VALUES('attempts',0,'ENDED',4,0);
INSERT INTO "counts" VALUES('attempts',0,'PENDING',0,0);
INSERT INTO "counts" VALUES('attempts',0,'RUNNING',0,0);
INSERT INTO "counts" VALUES('attempts',1,'ENDED',4,0);
INSERT INTO "counts" VALUES('attempts',1,'PENDING',0,0);
INSERT INTO "counts" VALUES('attempts',1,'RUNNING',0,0);
INSERT INTO "counts" VALUES('checkpoints',0,'COMPLETED',1,3);
INSERT INTO "counts" VALUES('checkpoints',1,'COMPLETED',1,3);
INSERT INTO "counts" VALUES('experiments',0,'ACTIVE',1,0);
INSERT INTO "counts" VALUES('points',0,'',2,0);
INSERT INTO "counts" VALUES('points',1,'',2,0);
INSERT INTO "counts" VALUES('trials',0,'ACTIVE',1,0);
INSERT INTO "counts" VALUES('trials',0,'ERROR',2,0);
INSERT INTO "counts" VALUES('trials',1,'ACTIVE',1,0);
INSERT INTO "counts" VALUES('trials',1,'ERROR',2,0);
CREATE TABLE drained_slots (
	node_id BIGINT NOT NULL, 
	slot INTEGER NOT NULL, 
	PRIMARY KEY (node_id, slot)
);
CREATE TABLE environments (
	digest VARCHAR NOT NULL, 
	content BLOB NOT NULL, 
	PRIMARY KEY (digest)
);
CREATE TABLE events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	time FLOAT NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	trial_id BIGINT, 
	kind VARCHAR NOT NULL, 
	data JSON NOT NULL
);
INSERT INTO "events" VALUES(1,1.79559948496276354794e+09,1,NULL,'experiment_state','{"state":"ACTIVE","error":null}');
INSERT INTO "events" VALUES(2,1.79559948501351475716e+09,1,1,'trial_created','{"hparams":{"lr":0.07630828937395717}}');
INSERT INTO "events" VALUES(3,1.79559948503381705282e+09,1,2,'trial_created','{"hparams":{"lr":0.4555849133282118}}');
INSERT INTO "events" VALUES(4,1.79559948514813232426e+09,1,1,'attempt_started','{"number":1,"slots":[0]}');
INSERT INTO "events" VALUES(5,1.79559948516987323758e+09,1,1,'validation','{"steps_completed":1,"metrics":{"epochs":1,"loss":0.25}}');
INSERT INTO "events" VALUES(6,1.79559948524803400038e+09,1,1,'checkpoint','{"uuid":"c1","steps_completed":1}');
INSERT INTO "events" VALUES(7,1.79559948525825381279e+09,1,1,'attempt_ended','{"number":1,"exit":{"reason":"runner_lost","code":null,"signal":null,"time":1795599485.251527,"detail":null,"outcome":null,"error":null}}');
INSERT INTO "events" VALUES(8,1.79559948530880928037e+09,1,1,'attempt_started','{"number":2,"slots":[0]}');
INSERT INTO "events" VALUES(9,1.79559948531341981889e+09,1,1,'attempt_ended','{"number":2,"exit":{"reason":"shortage","code":null,"signal":null,"time":1795599485.3124442,"detail":"[Errno 28] No space left on device","outcome":null,"error":null}}');
INSERT INTO "events" VALUES(10,1.79559948673944830893e+09,1,1,'attempt_started','{"number":3,"slots":[0]}');
INSERT INTO "events" VALUES(11,1.79559948676706337931e+09,1,1,'attempt_ended','{"number":3,"exit":{"reason":"exited","code":1,"signal":null,"time":1795599486.765986,"detail":null,"outcome":"error","error":"ValueError: no"}}');
INSERT INTO "events" VALUES(12,1795599486.77256,1,1,'trial_state','{"state":"ERROR","reason":null,"error":"The attempt failed (exit code 1: ValueError: no) and max_restarts is 0."}');
INSERT INTO "events" VALUES(13,1.79559948678373098368e+09,1,3,'trial_created','{"hparams":{"lr":0.07205113335976154}}');
INSERT INTO "events" VALUES(14,1.79559948679400444024e+09,1,NULL,'progress','{"progress":0.3333333333333333}');
INSERT INTO "events" VALUES(15,1.79559948680582499502e+09,1,2,'attempt_ended','{"number":1,"exit":{"reason":"start_failed","code":null,"signal":null,"time":1795599486.804643,"detail":"no such directory","outcome":null,"error":null}}');
INSERT INTO "events" VALUES(16,1.79559948680661940574e+09,1,2,'trial_state','{"state":"ERROR","reason":null,"error":"The attempt could not start: start failed: no such directory"}');
INSERT INTO "events" VALUES(17,1.79559948680765390401e+09,1,NULL,'progress','{"progress":0.6666666666666666}');
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
	forked_from BIGINT, 
	num_records_lost BIGINT DEFAULT '0' NOT NULL, priority INTEGER, weight FLOAT, queue_place FLOAT, report_lease_s FLOAT, max_slots INTEGER, source JSON, 
	PRIMARY KEY (id), 
	UNIQUE (external_id)
);
INSERT INTO "experiments" VALUES(1,'tenth version','ACTIVE','{"name":"ninth version","description":"","labels":[],"data":{},"searcher":{"name":"random","metric":"loss","smaller_is_better":true,"source_trial_id":null,"source_checkpoint_uuid":null,"stop_timeout":30.0,"max_length":null,"max_trials":3,"max_concurrent_trials":2},"hyperparameters":{"lr":{"type":"double","minval":0,"maxval":1,"count":4}},"entrypoint":"python3 train.py","resources":{"slots_per_trial":1,"max_slots":null},"max_restarts":0,"checkpoint_policy":"best","checkpoint_storage":null,"reproducibility":{"experiment_seed":7},"environment":{"python":null,"variables":{},"secrets":{},"working_dir":null},"profiling":{"enabled":false,"begin_on_batch":0,"end_after_batch":null,"sync_timings":true},"preemption_timeout":600.0,"debug":false,"min_validation_period":null,"min_checkpoint_period":null,"checkpoint_bytes_per_hour":null,"scheduling_unit":null,"perform_initial_validation":false,"optimizations":{"aggregation_frequency":1,"average_aggregated_gradients":true,"mixed_precision":"O0","average_training_metrics":null,"gradient_compression":null,"tensor_fusion_threshold":null,"tensor_fusion_cycle_time":null,"auto_tune_tensor_fusion":null,"grad_updates_size_file":null},"records_per_epoch":null}',NULL,NULL,'[]',7,1.79559948494337844851e+09,NULL,6.66666666666666629659e-01,1,0.25,NULL,NULL,NULL,0,NULL,NULL,'','[]','',0,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE journal_marks (
	attempt_id INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	sequence BIGINT NOT NULL, 
	PRIMARY KEY (attempt_id, generation, rank), 
	FOREIGN KEY(attempt_id) REFERENCES attempts (id)
);
INSERT INTO "journal_marks" VALUES(1,0,0,1);
INSERT INTO "journal_marks" VALUES(4,0,0,0);
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','11');
INSERT INTO "meta" VALUES('last_id_of_tokens','2');
CREATE TABLE metric_names (
	experiment_id BIGINT NOT NULL, 
	"group" VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	PRIMARY KEY (experiment_id, "group", "key")
)
 WITHOUT ROWID

;
INSERT INTO "metric_names" VALUES(1,'validation','epochs');
INSERT INTO "metric_names" VALUES(1,'validation','loss');
CREATE TABLE nodes (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	session INTEGER NOT NULL, 
	token_id BIGINT, 
	facts JSON NOT NULL, 
	is_draining BOOLEAN DEFAULT 0 NOT NULL, 
	registered_at FLOAT NOT NULL, seen_at FLOAT, has_left BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "nodes" VALUES(1,'box','k',2,1,'{"name": "box", "key": "k", "version": "0.1.0", "protocol": 1, "python": "/opt/python", "python_version": "3.11.7", "devices": ["cpu", "cpu"], "device_kind": "some CPU", "num_cores": 8, "memory_bytes": 1024, "pool": "default", "labels": {}}',0,1790000000.0,1795599999.5,1);
CREATE TABLE pools (
	name VARCHAR NOT NULL, 
	policy VARCHAR NOT NULL, 
	max_slots INTEGER, 
	labels JSON NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "pools" VALUES('big','priority',4,'{"gpu":"a100"}');
CREATE TABLE search_inputs (
	experiment_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	input JSON NOT NULL, 
	operations JSON NOT NULL, 
	PRIMARY KEY (experiment_id, number), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
INSERT INTO "search_inputs" VALUES(1,0,1.79559948500392127035e+09,'{"type":"started"}','[{"type":"create","request_id":"19c2a8c7-f629-4851-8396-3b70d3d06cfa","trial_seed":959775639,"hparams":{"lr":0.07630828937395717}},{"type":"train","request_id":"19c2a8c7-f629-4851-8396-3b70d3d06cfa","length":1},{"type":"create","request_id":"b9ecd94e-8edd-4a89-970a-8d43486e4980","trial_seed":372560217,"hparams":{"lr":0.4555849133282118}},{"type":"train","request_id":"b9ecd94e-8edd-4a89-970a-8d43486e4980","length":1}]');
INSERT INTO "search_inputs" VALUES(1,1,1.79559948677444171901e+09,'{"type":"exited","request_id":"19c2a8c7-f629-4851-8396-3b70d3d06cfa","reason":"error"}','[{"type":"create","request_id":"da6ab844-88b3-4204-a74c-f87fe6971b87","trial_seed":769786948,"hparams":{"lr":0.07205113335976154}},{"type":"train","request_id":"da6ab844-88b3-4204-a74c-f87fe6971b87","length":1}]');
INSERT INTO "search_inputs" VALUES(1,2,1.79559948680698633198e+09,'{"type":"exited","request_id":"b9ecd94e-8edd-4a89-970a-8d43486e4980","reason":"error"}','[]');
CREATE TABLE search_snapshots (
	experiment_id INTEGER NOT NULL, 
	num_inputs INTEGER NOT NULL, 
	snapshot JSON NOT NULL, 
	PRIMARY KEY (experiment_id), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
CREATE TABLE search_views (
	experiment_id INTEGER NOT NULL, 
	num_inputs INTEGER NOT NULL, 
	"view" BLOB NOT NULL, 
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
INSERT INTO "series" VALUES(1,1,1,'validation','epochs',1,1,1.0,1.0,1.0,'1',1,1,'i',X'0100000000000000',X'000000000000F03F',X'0100000000000000');
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
CREATE TABLE tokens (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	scope VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	revoked_at FLOAT, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "tokens" VALUES(1,'box','runner','85130353195d61b4aaa4cb0db43ed2b6be2064f44c317fff4e5ae9b4f50061ab',1.79585860709482502935e+09,NULL,NULL);
INSERT INTO "tokens" VALUES(2,'ci','submit','de78da09ccdf9bfae335d4dcc88be9f340dad875a1f9e1b419c88c0e31545361',1.79585860710302186015e+09,1.80363460710302186008e+09,NULL);
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
	operations_closed BOOLEAN NOT NULL, 
	num_records_lost BIGINT DEFAULT '0' NOT NULL, 
	metadata JSON, 
	alerts JSON, retries INTEGER DEFAULT '0' NOT NULL, error_kind VARCHAR, 
	PRIMARY KEY (id), 
	UNIQUE (experiment_id, request_id), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
INSERT INTO "trials" VALUES(1,1,'19c2a8c7-f629-4851-8396-3b70d3d06cfa','ERROR','{"lr":0.07630828937395717}',959775639,0,3,1,NULL,NULL,0.25,1,'0.25',1.79559948500657391547e+09,1.79559948677178812023e+09,NULL,'The attempt failed (exit code 1: ValueError: no) and max_restarts is 0.',NULL,0,1,0,0,NULL,NULL,2,'user');
INSERT INTO "trials" VALUES(2,1,'b9ecd94e-8edd-4a89-970a-8d43486e4980','ERROR','{"lr":0.4555849133282118}',372560217,0,1,0,NULL,NULL,NULL,NULL,NULL,1.79559948502697658539e+09,1.7955994868064146042e+09,NULL,'The attempt could not start: start failed: no such directory',NULL,0,1,0,0,NULL,NULL,0,'permanent');
INSERT INTO "trials" VALUES(3,1,'da6ab844-88b3-4204-a74c-f87fe6971b87','ACTIVE','{"lr":0.07205113335976154}',769786948,0,0,0,NULL,NULL,NULL,NULL,NULL,1.79559948678317117696e+09,NULL,NULL,NULL,NULL,0,1,0,0,NULL,NULL,0,NULL);
CREATE TABLE unrecorded (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	experiment_id BIGINT, 
	kind VARCHAR NOT NULL, 
	row_id BIGINT NOT NULL
);
INSERT INTO "unrecorded" VALUES(1,1,'new',1);
INSERT INTO "unrecorded" VALUES(2,1,'experiments',1);
INSERT INTO "unrecorded" VALUES(3,1,'search_inputs',1);
INSERT INTO "unrecorded" VALUES(4,1,'trials',1);
INSERT INTO "unrecorded" VALUES(5,1,'trials',1);
INSERT INTO "unrecorded" VALUES(6,1,'trials',2);
INSERT INTO "unrecorded" VALUES(7,1,'trials',2);
INSERT INTO "unrecorded" VALUES(8,1,'attempts',1);
INSERT INTO "unrecorded" VALUES(9,1,'attempts',2);
INSERT INTO "unrecorded" VALUES(10,1,'checkpoints',1);
INSERT INTO "unrecorded" VALUES(11,1,'attempts',1);
INSERT INTO "unrecorded" VALUES(12,1,'ended',1);
INSERT INTO "unrecorded" VALUES(13,1,'attempts',3);
INSERT INTO "unrecorded" VALUES(14,1,'attempts',3);
INSERT INTO "unrecorded" VALUES(15,1,'ended',3);
INSERT INTO "unrecorded" VALUES(16,1,'attempts',4);
INSERT INTO "unrecorded" VALUES(17,1,'attempts',4);
INSERT INTO "unrecorded" VALUES(18,1,'attempts',4);
INSERT INTO "unrecorded" VALUES(19,1,'ended',4);
INSERT INTO "unrecorded" VALUES(20,1,'trials',1);
INSERT INTO "unrecorded" VALUES(21,1,'search_inputs',2);
INSERT INTO "unrecorded" VALUES(22,1,'trials',3);
INSERT INTO "unrecorded" VALUES(23,1,'trials',3);
INSERT INTO "unrecorded" VALUES(24,1,'attempts',2);
INSERT INTO "unrecorded" VALUES(25,1,'ended',2);
INSERT INTO "unrecorded" VALUES(26,1,'trials',2);
INSERT INTO "unrecorded" VALUES(27,1,'search_inputs',3);
INSERT INTO "unrecorded" VALUES(28,1,'trials',1);
INSERT INTO "unrecorded" VALUES(29,1,'trials',2);
INSERT INTO "unrecorded" VALUES(30,NULL,'all',0);
INSERT INTO "unrecorded" VALUES(31,1,'experiments',1);
INSERT INTO "unrecorded" VALUES(32,NULL,'all',0);
INSERT INTO "unrecorded" VALUES(33,1,'experiments',1);
INSERT INTO "unrecorded" VALUES(34,NULL,'tokens',1);
INSERT INTO "unrecorded" VALUES(35,NULL,'tokens',2);
INSERT INTO "unrecorded" VALUES(36,NULL,'all',0);
CREATE TABLE users (
	name VARCHAR NOT NULL, 
	password_hash VARCHAR NOT NULL, 
	changed_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE INDEX ix_experiments_name ON experiments (is_archived, name COLLATE NOCASE);
CREATE INDEX ix_experiments_archived ON experiments (is_archived);
CREATE INDEX ix_experiments_ended ON experiments (is_archived, ended_at);
CREATE INDEX ix_experiments_best ON experiments (is_archived, best_metric);
CREATE INDEX ix_experiments_progress ON experiments (is_archived, progress);
CREATE INDEX ix_experiments_retention ON experiments (retention_done);
CREATE INDEX ix_experiments_created ON experiments (is_archived, created_at);
CREATE INDEX ix_experiments_state ON experiments (state);
CREATE INDEX ix_metric_names ON metric_names ("group", "key");
CREATE INDEX ix_events_experiment ON events (experiment_id, id);
CREATE INDEX ix_trials_experiment ON trials (experiment_id, state);
CREATE INDEX ix_trials_restarts ON trials (experiment_id, restarts);
CREATE INDEX ix_trials_ended ON trials (experiment_id, ended_at);
CREATE INDEX ix_trials_best ON trials (experiment_id, best_metric);
CREATE INDEX ix_trials_id ON trials (experiment_id);
CREATE INDEX ix_trials_steps ON trials (experiment_id, steps_completed);
CREATE INDEX ix_trials_created ON trials (experiment_id, created_at);
CREATE INDEX ix_trials_state ON trials (state);
CREATE INDEX ix_chunks_series ON chunks (series_id, first_step, last_step);
CREATE INDEX ix_attempts_state ON attempts (state);
CREATE INDEX ix_attempts_began ON attempts (experiment_id, number, created_at, trial_id);
CREATE INDEX ix_checkpoints_trial ON checkpoints (trial_id, steps_completed, created_at, uuid);
CREATE INDEX ix_checkpoints_experiment ON checkpoints (experiment_id, steps_completed, created_at, uuid);
CREATE INDEX ix_checkpoints_metric ON checkpoints (experiment_id, metric, steps_completed, created_at, uuid);
CREATE TRIGGER count_experiments_1 AFTER INSERT ON experiments BEGIN INSERT INTO counts VALUES ('experiments', 0, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('archived', 0, NEW.state, 1 * NEW.is_archived, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_experiments_2 AFTER DELETE ON experiments BEGIN INSERT INTO counts VALUES ('experiments', 0, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('archived', 0, OLD.state, -1 * OLD.is_archived, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; DELETE FROM counts WHERE experiment_id = OLD.id; DELETE FROM metric_names WHERE experiment_id = OLD.id; END;
CREATE TRIGGER count_experiments_3 AFTER UPDATE OF state, is_archived ON experiments BEGIN INSERT INTO counts VALUES ('experiments', 0, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('archived', 0, OLD.state, -1 * OLD.is_archived, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('experiments', 0, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('archived', 0, NEW.state, 1 * NEW.is_archived, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_trials_1 AFTER INSERT ON trials BEGIN INSERT INTO counts VALUES ('trials', 0, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('trials', NEW.experiment_id, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_trials_2 AFTER DELETE ON trials BEGIN INSERT INTO counts VALUES ('trials', 0, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('trials', OLD.experiment_id, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_trials_3 AFTER UPDATE OF state ON trials BEGIN INSERT INTO counts VALUES ('trials', 0, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('trials', OLD.experiment_id, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('trials', 0, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('trials', NEW.experiment_id, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_attempts_1 AFTER INSERT ON attempts BEGIN INSERT INTO counts VALUES ('attempts', 0, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('attempts', NEW.experiment_id, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_attempts_2 AFTER DELETE ON attempts BEGIN INSERT INTO counts VALUES ('attempts', 0, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('attempts', OLD.experiment_id, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_attempts_3 AFTER UPDATE OF state ON attempts BEGIN INSERT INTO counts VALUES ('attempts', 0, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('attempts', OLD.experiment_id, OLD.state, -1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('attempts', 0, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('attempts', NEW.experiment_id, NEW.state, 1, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_checkpoints_1 AFTER INSERT ON checkpoints BEGIN INSERT INTO counts VALUES ('checkpoints', 0, NEW.state, 1, 1 * NEW.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('checkpoints', NEW.experiment_id, NEW.state, 1, 1 * NEW.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_checkpoints_2 AFTER DELETE ON checkpoints BEGIN INSERT INTO counts VALUES ('checkpoints', 0, OLD.state, -1, -1 * OLD.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('checkpoints', OLD.experiment_id, OLD.state, -1, -1 * OLD.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_checkpoints_3 AFTER UPDATE OF state, size ON checkpoints BEGIN INSERT INTO counts VALUES ('checkpoints', 0, OLD.state, -1, -1 * OLD.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('checkpoints', OLD.experiment_id, OLD.state, -1, -1 * OLD.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('checkpoints', 0, NEW.state, 1, 1 * NEW.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('checkpoints', NEW.experiment_id, NEW.state, 1, 1 * NEW.size) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_points_1 AFTER INSERT ON series BEGIN INSERT INTO counts VALUES ('points', 0, '', NEW.num_points, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('points', coalesce((SELECT experiment_id FROM trials WHERE id = NEW.trial_id), 0), '', NEW.num_points, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT OR IGNORE INTO metric_names SELECT experiment_id, NEW."group", NEW."key" FROM trials WHERE id = NEW.trial_id; END;
CREATE TRIGGER count_points_2 AFTER DELETE ON series BEGIN INSERT INTO counts VALUES ('points', 0, '', -OLD.num_points, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('points', coalesce((SELECT experiment_id FROM trials WHERE id = OLD.trial_id), 0), '', -OLD.num_points, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER count_points_3 AFTER UPDATE OF num_points ON series BEGIN INSERT INTO counts VALUES ('points', 0, '', NEW.num_points - OLD.num_points, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; INSERT INTO counts VALUES ('points', coalesce((SELECT experiment_id FROM trials WHERE id = NEW.trial_id), 0), '', NEW.num_points - OLD.num_points, 0) ON CONFLICT DO UPDATE SET number = number + excluded.number, num_bytes = num_bytes + excluded.num_bytes; END;
CREATE TRIGGER recorded_new_experiments AFTER INSERT ON experiments BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.id,  'new', NEW.rowid); INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.id,  'experiments', NEW.rowid); END;
CREATE TRIGGER recorded_new_trials AFTER INSERT ON trials BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'trials', NEW.rowid); END;
CREATE TRIGGER recorded_new_attempts AFTER INSERT ON attempts BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'attempts', NEW.rowid); INSERT INTO unrecorded (experiment_id, kind, row_id) SELECT NEW.experiment_id, 'ended', NEW.rowid WHERE NEW.ended_at IS NOT NULL; END;
CREATE TRIGGER recorded_attempts AFTER UPDATE OF "ended_at", "exit", "outcome" ON attempts BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'attempts', NEW.rowid); INSERT INTO unrecorded (experiment_id, kind, row_id) SELECT NEW.experiment_id, 'ended', NEW.rowid WHERE NEW.ended_at IS NOT NULL; END;
CREATE TRIGGER recorded_new_search_inputs AFTER INSERT ON search_inputs BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'search_inputs', NEW.rowid); END;
CREATE TRIGGER recorded_search_inputs AFTER UPDATE OF "input", "operations" ON search_inputs BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'search_inputs', NEW.rowid); END;
CREATE TRIGGER recorded_new_checkpoints AFTER INSERT ON checkpoints BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'checkpoints', NEW.rowid); END;
CREATE TRIGGER recorded_checkpoints AFTER UPDATE OF "state", "metadata", "resources" ON checkpoints BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'checkpoints', NEW.rowid); END;
CREATE TRIGGER recorded_new_users AFTER INSERT ON users BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL,  'users', NEW.rowid); END;
CREATE TRIGGER recorded_users AFTER UPDATE OF "password_hash" ON users BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL,  'users', NEW.rowid); END;
CREATE TRIGGER recorded_new_tokens AFTER INSERT ON tokens BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL,  'tokens', NEW.rowid); END;
CREATE TRIGGER recorded_tokens AFTER UPDATE OF "revoked_at" ON tokens BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL,  'tokens', NEW.rowid); END;
CREATE TRIGGER recorded_gone AFTER DELETE ON experiments BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (OLD.id, 'gone', OLD.id); END;
CREATE TRIGGER recorded_trials AFTER UPDATE OF "state", "hparams", "target_length", "operations_closed", "restarts", "ended_at", "stop_reason", "error", "error_kind" ON trials BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.experiment_id,  'trials', NEW.rowid); END;
CREATE INDEX ix_attempts_ended ON attempts (ended_at);
CREATE INDEX ix_attempts_node ON attempts (node_id, id);
CREATE INDEX ix_attempts_environment ON attempts (environment);
CREATE TRIGGER recorded_experiments AFTER UPDATE OF "name", "state", "config", "search_end", "ended_at", "error", "parent_trial_id", "description", "labels", "notes", "is_archived", "external_path", "priority", "weight", "queue_place", "max_slots" ON experiments BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NEW.id,  'experiments', NEW.rowid); END;
CREATE TRIGGER recorded_insert_nodes AFTER INSERT ON nodes BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_update_nodes AFTER UPDATE ON nodes BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_delete_nodes AFTER DELETE ON nodes BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_insert_pools AFTER INSERT ON pools BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_update_pools AFTER UPDATE ON pools BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_delete_pools AFTER DELETE ON pools BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_insert_drained_slots AFTER INSERT ON drained_slots BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_update_drained_slots AFTER UPDATE ON drained_slots BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE TRIGGER recorded_delete_drained_slots AFTER DELETE ON drained_slots BEGIN INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0); END;
CREATE INDEX ix_experiments_texts ON experiments (name, description, labels);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('unrecorded',36);
INSERT INTO "sqlite_sequence" VALUES('events',17);
COMMIT;
