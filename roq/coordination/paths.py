"""Every znode path, relative to the chroot (DESIGN §4). Names were checked by roq.ids.check_name before they come here."""

from __future__ import annotations

from enum import StrEnum

GCM = "gcm"
LATCH = "gcm/latch"  # Curator LeaderLatch layout
EPOCH = "gcm/epoch"  # its version is the fencing token
LEADER = "gcm/leader"  # ephemeral, roq.wire.gcm.LeaderAddress
HOSTS = "hcm-list/hcm"  # Curator service discovery, ephemeral
HOST_STATES = "hcm-state"
STORES = "stores"  # ephemeral, roq.wire.stores
QUEUES = "queues"
WORK_QUEUES = "work-queues"
POLICIES = "policies"
TRANSACTIONS = "transactions"
LOGS = "logs"
SHUFFLES = "shuffles"
DURABLES = "durables"
PRODUCERS = "producers"
CLOUD = "cloud"
FLEET = "cloud/fleet"  # roq.wire.fleet.FleetRecord
MACHINES = "cloud/machines"
OPTIONS = "options"  # of the whole cluster, roq.wire.options
ACCESS = "access"  # the access list, signed by the cluster's authority
FORMAT = "format"  # roq.wire.tree_format, written by the first leader that looks


class TransactionKind(StrEnum):
    """What a transaction is about; one folder each."""

    QUEUE = "queue"
    EXCHANGE = "exchange"
    HOST = "host"


# All there is.
OWN = (
    GCM,
    "hcm-list",
    HOST_STATES,
    STORES,
    QUEUES,
    WORK_QUEUES,
    POLICIES,
    TRANSACTIONS,
    LOGS,
    SHUFFLES,
    DURABLES,
    PRODUCERS,
    CLOUD,
    OPTIONS,
    ACCESS,
    FORMAT,
)
# Persistent folders a new cluster starts with; the leading GCM makes them.
SKELETON = (
    GCM,
    LATCH,
    EPOCH,
    HOSTS,
    HOST_STATES,
    STORES,
    QUEUES,
    WORK_QUEUES,
    POLICIES,
    *(f"{TRANSACTIONS}/{kind}" for kind in TransactionKind),
    LOGS,
    SHUFFLES,
    DURABLES,
    PRODUCERS,
    CLOUD,
    MACHINES,
    OPTIONS,
)


def epoch() -> str:
    """The GCM's epoch; its version is the fencing token."""
    return EPOCH


def leader() -> str:
    """The leading GCM's address."""
    return LEADER


def hosts() -> str:
    """Folder of all registered hosts."""
    return HOSTS


def host(name: str) -> str:
    """One host's registration (ServiceInstance)."""
    return f"{HOSTS}/{name}"


def host_states() -> str:
    """Folder of what is wanted and what runs, per host."""
    return HOST_STATES


def host_state(name: str) -> str:
    """Folder of one host's assignment and report."""
    return f"{HOST_STATES}/{name}"


def assignment(name: str) -> str:
    """What the GCM wants on a host."""
    return f"{HOST_STATES}/{name}/assignment"


def running(name: str) -> str:
    """What the HCM says runs on its host."""
    return f"{HOST_STATES}/{name}/running"


def stores() -> str:
    """Folder of all stores that are served."""
    return STORES


def store(node_name: str) -> str:
    """One of them, see roq.wire.stores."""
    return f"{STORES}/{node_name}"


def queues() -> str:
    """Folder of all queues."""
    return QUEUES


def queue(name: str) -> str:
    """One queue's record."""
    return f"{QUEUES}/{name}"


def work_queue(name: str) -> str:
    """One work queue's record."""
    return f"{WORK_QUEUES}/{name}"


def policies() -> str:
    """Folder of all scaling policies."""
    return POLICIES


def policy(name: str) -> str:
    """One queue's scaling policy."""
    return f"{POLICIES}/{name}"


def log(id: str) -> str:
    """One replicated log's metadata."""
    return f"{LOGS}/{id}"


def shuffle(id: str) -> str:
    """One shuffle's record; its large parts are below it."""
    return f"{SHUFFLES}/{id}"


def shuffle_part(id: str, name: str) -> str:
    """A chunk of one large part of a shuffle's record; written once."""
    return f"{SHUFFLES}/{id}/{name}"


def held_names(root: str, tapes: str) -> str:
    """Folder of a queue's names of one kind. root: DURABLES or PRODUCERS. tapes: the queue's part of the names of its tapes."""
    return f"{root}/{tapes}"


def held_name(root: str, tapes: str, name: str) -> str:
    """How far one durable subscriber, or one producer, has got."""
    return f"{root}/{tapes}/{name}"


def transactions(kind: TransactionKind) -> str:
    """Folder of the unfinished transactions of one kind."""
    return f"{TRANSACTIONS}/{kind}"


def transaction(kind: TransactionKind, id: str) -> str:
    """One unfinished transaction."""
    return f"{TRANSACTIONS}/{kind}/{id}"


def machine(name: str) -> str:
    """A machine that the provider was asked for."""
    return f"{MACHINES}/{name}"


def logs() -> str:
    """Folder of all replicated logs."""
    return LOGS


def store_cookie(host: str) -> str:
    """Which disk is the host's: roq.log.store.identity."""
    return f"{HOST_STATES}/{host}/disk"
