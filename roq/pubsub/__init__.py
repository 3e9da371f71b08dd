"""Publish/subscribe: publishers and subscribers here, the processes of a queue beside them."""
