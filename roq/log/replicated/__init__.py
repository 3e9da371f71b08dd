"""The replicated log: BookKeeper's protocol in small. Pure machines, and the writer and reader that perform them.

metadata    what ZooKeeper keeps of a log, and every change of it          placement   which hosts get a segment
appending   one writer, one segment: numbers, acknowledges in order        recovery    what a dead writer may have left
repair      what must be copied where                                      all four are pure
writer, takeover, reader, repairer, blobs                                  the shells
"""
