"""A whole cluster in one process, on a clock of its own: the real programs, with faults from a seed (docs/simulation.md)."""
