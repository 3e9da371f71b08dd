"""Host Configuration Manager, one per host: runs what the GCM assigned to this host, and keeps it alive."""
