"""A cluster at scale: a real ZooKeeper, real GCMs, simulated hosts that hold real sessions. `python -m benchmarks at-scale`.

What a host does towards ZooKeeper is real (hosts.py); its processes are not there. docs/scale.md has the figures.
"""
