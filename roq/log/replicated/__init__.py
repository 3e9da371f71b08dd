"""The replicated log: BookKeeper's protocol in small. Pure machines, and the writer and reader that perform them.

metadata    what ZooKeeper keeps of a log, and every change of it
appending   one writer, one segment: numbers, acknowledges in order        recovery    what a dead writer may have left
health      which stores live and are fit, and which are chosen            repair      what must be copied where: all pure
chain (of segments, in ZooKeeper), stores, owner, writer, takeover, reader, repairer    the shells
"""
