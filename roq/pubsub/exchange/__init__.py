"""Exchange process: forwards publishers' frames to subscribers, undecoded."""
