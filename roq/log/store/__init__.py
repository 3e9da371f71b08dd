"""The store: one process per host that keeps log segments and payloads on disk."""
