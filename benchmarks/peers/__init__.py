"""Clients of the systems RoQ is compared with, one file each, written as their documentation shows.

A peer is two functions that block: `subscribe(order, handle, ready)` calls `handle(payload)` for every message until that
returns True; `publish(order, ready)` sends the load and returns the number sent, flushed as far as the system can. `ready`
is called once connected and returns when the start gun fires.
"""
