"""The work queue in a plain folder, laid out as python-task-queue's `fq://`: no server, no daemon. Begin with queue.py."""
