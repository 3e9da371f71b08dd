"""Monitor process: who publishes where in one queue, planned moves, and the StatMonitor's KPI stream."""
