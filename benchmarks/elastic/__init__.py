"""How scaling policies do on traces of load: a model of a queue, the traces, and what forecasts would change."""
