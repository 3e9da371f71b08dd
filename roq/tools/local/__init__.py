"""RoQ on this machine alone: a ZooKeeper and a whole cluster, for `roq up`, the demo, tests and the benchmark."""
