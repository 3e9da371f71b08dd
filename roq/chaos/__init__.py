"""`roq chaos`: a seeded series of faults against a test cluster under load, and a verdict on every single message.

schedule (which fault when, pure) → nemesis (does it) beside load (publishers and subscribers that write histories) → settle and
drain → verdict (pure) and invariants (pure) → picture. run.py puts them in this order.
"""
