"""Limits of the protocol, each with its reason."""

from __future__ import annotations

BATCH_BYTES = (
    128 * 1024
)  # a batch leaves when it has this many bytes: large enough to pay for a frame, small enough for latency
FRAME_BYTES_MAX = 1024 * 1024  # default largest data frame: one frame never occupies a link for long
FRAME_BYTES_CEILING = 64 * 1024 * 1024  # what a queue may be configured to at most
FRAME_OVERHEAD_BYTES = 512  # topic (255), separator, header and list head fit in this
CONTROL_BYTES_MAX = 8 * 1024 * 1024  # the topology of a large cluster fits, nothing absurd does
UNFINISHED_BYTES_MAX = 4 * CONTROL_BYTES_MAX  # of messages that are coming to one server, from all its peers together
SUBSCRIPTION_BYTES_MAX = 4096  # what a PUB is told: a topic or a command
DATA_FRAMES_QUEUED = 32  # high-water mark of data sockets: 32 batches of 128 KiB = 4 MiB per link and side
BACK_FRAMES_QUEUED = 128  # in an Exchange that drops, for one subscriber: bursts of small frames while it is busy
BACK_BYTES_QUEUED = 64 * 1024 * 1024  # there, if every frame is as large as it may be: 64 of the default 1 MiB; but 32 at least
FRONT_FRAMES_QUEUED = 4  # there, of one publisher: fewer come in at once than its back has room for
SUBSCRIBER_FRAMES_QUEUED = 8  # inside a subscriber's socket: room is told to the sender after every 4 frames read
CONTROL_MESSAGES_QUEUED = 10_000  # high-water mark of control sockets: one message per client of a large queue
LISTEN_BACKLOG = 4096  # connections that come at once, as a large queue's members do; the kernel drops more (and those above
# net.core.somaxconn): who was dropped tries again after 1, 3, 7, 15 and 31 s
REQUESTS_IN_FLIGHT = 1_000  # per server: more are refused at once rather than queued without bound
DECISIONS_KEPT = 50  # scaling decisions a Monitor remembers for `roq queue show`
WATERMARK_TOPICS_MAX = 1_000  # topics named in one watermark frame
