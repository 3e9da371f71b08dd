"""The SDK: cluster, publisher, subscriber, and the pure machines that keep order across moves."""
