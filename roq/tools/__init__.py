"""What is run beside a cluster: benchmarks, chaos, local clusters, the simulation."""
