"""The master: owns one cluster work queue; folds its log and leases its tasks."""
