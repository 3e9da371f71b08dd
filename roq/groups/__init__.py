"""Consumer groups: what fills them from the tapes of a recorded queue."""
