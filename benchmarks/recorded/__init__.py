"""Recorded queues side by side with what people would use instead: NATS JetStream, Redis Streams.

workload.py says what is done and how it is checked, systems.py who takes part, run.py starts processes and measures, away.py
is about a subscriber that comes back, live.py about what recording costs those who don't read it, report.py makes tables; one
file per system in clients/, written as its documentation shows.
"""
