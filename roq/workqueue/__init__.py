"""Work queues: durable, at-least-once, one API from a folder to a replicated cluster."""
