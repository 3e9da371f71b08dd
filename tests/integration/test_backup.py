"""Backups of real clusters: saved, verified, restored under other names, into another cluster, also after the restore was
killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import roq
from roq.client import backup
from roq.errors import CallError, QueueConflict, QueueNotFound, UnknownFormat
from roq.ids import new_token
from roq.tools.local.cluster import LocalCluster
from tests.harness.documented import block
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli

pytestmark = pytest.mark.timeout(120)
PAYLOADS = [b"payload %d" % number for number in range(2_000)]


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """The name of such a queue, in the cluster that tests share."""
    name = f"test-{new_token()[:12]}"
    await make_recorded(client, name)
    yield name
    await client.remove_queue(name)


async def make_recorded(client: roq.Cluster, name: str) -> None:
    """A recorded queue with messages of two publishers, a policy and a group."""
    policy = roq.policy_from_toml("[bounds]\nmax_exchanges = 3\n")
    await client.create_queue(name, record=roq.Record(days=2, copies=1), policy=policy, overflow="block")
    await client.create_group(name, "billing", "eu.*", order="none", where="headers.kind == 'order'")
    for topic in ("eu.paris", "us"):
        async with client.publisher(name, confirm="stored") as publisher:
            await publisher.publish_many(topic, PAYLOADS)
            await publisher.publish(topic, b"last", {"kind": "order", "raw": b"\xff"})


async def everything(client: roq.Cluster, queue: str) -> list[tuple[str, bytes, dict[str, str | bytes]]]:
    async with client.subscriber(queue, start="earliest", follow=False) as subscriber:
        return [(one.topic, one.payload, one.headers) async for one in subscriber]


@pytest.mark.quick
async def test_what_was_saved_is_restored(client: roq.Cluster, recorded: str, tmp_path: Path) -> None:
    told = list[tuple[str, int, int]]()
    manifest = await backup.save(client, tmp_path / "b", [recorded], progress=lambda *what: told.append(what))
    kept = manifest.queue(recorded)
    assert (kept.messages, kept.missing, kept.recorded) == (2 * len(PAYLOADS) + 2, 0, True)
    assert told[-1] == (recorded, kept.messages, 0)
    assert await asyncio.to_thread(backup.verify, tmp_path / "b") == manifest
    again = f"{recorded}-again"
    try:
        assert await backup.restore(client, tmp_path / "b", [recorded], renamed={recorded: again}) == manifest
        assert await everything(client, again) == await everything(client, recorded)
        made, before = await client.queue(again), await client.queue(recorded)
        assert (made.policy, made.record.settings, made.record.record) == (
            before.policy,
            before.record.settings,
            before.record.record,
        )
        (group,) = await client.groups(again)
        (former,) = await client.groups(recorded)
        assert group.record.spec.source is not None
        assert former.record.spec.source is not None
        assert (group.record.name, group.record.spec.source.where) == (f"{again}@billing", former.record.spec.source.where)
        assert await client.producers(again) == []
        await backup.restore(client, tmp_path / "b", [recorded], renamed={recorded: again})
        assert len(await everything(client, again)) == manifest.queue(recorded).messages
        with pytest.raises(QueueNotFound, match="no queue 'other'"):
            await backup.restore(client, tmp_path / "b", [recorded], renamed={"other": "x"})
    finally:
        await client.remove_queue(again)


async def test_a_cluster_is_restored_into_another_one(tmp_path: Path) -> None:
    """By its own names, once by the program and once by the command, which finds everything done."""
    folder, settings = tmp_path / "b", roq.TaskSettings(max_attempts=2, dedup_seconds=7)
    async with LocalCluster(tmp_path / "one", gcms=1, hosts=1) as cluster, roq.connect(cluster.zookeeper) as old:
        await make_recorded(old, "orders")
        await old.create_queue("prices", overflow="block")
        await old.create_work_queue("jobs", settings=settings)
        await old.set_template(roq.QueueTemplate(overflow=roq.Overflow.BLOCK))
        saved = await backup.save(old, folder)
        was, messages, (group,) = await old.queue("orders"), await everything(old, "orders"), await old.groups("orders")
    async with LocalCluster(tmp_path / "two", gcms=1, hosts=1) as cluster, roq.connect(cluster.zookeeper) as new:
        assert await backup.restore(new, folder) == saved
        assert await everything(new, "orders") == messages
        is_now, (restored,) = await new.queue("orders"), await new.groups("orders")
        assert (is_now.policy, is_now.record.settings, is_now.record.record) == (
            was.policy,
            was.record.settings,
            was.record.record,
        )
        assert restored.record.spec.source is not None
        assert group.record.spec.source is not None
        there = msgspec.structs.replace(restored.record.spec.source, tapes=group.record.spec.source.tapes)  # tapes of its own
        assert (restored.record.name, there) == ("orders@billing", group.record.spec.source)
        assert [one.record.settings.overflow for one in await new.queues() if one.record.name == "prices"] == ["block"]
        assert (await new.work_queue("jobs")).record.spec.settings == settings
        assert (await new.options()).template == roq.QueueTemplate(overflow=roq.Overflow.BLOCK)
        assert await new.producers("orders") == []
        async with new.publisher("orders", confirm="stored") as publisher:
            await publisher.publish("eu.paris", b"after")
        cli = Cli("")
        cli.run("backup", "restore", str(folder), "--cluster", cluster.zookeeper)
        assert len(await everything(new, "orders")) == len(messages) + 1, "restored again, nothing comes twice"
        assert json.loads(cli.run("backup", "verify", str(folder), "--json").stdout)["queues"]


async def test_a_restore_that_was_killed_goes_on(
    client: roq.Cluster, cluster: RunningCluster, recorded: str, tmp_path: Path
) -> None:
    second = f"{recorded}-second"
    await client.create_queue(second, record=roq.Record(copies=1))
    async with client.publisher(second, confirm="stored") as publisher:
        await publisher.publish_many("t", PAYLOADS)
    await client.record_queue(second, None)
    await client.stop_queue(second)
    await client.start_queue(second)
    await backup.save(client, tmp_path / "b", [recorded, second])
    renamed = {name: f"{name}-again" for name in (recorded, second)}
    names = [word for old, new in renamed.items() for word in ("--as", f"{old}={new}")]
    words = [sys.executable, "-m", "roq.cli", "backup", "restore", str(tmp_path / "b"), *names, "--cluster", cluster.zookeeper]
    try:
        for seconds in (0.9, 1.1, 1.3, 1.5, 1.7, 1.9):  # somewhere between its start and its end
            process = await asyncio.create_subprocess_exec(*words, start_new_session=True)
            try:
                async with asyncio.timeout(seconds):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        await backup.restore(client, tmp_path / "b", [recorded, second], renamed=renamed)
        for old, new in renamed.items():
            assert await everything(client, new) == await everything(client, old)
        assert len(await client.groups(renamed[recorded])) == 1
        assert not (await client.queue(renamed[second])).record.recorded
    finally:
        for name in (*renamed.values(), second):
            if await client.queue_exists(name):
                await client.remove_queue(name)


async def test_a_queue_that_is_there_is_never_touched(client: roq.Cluster, recorded: str, tmp_path: Path) -> None:
    name = f"{recorded}-other"
    await client.create_queue(name)
    await client.stop_queue(name)
    await backup.save(client, tmp_path / "b", [recorded, name])
    await client.start_queue(name)
    for renamed in ({recorded: f"{recorded}-again"}, {recorded: name}):
        with pytest.raises(QueueConflict, match="did not make"):
            await backup.restore(client, tmp_path / "b", renamed=renamed)
    assert (await client.queue(name)).record.running
    assert not await client.queue_exists(f"{recorded}-again")
    await client.remove_queue(name)


async def test_what_is_no_backup_or_damaged_is_refused(client: roq.Cluster, recorded: str, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    await backup.save(client, folder, [recorded])
    with pytest.raises(CallError, match="not empty"):
        await backup.save(client, folder, [recorded])
    with pytest.raises(QueueNotFound):
        await backup.save(client, tmp_path / "other", ["nobody"])
    with pytest.raises(UnknownFormat, match=r"no backup.json"):
        backup.read_manifest(tmp_path / "other")
    with pytest.raises(QueueNotFound, match=recorded):
        backup.verify(folder, ["nobody"])
    part = folder / backup.read_manifest(folder).queue(recorded).part
    whole = part.read_bytes()
    for broken in (b"", b"x" + whole, whole[:-1], whole[:100] + b"!" + whole[101:], whole[:20] + b"\xff" * 8 + whole[20:]):
        part.write_bytes(broken)
        with pytest.raises(UnknownFormat, match=r"damaged at byte|not a part"):
            backup.verify(folder)
    part.write_bytes(backup.PART_MAGIC)
    with pytest.raises(UnknownFormat, match="0 of 4002 messages"):
        backup.verify(folder)
    with pytest.raises(UnknownFormat):
        await backup.restore(client, folder, renamed={recorded: f"{recorded}-again"})
    assert not await client.queue_exists(f"{recorded}-again")
    part.unlink()
    with pytest.raises(roq.RoqError, match=part.name):
        backup.verify(folder)
    manifest = json.loads((folder / "backup.json").read_text())
    for text, problem in ((json.dumps(manifest | {"format": 2}), "format 2"), ("{", "damaged"), ("[]", "damaged")):
        (folder / "backup.json").write_text(text)
        with pytest.raises(UnknownFormat, match=problem):
            backup.read_manifest(folder)


async def test_what_is_set_up_without_messages(client: roq.Cluster, tmp_path: Path) -> None:
    name = f"test-{new_token()[:12]}"
    await client.create_queue(name)
    await client.create_work_queue(f"{name}-tasks", settings=roq.TaskSettings(max_attempts=2))
    manifest = await backup.save(client, tmp_path / "b", messages=False)
    assert not manifest.queue(name).part
    assert manifest.options == await client.options()
    assert f"{name}-tasks" in {one.name for one in manifest.work_queues}
    await client.remove_queue(name)
    await client.remove_work_queue(f"{name}-tasks")
    kept = [one.name for one in manifest.queues if one.name == name]
    await backup.restore(client, tmp_path / "b", kept)
    assert await client.queue_exists(name)
    await backup.restore(client, tmp_path / "b", kept)  # it is there by now
    await client.remove_queue(name)


@pytest.mark.quick
def test_from_the_shell(cluster: RunningCluster, tmp_path: Path) -> None:
    cli, name, folder = Cli(cluster.zookeeper), f"test-{new_token()[:12]}", str(tmp_path / "b")
    cli.run("queue", "create", name, "--record", "1d")
    try:
        cli.run("pub", name, "t", "--confirm", "stored", stdin=b"one\ntwo\n")
        saved = cli.run("backup", "save", folder, "--queue", name)
        assert saved.stderr.decode() == f"saved to {folder}: 1 queue, 2 messages (6 B), 0 work queues, 0 groups\n"
        assert name in cli.run("backup", "show", folder).stdout.decode()
        assert json.loads(cli.run("backup", "verify", folder, "--json").stdout)["queues"][0]["messages"] == 2
        cli.run("backup", "restore", folder, "--as", f"{name}={name}-again")
        assert cli.run("queue", "read", f"{name}-again").stdout == b"one\ntwo\n"
    finally:
        cli.run("queue", "rm", name)
        cli.run("queue", "rm", f"{name}-again")


def test_what_the_document_shows(cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = Cli(cluster.zookeeper)
    monkeypatch.chdir(tmp_path)
    cli.run("queue", "create", "orders", "--record", "1d")
    try:
        cli.run("pub", "orders", "t", "--confirm", "stored", stdin=b"one\n")
        for line in block("docs/backup.md", "Backups", 1).splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "roq"
            chosen = ("--queue", "orders") if "save" in words else ()  # others' queues are in this cluster, too
            cli.run(*words, *chosen)
        assert cli.run("queue", "read", "orders-again").stdout == b"one\n"
    finally:
        cli.run("queue", "rm", "orders")
        cli.run("queue", "rm", "orders-again")
