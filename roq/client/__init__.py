"""The SDK of a cluster: what `roq.connect` gives, and what reads and keeps a cluster as a whole."""
