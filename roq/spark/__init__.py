"""RoQ's sources and sinks for PySpark. The only room that imports it."""
