"""Exchange process: forwards publishers' frames to subscribers in C, undecoded."""
