"""Charts of numbers over time, as plain SVG: progress of a queue, a run of chaos, a recorded cluster."""
