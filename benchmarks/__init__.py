"""RoQ and what people would use instead, side by side in one run on one machine: `python -m benchmarks`.

Every client is a process of its own, every peer has unbounded buffers, runs are interleaved, ratios of medians are what
counts. Peers whose server or client is not installed are left out, and that is said.
"""
