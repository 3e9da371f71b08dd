"""Logs: ordered, durable lists of records with positions (LSN). They know nothing of tasks."""
