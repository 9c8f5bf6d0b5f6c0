BEGIN TRANSACTION;
CREATE TABLE counters (
            run INTEGER NOT NULL REFERENCES runs (id), unit INTEGER NOT NULL REFERENCES names (id), model INTEGER NOT NULL REFERENCES names (id), backend INTEGER NOT NULL REFERENCES names (id), case_id INTEGER NOT NULL REFERENCES names (id), counter INTEGER NOT NULL REFERENCES names (id), value REAL NOT NULL,
            PRIMARY KEY (run, unit, model, backend, case_id, counter)) WITHOUT ROWID;
INSERT INTO "counters" VALUES(2,5,8,3,6,10,2.0);
INSERT INTO "counters" VALUES(2,5,8,3,6,11,3.0);
INSERT INTO "counters" VALUES(2,9,8,3,7,10,2.0);
INSERT INTO "counters" VALUES(2,9,8,3,7,11,3.0);
CREATE TABLE gates (
            run INTEGER NOT NULL REFERENCES runs (id), gate INTEGER NOT NULL REFERENCES names (id), unit INTEGER NOT NULL REFERENCES names (id), backend INTEGER NOT NULL REFERENCES names (id), against INTEGER NOT NULL REFERENCES names (id), kind TEXT NOT NULL, bound REAL,
            answer TEXT NOT NULL, estimate REAL, low REAL, high REAL, rounds INTEGER, detectable REAL, seconds REAL,
            reason TEXT, PRIMARY KEY (run, gate, unit, backend, against)) WITHOUT ROWID;
INSERT INTO "gates" VALUES(2,13,5,3,4,'ratio',0.7,'regressed',0.6,0.58,0.63,12,0.04,3.5,'');
INSERT INTO "gates" VALUES(2,14,5,3,12,'ratio',0.7,'fine',0.6,0.58,0.63,12,0.04,3.5,'');
CREATE TABLE hunts (
            run INTEGER NOT NULL REFERENCES runs (id), fault INTEGER NOT NULL REFERENCES names (id), family INTEGER NOT NULL REFERENCES names (id), level TEXT NOT NULL, adapter INTEGER NOT NULL REFERENCES names (id), control INTEGER NOT NULL,
            noticed INTEGER NOT NULL, case_id INTEGER NOT NULL REFERENCES names (id), verdict TEXT NOT NULL, PRIMARY KEY (run, fault, family))
            WITHOUT ROWID;
CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
INSERT INTO "names" VALUES(1,'ops/ADD-f32+f32-a=3@1');
INSERT INTO "names" VALUES(2,'ops/MUL-f32+f32-a=3@1');
INSERT INTO "names" VALUES(3,'x');
INSERT INTO "names" VALUES(4,'y');
INSERT INTO "names" VALUES(5,'decode');
INSERT INTO "names" VALUES(6,'kv_growth/llama-tiny,run=decode@0');
INSERT INTO "names" VALUES(7,'kv_growth/llama-tiny,run=load@0');
INSERT INTO "names" VALUES(8,'llama-tiny');
INSERT INTO "names" VALUES(9,'load');
INSERT INTO "names" VALUES(10,'compiles');
INSERT INTO "names" VALUES(11,'kernels.RMS');
INSERT INTO "names" VALUES(12,'');
INSERT INTO "names" VALUES(13,'g');
INSERT INTO "names" VALUES(14,'h');
CREATE TABLE results (
            run INTEGER NOT NULL REFERENCES runs (id), backend INTEGER NOT NULL REFERENCES names (id), case_id INTEGER NOT NULL REFERENCES names (id), verdict TEXT NOT NULL, budget_used REAL, nmse REAL,
            nmse_exact REAL, seconds REAL NOT NULL, steps INTEGER NOT NULL, fresh INTEGER NOT NULL, waived TEXT,
            detail TEXT NOT NULL, PRIMARY KEY (run, backend, case_id)) WITHOUT ROWID;
INSERT INTO "results" VALUES(1,3,1,'PASS',NULL,NULL,NULL,0.0,0,0,NULL,'');
INSERT INTO "results" VALUES(1,3,2,'FAIL',NULL,NULL,NULL,0.0,0,0,NULL,'it is FAIL');
INSERT INTO "results" VALUES(1,4,1,'UNSUPPORTED',NULL,NULL,NULL,0.0,0,0,NULL,'it is UNSUPPORTED');
CREATE TABLE runs (
            id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, written TEXT NOT NULL,
            nightly INTEGER NOT NULL, machine TEXT NOT NULL, system TEXT NOT NULL, cpu TEXT NOT NULL, cores INTEGER,
            python TEXT, packages TEXT NOT NULL);
INSERT INTO "runs" VALUES(1,'11111111111111111111111111111111','conformance','2026-01-02T03:04:05Z',0,'m1','Linux x86_64','a cpu',2,'3.12.1','{"numpy": "2.1"}');
INSERT INTO "runs" VALUES(2,'22222222222222222222222222222222','perf','2026-01-02T03:04:05Z',0,'m1','Linux x86_64','a cpu',2,'3.12.1','{"numpy": "2.1"}');
CREATE TABLE timings (
            run INTEGER NOT NULL REFERENCES runs (id), unit INTEGER NOT NULL REFERENCES names (id), model INTEGER NOT NULL REFERENCES names (id), backend INTEGER NOT NULL REFERENCES names (id), case_id INTEGER NOT NULL REFERENCES names (id), verdict TEXT NOT NULL,
            work REAL NOT NULL, work_of TEXT NOT NULL, rounds INTEGER NOT NULL, seconds TEXT NOT NULL, rate REAL,
            low REAL, high REAL, weights INTEGER, peak INTEGER, reason TEXT NOT NULL,
            PRIMARY KEY (run, unit, model, backend, case_id)) WITHOUT ROWID;
INSERT INTO "timings" VALUES(2,5,8,3,6,'PASS',64.0,'tokens',7,'[2.0, 1.0, 4.0, 1.6, 1.9, 2.1, 2.2]',32.0,16.0,64.0,1000,NULL,'');
INSERT INTO "timings" VALUES(2,9,8,3,7,'FAIL',64.0,'tokens',0,'[]',NULL,NULL,NULL,1000,NULL,'its case did not pass');
COMMIT;
PRAGMA application_id = 1734831468;
PRAGMA user_version = 1;
