"""The coordinator of one machine: a tree of nodes behind ZooKeeper's client protocol, with a journal. No Java, no ensemble."""
