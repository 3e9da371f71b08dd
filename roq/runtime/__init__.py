"""What every RoQ process stands on: event loop and signals, sockets, request/reply, liveness, back-off, logs and counters."""
