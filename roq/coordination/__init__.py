"""ZooKeeper, the one place where hosts and GCM agree: sessions, paths, election, registration, fenced writes.

The only room that imports kazoo (kazoo_link.py).
"""
