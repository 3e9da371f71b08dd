"""The bare libzmq forwarder raw pyzmq is measured through: XSUB front, XPUB back, no limits, the proxy's C loop."""

from __future__ import annotations

import sys

import zmq


def main(address: str, front: str, back: str) -> None:
    """Forward until killed."""
    context = zmq.Context()
    publishers = context.socket(zmq.XSUB)
    publishers.set(zmq.RCVHWM, 0)
    publishers.bind(f"tcp://{address}:{front}")
    subscribers = context.socket(zmq.XPUB)
    subscribers.set(zmq.SNDHWM, 0)
    subscribers.bind(f"tcp://{address}:{back}")
    zmq.proxy(publishers, subscribers)


if __name__ == "__main__":
    main(*sys.argv[1:4])
