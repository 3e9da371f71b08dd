"""`roq chaos`: a seeded series of faults against a test cluster under load, and a verdict on every single message.

schedule (which fault when, pure) → nemesis (does it), with load (publishers and subscribers that write histories) and run.py
(administration, resource watch, witness) going on → settle and drain → verdict, resources, invariants (all pure) → charts.
run.py puts them in this order.
"""
