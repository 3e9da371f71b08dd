"""`roq chaos`: a seeded series of faults against a test cluster under several loads, and a verdict on all that was promised.

schedule (which fault when, pure) → nemesis (does it), with the loads (load_set.py: load.py, task_load.py, recorded_load.py,
shuffle_load.py; workers are processes of their own) and run.py (administration, resource watch, witness) going on → settle and
drain → verdicts (ledger.py, promises.py, verdict.py), resources, invariants (all pure) → charts. edn.py writes what happened
for other checkers. run.py puts them in this order.
"""
