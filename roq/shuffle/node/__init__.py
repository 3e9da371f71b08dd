"""The follower: a store's part in shuffles, in a thread and at a port ("shuffle") of its own, so that work queues don't wait.

Buffer role (buffer.py): takes attempts, cuts their runs by the table of ranges, has every piece stored on all holders of its
range. Storage role (storage.py): keeps pieces, gives them to readers and to other followers. Both speak roq/wire/shuffle.py.
pyarrow is imported when the first block has to be cut, and nowhere else in a store (cutting.py). Not covered: who holds what
(gcm), how clients find a follower (roq/shuffle/cluster.py).
"""
