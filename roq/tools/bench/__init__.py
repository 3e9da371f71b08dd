"""The load generator behind `roq bench`: what to send, one process per client, and the counting of what arrived.

The programs of other systems it is compared with are not here but in the repository's `benchmarks/`, on the same harness.
"""
