"""`roq console` over HTTP: what it shows of a real cluster, what it changes there, who it turns away, and streams of messages.

Not covered: secured clusters (test_console_secured.py), a cluster that goes away, history (test_console_outage.py), pages.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import websockets

import roq
from tests.harness.commands import ROOT
from tests.integration.console_rig import WAIT_SECONDS, Program, RunningConsole, console, next_of, program, quoted
from tests.integration.running import RunningCluster
from tests.integration.test_cli import environment

ODD = """q'"<script>alert(1)</script>%41?#&"""


@pytest.fixture(scope="module")
def served(cluster: RunningCluster) -> Iterator[RunningConsole]:
    with console(cluster.zookeeper, "--writable") as running:
        yield running


def odd_name() -> str:
    return ODD.replace("/", "") + uuid.uuid4().hex[:8]


@pytest.mark.quick
async def test_what_there_is_is_shown_whatever_its_name(asked: Program, client: roq.Cluster) -> None:
    name = odd_name()
    created = await asked.post("/v1/queues", {"name": name, "overflow": "block"}, 201)
    assert (created["queue"], created["ready"], created["overflow"]) == (name, True, "block")
    try:
        found = await asked.get("/v1/queues", params={"search": name[:-4].upper()})
        assert [row["queue"] for row in found["rows"]] == [name]
        detail = await asked.get(f"/v1/queues/{quoted(name)}")
        assert (detail["summary"]["queue"], len(detail["exchanges"]), detail["recorded"]) == (name, 1, False)
        assert (await asked.get(f"/v1/queues/{quoted(name)}/tapes", 409))["title"] == "NotRecorded"
        overview = await asked.until("/v1/overview", lambda found: found["rates"] is not None)
        assert overview["hosts"] == {"total": 2, "alive": 2, "draining": 0}
        hosts = await asked.get("/v1/hosts")
        shown = [await asked.get(f"/v1/hosts/{row['host']}") for row in hosts]
        assert all(host["capacity"]["disk_free_bytes"] > 0 for host in shown)
        [exchange] = detail["exchanges"]
        process = f"exchange/{name}/{exchange['exchange']}"
        log = await asked.get(f"/v1/hosts/{exchange['host']}/logs", params={"process": process, "bytes": 2000})
        assert log["bytes"] <= min(log["size"], 2000)
        assert {json.loads(line)["process"] for line in log["text"].splitlines()} <= {process}
        assert "no log" in (await asked.get(f"/v1/hosts/{exchange['host']}/logs?process=../../x", 400))["detail"]
    finally:
        await asked.ask("DELETE", f"/v1/queues/{quoted(name)}", 204)
    assert not await client.queue_exists(name)
    missing = await asked.get(f"/v1/queues/{quoted(name)}", 404)
    assert (missing["title"], missing["status"]) == ("QueueNotFound", 404)


async def test_the_rest_of_a_cluster_is_shown(asked: Program, cluster: RunningCluster) -> None:
    health = await asked.get("/v1/doctor")
    assert {"Leader", "Hosts"} <= {finding["subject"] for finding in health["findings"]}
    zookeeper = await asked.get("/v1/zookeeper")
    assert [server["verdict"] for server in zookeeper["servers"]] == ["good"]
    assert len(zookeeper["candidates"]) == 1
    assert (await asked.get("/v1/access"))["security"] is False
    assert await asked.get("/v1/shuffles") == []
    assert (await asked.get("/v1/shuffles/none", 404))["title"] == "ShuffleNotFound"
    assert (await asked.get("/v1/hosts/none", 404))["title"] == "HostNotFound"
    assert (await asked.get("/v1/work-queues/none", 404))["title"] == "WorkQueueNotFound"
    session = await asked.get("/v1/session")
    assert (session["login"], session["writable"], session["cluster"]) == ("none", True, cluster.zookeeper)
    document = await asked.get("/v1/openapi.json")
    assert len(document["paths"]) > 25
    assert (await asked.get("/v1/queues?limit=100000", 400))["title"] == "InvalidConfiguration"
    assert (await asked.get("/v1/nothing", 404))["title"] == "NothingHere"
    assert (await asked.ask("PATCH", "/v1/queues", 405))["title"] == "NothingHere"


async def test_many_queues_come_in_pages(asked: Program, client: roq.Cluster) -> None:
    prefix = f"page-{uuid.uuid4().hex[:8]}-"
    names = [f"{prefix}{number}" for number in range(5)]
    await asyncio.gather(*(client.create_queue(name) for name in names))
    try:
        await client.stop_queue(names[2])
        first = await asked.until(f"/v1/queues?search={prefix}&limit=2", lambda found: found["total"] == 5)
        rest = await asked.get("/v1/queues", params={"search": prefix, "limit": 50, "offset": 2})
        assert (first["total"], rest["total"]) == (5, 5)
        assert [row["queue"] for row in first["rows"] + rest["rows"]] == names
        stopped = await asked.until(f"/v1/queues?search={prefix}&state=stopped", lambda found: found["total"] == 1)
        assert stopped["rows"][0]["queue"] == names[2]
        await asked.post(f"/v1/queues/{names[2]}/start", status=204)
        await asked.until(f"/v1/queues?search={prefix}&state=stopped", lambda found: found["total"] == 0)
        busiest = await asked.get("/v1/queues", params={"search": prefix, "sort": "-messages_per_second"})
        assert busiest["total"] == 5
    finally:
        await asyncio.gather(*(client.remove_queue(name) for name in names))


async def test_a_policy_is_changed_and_hosts_are_cordoned(
    asked: Program, client: roq.Cluster, queue: str, served: RunningConsole
) -> None:
    before = await asked.get(f"/v1/queues/{queue}/policy")
    assert before["policy"]["exchange"]["max_messages_per_second"] is None
    assert {field["name"] for field in before["fields"]} >= {"exchange.max_messages_per_second", "bounds.max_exchanges"}
    changed = {"exchange": {"max_messages_per_second": 5000}, "bounds": {"max_exchanges": 2}}
    after = await asked.ask("PUT", f"/v1/queues/{queue}/policy", json={"policy": changed})
    assert after["policy"]["exchange"]["max_messages_per_second"] == 5000
    assert (await client.get_policy(queue)).exchange.max_messages_per_second == 5000
    wrong = {"policy": {"exchange": {"max_messages_per_second": -1}}}
    assert (await asked.ask("PUT", f"/v1/queues/{queue}/policy", 400, json=wrong))["title"] == "InvalidPolicy"
    await asked.ask("PUT", f"/v1/queues/{queue}/policy", 400, json={"policy": {"exchange": {"max_speed": 1}}})
    await asked.ask("PUT", f"/v1/queues/{queue}/policy", json={"policy": None})
    assert await client.get_policy(queue) == roq.Policy()
    host = (await client.hosts())[0].host
    await asked.post(f"/v1/hosts/{host}/cordon", status=204)
    await asked.until("/v1/hosts", lambda rows: any(row["draining"] for row in rows))
    await asked.post(f"/v1/hosts/{host}/uncordon", status=204)
    await asked.post("/v1/hosts/none/cordon", status=404)
    failed = ("anybody", "SetPolicy", "InvalidPolicy"), ("anybody", "DrainHost", "HostNotFound")
    await served.has_audited(("anybody", "SetPolicy", ""), ("anybody", "DrainHost", ""), *failed)


# --- the desk for dead letters ----------------------------------------------------------------------------------------------


async def kill_tasks(address: str, errors: dict[bytes, str]) -> None:
    """Put them, and make each a dead letter with its error."""
    async with roq.open_queue(address) as tasks:
        for payload in errors:
            await tasks.put(payload, headers={"trace": "t-1"}, priority=3)
        for _ in errors:
            [task] = await tasks.lease(count=1, wait_seconds=WAIT_SECONDS)
            await task.reject(errors[task.payload])


async def test_dead_letters_are_told_apart_by_their_cause_edited_and_redriven(
    asked: Program, cluster: RunningCluster, client: roq.Cluster, served: RunningConsole
) -> None:
    name = f"desk-{uuid.uuid4().hex[:8]}"
    address = f"roq://{cluster.zookeeper}/{name}"
    errors = {b'{"order": %d}' % number: f"timeout after {number} s" for number in range(1, 6)}
    try:
        await kill_tasks(address, {**errors, b"\xff\x00": "KeyError: 'sku'"})
        row = await asked.get(f"/v1/work-queues/{name}")
        assert (row["dead"], row["waiting"], row["group"], row["ready"]) == (6, 0, "", True)
        place = f"/v1/work-queues?search={name}&kind=work"
        await asked.until(place, lambda found: [one["dead"] for one in found["rows"]] == [6])
        assert (await asked.get("/v1/work-queues", params={"search": name, "kind": "group"}))["total"] == 0
        desk = await asked.get(f"/v1/work-queues/{name}/dead")
        assert [(one["pattern"], one["count"]) for one in desk["patterns"]] == [
            ("timeout after # s", 5),
            ("KeyError: 'sku'", 1),
        ]
        timeouts, other = desk["patterns"]
        assert timeouts["example"]["payload"] == {"encoding": "json", "text": '{"order": 1}', "bytes": 12, "cut": False}
        assert timeouts["example"]["headers"] == {"trace": "t-1"}
        assert other["example"]["payload"]["encoding"] == "base64"
        await redrive_one_edited(asked, address, name, timeouts)
        done = await asked.post(f"/v1/work-queues/{name}/dead/requeue", {"pattern": timeouts["id"]})
        assert done == {"done": 4, "left": 1}
        done = await asked.post(f"/v1/work-queues/{name}/dead/remove", {"ids": other["ids"]})
        assert done == {"done": 1, "left": 0}
        assert (await asked.post(f"/v1/work-queues/{name}/dead/requeue", {"ids": ["x"], "all": True}, 400))["title"]
        assert await asked.post(f"/v1/work-queues/{name}/dead/requeue", {"all": True}) == {"done": 0, "left": 0}
        ready = await asked.get(f"/v1/work-queues/{name}/tasks", params={"state": "ready"})
        assert sorted(one["payload"]["text"] for one in ready) == [f'{{"order": {number}}}' for number in range(2, 6)]
        edits = ("anybody", "EditDeadLetter", ""), ("anybody", "EditDeadLetter", "TaskNotFound")
        await served.has_audited(("anybody", "RequeueDeadLetters", ""), ("anybody", "RemoveDeadLetters", ""), *edits)
    finally:
        await client.remove_work_queue(name)


async def redrive_one_edited(asked: Program, address: str, name: str, pattern: dict[str, Any]) -> None:
    first = pattern["ids"][0]
    place = f"/v1/work-queues/{name}/dead/{first}/redrive"
    assert "JSON" in (await asked.post(place, {"payload": {"text": "{", "encoding": "json"}}, 400))["detail"]
    done = await asked.post(place, {"payload": {"text": '{"order": 100}', "encoding": "json"}})
    assert done["edited"] is True
    assert (await asked.post(place, {}, 404))["title"] == "TaskNotFound"
    async with roq.open_queue(address) as tasks:
        [task] = await tasks.lease(count=1, wait_seconds=WAIT_SECONDS)
        assert (task.payload, task.headers, task.priority, task.id) == (b'{"order": 100}', {"trace": "t-1"}, 3, done["id"])
        await task.ack()


async def test_a_groups_letter_is_published_again_only_if_that_is_said(asked: Program, client: roq.Cluster) -> None:
    name = f"kept-{uuid.uuid4().hex[:8]}"
    await client.create_queue(name, record=roq.Record())
    try:
        await client.create_group(name, "billing", settings=roq.TaskSettings())
        async with client.publisher(name, confirm="stored") as publisher:
            await publisher.publish("eu.a", b"bad")
            await publisher.publish("eu.b", b"worse")
        async with client.subscriber(name, group="billing") as member, asyncio.timeout(WAIT_SECONDS):
            for _ in range(2):
                message = await anext(member)
                await message.reject("no such customer 7")
        group = quoted(f"{name}@billing")
        [pattern] = (await asked.get(f"/v1/work-queues/{group}/dead"))["patterns"]
        assert (pattern["pattern"], pattern["count"]) == ("no such customer #", 2)
        edit = {"payload": {"text": "good"}}
        first, second = pattern["ids"]
        assert "republish" in (await asked.post(f"/v1/work-queues/{group}/dead/{first}/redrive", edit, 400))["detail"]
        await asked.post(f"/v1/work-queues/{group}/dead/{first}/redrive", {**edit, "republish": True})
        assert (await asked.post(f"/v1/work-queues/{group}/dead/{second}/redrive", {}))["id"] == second
        async with client.subscriber(name, group="billing") as member, asyncio.timeout(WAIT_SECONDS):
            found = set()
            for _ in range(2):
                message = await anext(member)
                found.add((message.topic, message.payload))
                await message.ack()
        assert len(found) == 2
        assert any(payload == b"good" for _, payload in found)
        assert (await asked.get(f"/v1/work-queues/{group}"))["dead"] == 0
        shown = await asked.get(f"/v1/queues/{name}")
        assert [one["group"] for one in shown["groups"]] == ["billing"]
    finally:
        await client.remove_queue(name)


# --- who is turned away -----------------------------------------------------------------------------------------------------


async def test_a_page_needs_its_sessions_token_and_another_sites_page_gets_nothing(served: RunningConsole) -> None:
    async with program(served) as page:
        session = await page.get("/v1/session")
        cookie = page.client.cookies.jar
        assert [(one.name.startswith("roq_console_"), one.has_nonstandard_attr("HttpOnly")) for one in cookie] == [(True, True)]
        change = {"policy": {"exchange": {"max_messages_per_second": 1}}, "since": "1h"}
        await page.post("/v1/queues/x/policy/what-if", change, 403)
        page.client.headers["x-csrf-token"] = "0" * 64
        assert (await page.post("/v1/queues/x/start", None, 403))["title"] == "CsrfMissing"
        page.client.headers["x-csrf-token"] = session["csrf"]
        assert (await page.post("/v1/queues/none-of-this-name/start", None, 404))["title"] == "QueueNotFound"
        for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            refused = await page.client.post("/v1/queues/x/start", headers=headers)
            assert (refused.status_code, refused.json()["title"]) == (403, "ForeignOrigin")
        form = await page.client.post("/v1/queues", data={"name": "x"})
        assert (form.status_code, form.json()["title"]) == (415, "WrongContentType")
        rebound = await page.client.get("/v1/overview", headers={"host": "evil.example"})
        assert (rebound.status_code, rebound.json()["title"]) == (421, "UnknownHost")
        page.client.headers["authorization"] = "Bearer of-a-proxy"  # the page's own token still counts
        assert (await page.post("/v1/queues/none-of-this-name/start", None, 404))["title"] == "QueueNotFound"
        page.client.headers.pop("x-csrf-token")
        assert (await page.post("/v1/queues/x/start", None, 403))["title"] == "CsrfMissing"
        index = await page.client.get("/")
        assert "'self'" in index.headers["content-security-policy"]
        assert "unsafe" not in index.headers["content-security-policy"]
        assert index.headers["x-frame-options"] == "DENY"
        assert (await page.client.get("/v1/session")).headers["cache-control"] == "no-store"
        assert (await page.client.get("/static/../serve.py")).status_code == 404
        assert (await page.client.get("/static/%2e%2e/serve.py")).status_code == 404


async def test_a_body_that_is_too_large_is_not_read(served: RunningConsole) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 1024 * 1024

    async with program(served) as made:
        await made.sign_in()
        headers = {"content-type": "application/json"}
        answer = await made.client.post("/v1/queues", content=pieces(), headers=headers)
        assert (answer.status_code, answer.json()["title"]) == (413, "BodyTooLarge")
        assert (await made.get("/v1/session"))["signed_in"] is True


async def test_a_console_that_only_shows_changes_nothing(cluster: RunningCluster, queue: str, client: roq.Cluster) -> None:
    with console(cluster.zookeeper) as running:
        async with program(running) as made:
            assert (await made.sign_in())["writable"] is False
            for method, path, body in (
                ("POST", f"/v1/queues/{queue}/stop", None),
                ("DELETE", f"/v1/queues/{queue}", None),
                ("PUT", f"/v1/queues/{queue}/policy", {"policy": None}),
                ("POST", "/v1/queues", {"name": "x"}),
                ("POST", f"/v1/queues/{queue}/messages", {"topic": "t", "text": "x"}),
                ("POST", "/v1/work-queues/x/dead/requeue", {"all": True}),
                ("POST", "/v1/hosts/host-1/cordon", None),
            ):
                assert (await made.ask(method, path, 403, json=body))["title"] == "ReadOnlyConsole"
            proposed = {"policy": {"exchange": {"max_messages_per_second": 1}}}
            assert (await made.post(f"/v1/queues/{queue}/policy/what-if", proposed, 409))["title"] == "NotRecorded"
    assert (await client.queue(queue)).record.running


def test_a_port_that_is_taken_is_told_in_a_sentence(cluster: RunningCluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "roq.cli", "console", "-c", cluster.zookeeper, "--listen", f"127.0.0.1:{port}"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"roq: PortTaken: can't bind 127.0.0.1:{port}")


# --- messages ---------------------------------------------------------------------------------------------------------------


async def test_programs_publish_and_subscribe_without_an_sdk(asked: Program, client: roq.Cluster) -> None:
    name = odd_name()
    await client.create_queue(name, record=roq.Record())
    place = f"/v1/queues/{quoted(name)}/messages"
    try:
        async with asked.events(f"{place}?topic=eu.>&topic=us") as events:
            await next_of(events, "ready", lambda data: data == {})
            await asked.post(place, {"topic": "asia", "text": "no"}, 201)
            await asked.post(place, {"topic": "eu.paris", "json": {"price": 1.50}, "headers": {"h": "v"}}, 201)
            data = base64.b64encode(b"\xff").decode()
            stored = await asked.post(place, {"topic": "us", "base64": data, "confirm": "stored"}, 201)
            assert (stored["level"], stored["copies"] >= 1, stored["position"].startswith("p1.")) == ("stored", True, True)
            first, second = await next_of(events, "message"), await next_of(events, "message")
            assert (first["topic"], first["text"], first["headers"]) == ("eu.paris", '{"price":1.5}', {"h": "v"})
            assert (second["topic"], second["base64"]) == ("us", data)
        async with asked.events(f"{place}?start=earliest&where=price%20%3E%201") as events:
            assert (await next_of(events, "message"))["topic"] == "eu.paris"
        for wrong in ({"topic": "", "text": "x"}, {"topic": "t"}, {"topic": "t", "text": "", "base64": ""}):
            await asked.post(place, wrong, 400)
        await asked.post(place, {"topic": "t", "base64": "*"}, 400)
        assert (await asked.post("/v1/queues/none/messages", {"topic": "t", "text": "x"}, 404))["title"] == "QueueNotFound"
        assert (await asked.get(f"{place}?where=price%20%3E", 400))["title"] == "InvalidFilter"
        assert (await asked.get(f"{place}?start=sometime", 400))["title"] == "InvalidConfiguration"
        assert (await asked.get("/v1/queues/none/messages", 404))["title"] == "QueueNotFound"
    finally:
        await client.remove_queue(name)


async def test_a_reader_of_the_past_goes_on_where_it_was(asked: Program, client: roq.Cluster) -> None:
    name = f"past-{uuid.uuid4().hex[:8]}"
    await client.create_queue(name, record=roq.Record())
    try:
        async with client.publisher(name, confirm="stored") as publisher:
            await publisher.publish_many("t", [b"1", b"2"])
        seen, place = [], ""
        async with asked.events(f"/v1/queues/{name}/messages?start=earliest") as events, asyncio.timeout(WAIT_SECONDS):
            async for kind, data in events:
                if kind == "message":
                    seen.append(data["text"])
                if seen == ["1", "2"] and kind == "message":
                    publishing = asyncio.create_task(publish_until_told(client, name))
                if kind == "id":
                    place = data
                    break
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        async with asked.events(f"/v1/queues/{name}/messages?start=earliest", **{"last-event-id": place}) as events:
            again = await next_of(events, "message")
        assert int(again["text"]) > 2
        assert again["text"] not in seen[:2]
    finally:
        await client.remove_queue(name)


async def test_a_slow_reader_of_the_past_is_waited_for(served: RunningConsole, client: roq.Cluster) -> None:
    name, count = f"slow-{uuid.uuid4().hex[:8]}", 100
    host, port = served.url.removeprefix("http://").split(":")
    await client.create_queue(name, record=roq.Record())
    try:
        async with client.publisher(name, confirm="stored") as publisher:
            await publisher.publish_many("t", [b"x" * 200_000] * count)
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(f"GET /v1/queues/{name}/messages?start=earliest HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
        await asyncio.sleep(2)  # nothing is read: more than the buffers hold waits
        found = 0
        async with asyncio.timeout(WAIT_SECONDS):
            while found < count:
                part = await reader.read(1 << 20)
                assert b"event: cut" not in part
                found += part.count(b"event: message")
        writer.close()
        await writer.wait_closed()
    finally:
        await client.remove_queue(name)


async def test_many_publish_at_once(asked: Program, client: roq.Cluster) -> None:
    name, count = f"many-{uuid.uuid4().hex[:8]}", 100
    await client.create_queue(name, record=roq.Record())
    try:
        wanted = {str(number) for number in range(count)}
        bodies = [{"topic": "t", "text": text, "confirm": "stored"} for text in wanted]
        answers = await asyncio.gather(*(asked.post(f"/v1/queues/{name}/messages", body, 201) for body in bodies))
        assert {answer["level"] for answer in answers} == {"stored"}
        async with client.subscriber(name, start="earliest", follow=False) as past:
            assert {message.payload.decode() async for message in past} == wanted
    finally:
        await client.remove_queue(name)


async def publish_until_told(client: roq.Cluster, name: str) -> None:
    number = 2
    async with client.publisher(name, confirm="stored") as publisher:
        while True:
            number += 1
            await publisher.publish("t", str(number).encode(), confirm="stored")
            await asyncio.sleep(0.2)


async def test_a_reader_of_live_messages_that_stands_still_is_cut_and_nobody_waits_for_it(
    served: RunningConsole, client: roq.Cluster, queue: str
) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    payload, count = b"x" * 200_000, 160  # more than the kernel's buffers and the console's
    with socket.create_connection((host, int(port)), WAIT_SECONDS) as stuck:
        request = f"GET /v1/queues/{queue}/messages HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n"
        stuck.sendall(request.encode())
        head = await asyncio.to_thread(stuck.recv, 4096)
        while b"event: ready" not in head:
            head += await asyncio.to_thread(stuck.recv, 4096)
        async with client.subscriber(queue) as reader, client.publisher(queue) as publisher, asyncio.timeout(WAIT_SECONDS):
            taking = asyncio.create_task(take(reader, count))
            for _ in range(count):
                await publisher.publish("t", payload)
            await taking
        came = b""
        stuck.settimeout(WAIT_SECONDS)
        while b"event: cut" not in came:
            part = await asyncio.to_thread(stuck.recv, 65536)
            assert part, came[-200:]
            came = came[-1000:] + part
        assert b"were not read in time" in came


async def take(reader: roq.Subscriber, count: int) -> None:
    for _ in range(count):
        await anext(reader)


async def test_a_websocket_gets_the_same(served: RunningConsole, asked: Program, queue: str) -> None:
    url = served.url.replace("http", "ws") + f"/v1/queues/{queue}/messages/ws?topic=a"
    async with websockets.connect(url) as socket_, asyncio.timeout(WAIT_SECONDS):
        assert json.loads(await socket_.recv()) == {"event": "ready"}
        await asked.post(f"/v1/queues/{queue}/messages", {"topic": "a", "text": "hello"}, 201)
        message = json.loads(await socket_.recv())
        assert (message["event"], message["topic"], message["text"]) == ("message", "a", "hello")
    with pytest.raises(websockets.InvalidStatus) as refused:
        await websockets.connect(url, origin=websockets.Origin("http://evil.example"))
    assert refused.value.response.status_code == 403
    with pytest.raises(websockets.InvalidStatus) as missing:
        await websockets.connect(url.replace(queue, "none"))
    assert missing.value.response.status_code == 404
    assert json.loads(missing.value.response.body or b"")["title"] == "QueueNotFound"


async def test_numbers_and_events_are_live(asked: Program, client: roq.Cluster, queue: str) -> None:
    async with asked.events("/v1/events") as events:
        await next_of(events, "overview", lambda data: data["rates"] is not None)
        changing = asyncio.create_task(stop_and_start(client, queue))  # again: it is told once somebody watches
        stopped = await next_of(events, "cluster", lambda data: data["kind"] == "queue-stopped" and data["queue"] == queue)
        assert stopped["sentence"] == f"queue {queue} was stopped"
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        await client.start_queue(queue)
    async with asked.events(f"/v1/queues/{queue}/kpis") as kpis, client.publisher(queue) as publisher:
        await publisher.publish("t", b"x")
        sample = await next_of(kpis, "kpi", lambda data: data["publishers"] == 1)
        assert len(sample["exchanges"]) == 1
    assert (await asked.get("/v1/queues/none/kpis", 404))["title"] == "QueueNotFound"


async def stop_and_start(client: roq.Cluster, queue: str) -> None:
    while True:
        await client.stop_queue(queue)
        await asyncio.sleep(1)
        await client.start_queue(queue)
        await asyncio.sleep(1)


async def test_streams_end_when_the_console_does(cluster: RunningCluster, queue: str) -> None:
    with console(cluster.zookeeper) as running:
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=WAIT_SECONDS) as client,
            client.stream("GET", f"/v1/queues/{queue}/messages") as messages,
            client.stream("GET", "/v1/events") as events,
        ):
            assert (messages.status_code, events.status_code) == (200, 200)
            stopping = asyncio.create_task(asyncio.to_thread(running.stop))
            told = [(await stream.aread()).decode() for stream in (messages, events)]
            assert all("event: cut" in one and "the console ends" in one for one in told)
            assert await stopping == 0
