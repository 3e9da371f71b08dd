"""Commands that change something and need no cluster: with --json they print one object, what was changed, and nothing else.

Not covered: commands of a cluster, see CHANGES in tests/integration/test_cli_operator.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner, Result

from roq.cli import access, ca, host
from roq.cli.main import app
from roq.runtime.security import load_card
from roq.tools.authority import Authority
from roq.wire.card import CardRole

KEY = "ab" * 32
NO_TASK = "00000000-0000-8000-8000-000000000000"


def roq(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def changed(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The one object on standard output; without an error nothing is on the other stream."""
    done = roq(*arguments, "--json", code=code)
    assert done.stdout.count("\n") == 1
    assert bool(done.stderr) == bool(code)
    return dict(json.loads(done.stdout))


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    path = tmp_path / "authority.json"
    assert changed("ca", "init", "--authority", str(path)) == {"authority": str(path), "made": True}
    return path


# --- authority and cards ----------------------------------------------------------------------------------------------


def test_an_authority_signs_and_rotates(authority: Path, tmp_path: Path) -> None:
    card, flag = tmp_path / "host-1.card", ("--authority", str(authority))
    signed = changed("ca", "sign", "host", "host-1", str(card), *flag)
    (issued,) = Authority.load(authority).issued
    assert signed == {"name": "host-1", "signed": True, "role": "host", "id": issued.id, "card": str(card)}
    assert load_card(card).card.id == issued.id
    assert changed("ca", "rotate", *flag) == {"authority": str(authority), "rotated": True}
    pem = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(pem))
    trusted = changed("ca", "zookeeper", str(pem), *flag)
    assert trusted == {"authority": str(authority), "tls": True, "certificate": str(pem)}
    done = roq("ca", "sign", "client", "alice", str(card), "--json", *flag, code=2)
    assert not done.stdout


def test_cards_are_granted_and_revoked_and_programs_admitted(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = []
    for module in (access, ca):
        monkeypatch.setattr(module, "push_access", lambda known, cluster: pushed.append((known.path, cluster)))
    card, flag = tmp_path / "alice.card", ("--authority", str(authority))
    granted = changed("access", "grant", "alice", "publish", "orders.*", "--out", str(card), *flag)
    assert granted == {"name": "alice", "granted": True, "id": load_card(card).card.id, "card": str(card)}
    admitted = changed("access", "admit", "old", KEY, "subscribe", "*", *flag)
    known = Authority.load(authority)
    assert [(one.id, one.role) for one in known.issued][-1] == (admitted["id"], CardRole.CLIENT)
    assert admitted == {"name": "old", "admitted": True, "id": admitted["id"], "server_key": known.server_key().hex()}
    assert changed("access", "revoke", granted["id"], *flag) == {"name": granted["id"], "revoked": 1}
    assert changed("access", "push", "-c", "zk:1", *flag) == {"authority": str(authority), "pushed": True}
    assert changed("ca", "revoke", "old", *flag) == {"name": "old", "revoked": 1}
    assert pushed == [(authority, None), (authority, None), (authority, "zk:1"), (authority, None)]
    assert roq("access", "push", *flag).stderr == "the cluster has the access list\n"
    refused = roq("access", "revoke", "nobody", "--json", *flag, code=1)
    assert (refused.stdout, refused.stderr.partition(":")[0]) == ("", "roq")


# --- contexts ---------------------------------------------------------------------------------------------------------


def test_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ROQ_CLUSTER", raising=False)
    added = {"context": "here", "added": True, "address": "a:1", "card": "", "in_use": True}
    assert changed("context", "add", "here", "a:1") == added
    assert changed("context", "add", "far", "b:1")["in_use"] is False
    used = {"context": "far", "in_use": True, "address": "b:1", "cluster": "b:1", "why": "context far is in use"}
    assert changed("context", "use", "far") == used
    monkeypatch.setenv("ROQ_CLUSTER", "c:1")
    assert changed("context", "use", "far") == {**used, "cluster": "c:1", "why": "ROQ_CLUSTER"}
    assert changed("context", "rm", "here") == {"context": "here", "removed": True, "was_in_use": False}
    assert changed("context", "remove", "far") == {"context": "far", "removed": True, "was_in_use": True}


# --- tasks in a folder ------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """The address of a work queue that was made here."""
    address = f"file://{tmp_path}/tasks"
    made = changed("task", "create", address, "--max-attempts", "3")
    assert (made["address"], made["created"], made["settings"]["max_attempts"]) == (address, True, 3)
    assert changed("task", "create", address)["created"] is False
    return address


def leased(address: str, count: int) -> list[str]:
    """Tokens of new tasks."""
    roq("task", "put", address, *map(str, range(count)))
    return [one["token"] for one in json.loads(roq("task", "lease", address, "-n", str(count), "--json").stdout)]


def test_what_becomes_of_leases(tasks: str) -> None:
    done, late, bad = leased(tasks, 3)
    assert changed("task", "ack", tasks, done) == {"address": tasks, "acked": 1, "lost": []}
    extended = changed("task", "extend", tasks, late, "--seconds", "90")
    (later,) = extended.pop("tokens")
    assert extended == {"address": tasks, "extended": 1, "lost": []}
    assert changed("task", "release", tasks, later) == {"address": tasks, "released": 1, "lost": []}
    assert changed("task", "reject", tasks, bad, "--error", "bad") == {"address": tasks, "rejected": 1, "lost": []}
    status = json.loads(roq("task", "status", tasks, "--json").stdout)["status"]
    assert [status[name] for name in ("ready", "leased", "dead", "completed")] == [1, 0, 1, 1]


@pytest.mark.parametrize(("verb", "what"), [("ack", "acked"), ("extend", "extended"), ("release", "released")])
def test_lost_leases_are_named_before_the_error(tasks: str, verb: str, what: str) -> None:
    gone, live = leased(tasks, 2)
    roq("task", "ack", tasks, gone)
    said = changed("task", verb, tasks, gone, live, code=1)
    assert (said[what], said["lost"]) == (1, [gone])
    assert len(said.get("tokens", [""])) == 1


def test_all_tasks_at_once(tasks: str) -> None:
    for token in leased(tasks, 4)[:2]:
        roq("task", "reject", tasks, token)
    one, _ = json.loads(roq("task", "dead", "ls", tasks, "--json").stdout)
    assert changed("task", "dead", "requeue", tasks, one["id"], NO_TASK, code=1) == {"address": tasks, "requeued": 1}
    assert changed("task", "dead", "rm", tasks, "--all") == {"address": tasks, "removed": 1}
    assert changed("task", "release-all", tasks) == {"address": tasks, "released": 2}
    assert changed("task", "purge", tasks, "--yes") == {"address": tasks, "removed": 3}


# --- hosts and clusters that are not there ----------------------------------------------------------------------------


def test_a_host_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(processes=(1, 2, 3))
    monkeypatch.setattr(host, "with_cluster", lambda cluster, work: SimpleNamespace(report=report))
    said = "host-2 is stopped: roq-hcm and the 3 processes that ran there\n"
    assert (roq("host", "stop", "host-2").stdout, roq("host", "stop", "host-2").stderr) == ("", said)
    assert changed("host", "stop", "host-2") == {"host": "host-2", "stopped": True, "processes": 3}


def test_nothing_to_stop(tmp_path: Path) -> None:
    nothing = {"stopped": False, "directory": str(tmp_path), "cluster": "", "orphan": False, "killed": {}}
    assert changed("down", "--dir", str(tmp_path)) == nothing


def test_an_error_leaves_standard_output_empty() -> None:
    for words in (("queue", "rm", "q"), ("host", "cordon", "h"), ("policy", "set", "q", "/nowhere.toml")):
        done = CliRunner().invoke(app, [*words, "-c", "not an address", "--json"])
        assert (done.exit_code, done.stdout) == (1, "")
