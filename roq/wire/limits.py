"""Limits of the protocol, each with its reason."""

from __future__ import annotations

BATCH_BYTES = (
    128 * 1024
)  # a batch leaves when it has this many bytes: large enough to pay for a frame, small enough for latency
FRAME_BYTES_MAX = 1024 * 1024  # default largest data frame: one frame never occupies a link for long
FRAME_BYTES_CEILING = 64 * 1024 * 1024  # what a queue may be configured to at most
FRAME_OVERHEAD_BYTES = 512  # topic (255), separator, header and list head fit in this
CONTROL_BYTES_MAX = 8 * 1024 * 1024  # a row of a shuffle fits, nothing absurd does; what grows is told in parts
UNFINISHED_BYTES_MAX = 4 * CONTROL_BYTES_MAX  # of messages that are coming to one server, from all its peers together
SUBSCRIPTION_BYTES_MAX = 4096  # what a publishing end is told: a topic or a command
PROPERTIES_BYTES_MAX = 16 * 1024  # what an end says of itself when it connects: its card
SUBSCRIPTIONS_MAX = 10_000  # of one connection
PEERS_MAX = 20_000  # connections of one port; a load generator opens many
BLOCK_BYTES_QUEUED = 1024 * 1024  # in an Exchange for one subscriber, with overflow "block"; then publishers wait
DROP_BYTES_QUEUED = 16 * 1024 * 1024  # the same with overflow "drop", or two frames if that is more; then they are dropped
SUBSCRIBER_BYTES_QUEUED = 1024 * 1024  # frames of one Exchange that a subscriber has not looked at: it reads no more
CONTROL_MESSAGES_QUEUED = 10_000  # high-water mark of control sockets: one message per client of a large queue
LISTEN_BACKLOG = 4096  # connections that come at once, as a large queue's members do; the kernel drops more (and those above
# net.core.somaxconn): who was dropped tries again after 1, 3, 7, 15 and 31 s
REQUESTS_IN_FLIGHT = 1_000  # per server: more are refused at once rather than queued without bound
REQUESTS_OF_ONE = 500  # … and of one client, by its card's name, or by connection: nobody keeps the others out
DECISIONS_KEPT = 50  # scaling decisions a Monitor remembers for `roq queue show`
WATERMARK_TOPICS_MAX = 1_000  # topics named in one watermark frame
