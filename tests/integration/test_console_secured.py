"""Who gets into `roq console` of a secured cluster, by a card, a link, or a proxy, and what each may do there.

Not covered: which request needs which right (tests/unit/test_rights.py), what passes the gate (tests/unit/test_console.py).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
import websockets

import roq
from roq.runtime.security import CardFile
from roq.tools.authority import Authority
from roq.wire.card import CardRole, Grant, Right
from tests.harness.cards import as_holder
from tests.harness.commands import ROOT
from tests.integration.console_rig import WAIT_SECONDS, Program, RunningConsole, console, next_of, program
from tests.integration.secured_rig import Cluster, started
from tests.integration.test_cli import environment

FOLLOWED = "/v1/follow?of=/v1/queues/orders&of=/v1/queues/other&of=/v1/queues"
EVERYTHING = (Grant(Right.DESCRIBE, "*"), Grant(Right.ADMIN, "*"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("secured-console"), "--hosts", "2") as made:
        with as_holder(made.owner):
            asyncio.run(prepare(made))
        yield made


async def prepare(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_queue("orders")
        await connected.create_queue("other")


@pytest.fixture(scope="module")
def served(secured: Cluster) -> Iterator[RunningConsole]:
    authority = str(secured.folder / "authority.json")
    with console(secured.zookeeper, "--writable", "--authority", authority, ROQ_CARD=str(secured.owner)) as running:
        yield running


def card_of(cluster: Cluster, name: str, *grants: Grant) -> Any:
    """What is presented."""
    return json.loads(cluster.card(name, *grants).read_text())


async def test_who_is_not_signed_in_sees_nothing(served: RunningConsole) -> None:
    async with program(served) as made:
        session = await made.get("/v1/session")
        assert (session["signed_in"], session["login"], session["csrf"], session["name"]) == (False, "card", "", "")
        for path in ("/v1/overview", "/v1/queues", "/v1/events", "/v1/queues/orders/messages", "/v1/access", FOLLOWED):
            assert (await made.get(path, 401))["title"] == "NotSignedIn"
        assert (await made.post("/v1/queues", {"name": "x"}, 401))["title"] == "NotSignedIn"
        made.client.headers["authorization"] = "Bearer nobody"
        assert (await made.get("/v1/overview", 401))["title"] == "NotSignedIn"
        url = served.url.replace("http", "ws") + "/v1/queues/orders/messages/ws"
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url)
        assert refused.value.response.status_code == 401
        assert (await made.client.get("/")).status_code == 200


async def test_a_card_lets_its_holder_do_what_its_rights_say(secured: Cluster, served: RunningConsole) -> None:
    grants = (Grant(Right.ADMIN, "orders"), Grant(Right.DESCRIBE, "orders"))
    async with program(served) as clerk:
        session = await clerk.sign_in(card_of(secured, "clerk", *grants))
        assert (session["name"], session["rights"][0]) == ("clerk", {"right": "admin", "names": "orders"})
        found = await clerk.get("/v1/queues")
        assert [row["queue"] for row in found["rows"]] == ["orders"]
        assert (await clerk.get("/v1/queues/orders"))["summary"]["queue"] == "orders"
        hosts = ("/v1/hosts", "/v1/hosts/host-1", "/v1/stores", "/v1/doctor")
        for path in ("/v1/queues/other", "/v1/overview", "/v1/events", *hosts):
            refused = await clerk.get(path, 403)
            assert refused["title"] == "AccessDenied"
            assert "clerk" in refused["detail"]
        await clerk.ask("PUT", "/v1/queues/orders/policy", json={"policy": {"bounds": {"max_exchanges": 2}}})
        await clerk.ask("PUT", "/v1/queues/other/policy", 403, json={"policy": None})
        await clerk.post("/v1/queues", {"name": "third"}, 403)
        await clerk.post("/v1/hosts/host-1/cordon", None, 403)
        await clerk.post("/v1/queues/orders/messages", {"topic": "t", "text": "x"}, 403)
        await clerk.get("/v1/queues/orders/messages", 403)
        await clerk.get("/v1/queues/orders/messages?start=earliest", 403)
    denied = [("clerk", kind, "AccessDenied") for kind in ("SetPolicy", "CreateQueue", "DrainHost")]
    await served.has_audited(("clerk", "SetPolicy", ""), *denied)
    async with program(served) as talker:
        await talker.sign_in(card_of(secured, "talker", Grant(Right.PUBLISH, "orders"), Grant(Right.SUBSCRIBE, "orders")))
        async with talker.events("/v1/queues/orders/messages") as events:
            await next_of(events, "ready", lambda data: data == {})
            await talker.post("/v1/queues/orders/messages", {"topic": "t", "text": "x"}, 201)
            assert (await next_of(events, "message"))["text"] == "x"
        await talker.get("/v1/queues/orders", 403)


async def test_an_edited_letter_needs_the_right_to_put_and_history_the_right_to_read_it(
    secured: Cluster, served: RunningConsole
) -> None:
    with as_holder(secured.owner):
        async with roq.open_queue(f"roq://{secured.zookeeper}/jobs") as tasks:
            await tasks.put(b"old")
            [task] = await tasks.lease(count=1, wait_seconds=WAIT_SECONDS)
            await task.reject("boom")
    grants = (Grant(Right.ADMIN, "jobs"), Grant(Right.DESCRIBE, "*"))
    async with program(served) as purger:
        await purger.sign_in(card_of(secured, "purger", *grants))
        assert all(row["answers"] for row in await purger.get("/v1/stores"))
        [pattern] = (await purger.get("/v1/work-queues/jobs/dead"))["patterns"]
        place = f"/v1/work-queues/jobs/dead/{pattern['ids'][0]}/redrive"
        assert "`put`" in (await purger.post(place, {"payload": {"text": "new"}}, 403))["detail"]
        assert "_roq.kpi" in (await purger.get("/v1/queues/orders/history", 403))["detail"]
        assert "_roq.kpi" in (await purger.post("/v1/queues/orders/policy/what-if", {"policy": {}}, 403))["detail"]
        assert (await purger.get("/v1/work-queues/jobs"))["dead"] == 1
    async with program(served) as editor:
        await editor.sign_in(card_of(secured, "editor", *grants, Grant(Right.PUT, "jobs"), Grant(Right.READ, "_roq.*")))
        assert (await editor.post(place, {"payload": {"text": "new"}}))["edited"] is True
        assert (await editor.get("/v1/work-queues/jobs"))["dead"] == 0
        assert (await editor.get("/v1/queues/orders/history", 409))["title"] == "NotRecorded"


async def test_a_page_is_signed_in_by_its_cookie_and_signs_out(secured: Cluster, served: RunningConsole) -> None:
    async with program(served) as page:
        answer = await page.client.post("/v1/session", json=card_of(secured, "person", *EVERYTHING))
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
        assert (await page.get("/v1/session"))["name"] == "person"
        assert (await page.post("/v1/queues/orders/stop", None, 403))["title"] == "CsrfMissing"
        page.client.headers["x-csrf-token"] = answer.json()["csrf"]
        await page.post("/v1/queues/orders/stop", status=204)
        await page.post("/v1/queues/orders/start", status=204)
        await page.ask("DELETE", "/v1/session", 204)
        assert (await page.get("/v1/overview", 401))["title"] == "NotSignedIn"


async def test_resources_are_followed_with_the_rights_of_who_does_until_they_sign_out(
    secured: Cluster, served: RunningConsole
) -> None:
    async with program(served) as page:
        answer = await page.client.post("/v1/session", json=card_of(secured, "follower", Grant(Right.DESCRIBE, "orders")))
        page.client.headers["x-csrf-token"] = answer.json()["csrf"]
        async with page.events(FOLLOWED) as events:
            told = {data["of"]: data for data in [await next_of(events, "answer") for _ in range(3)]}
            assert told["/v1/queues/orders"]["body"]["summary"]["queue"] == "orders"
            refused = told["/v1/queues/other"]
            assert (refused["status"], refused["body"]["title"]) == (403, "AccessDenied")
            assert [row["queue"] for row in told["/v1/queues"]["body"]["rows"]] == ["orders"]
            await page.ask("DELETE", "/v1/session", 204)
            assert "is over" in (await next_of(events, "cut"))["reason"]
        await page.get(FOLLOWED, 401)


async def test_what_is_no_card_of_this_cluster_lets_nobody_in(secured: Cluster, served: RunningConsole, tmp_path: Path) -> None:
    good, another = card_of(secured, "good", *EVERYTHING), card_of(secured, "another", *EVERYTHING)
    foreign = Authority.init(tmp_path / "foreign.json").issue("good", CardRole.CLIENT, EVERYTHING)
    host = secured.authority.issue("host-9", CardRole.HOST, ())
    over = secured.authority.issue("over", CardRole.CLIENT, EVERYTHING, days=-1)
    wrong: list[tuple[Any, str]] = [
        ({**good, "secret": another["secret"]}, "shown by somebody else"),
        ({**good, "secret": ""}, "a secret key of 0 bytes"),
        ({**good, "card": "x"}, "no card file"),
        (encoded(foreign), "another authority"),
        (encoded(host), "is that of a host"),
        (encoded(over), "expired"),
        ({"ticket": "x"}, "a secret key"),
    ]
    async with program(served) as made:
        for body, told in wrong:
            refused = await made.post("/v1/session", body, 403)
            assert (refused["title"], told in refused["detail"]) == ("AccessDenied", True), refused
        assert (await made.get("/v1/session"))["signed_in"] is False
        for _ in range(3):
            await made.post("/v1/session", {"ticket": "x"}, 403)
        assert (await made.post("/v1/session", {"ticket": "x"}, 429))["title"] == "TooManyAttempts"
        assert (await made.post("/v1/session", good))["name"] == "good"  # nobody shuts others out by being wrong


def encoded(file: CardFile) -> Any:
    return json.loads(msgspec.json.encode(file))


async def test_a_card_that_is_revoked_ends_its_session_and_its_streams(secured: Cluster) -> None:
    with console(secured.zookeeper, ROQ_CARD=str(secured.owner)) as running:
        async with program(running) as made:
            card = card_of(secured, "leaver", *EVERYTHING, Grant(Right.SUBSCRIBE, "orders"))
            await made.sign_in(card)
            async with (
                made.events("/v1/events") as events,
                made.events("/v1/queues/orders/messages") as messages,
                made.events(FOLLOWED) as followed,
            ):
                await next_of(events, "overview")
                await next_of(followed, "answer")
                assert secured.authority.revoke("leaver") == 1
                with as_holder(secured.owner):
                    async with roq.connect(secured.zookeeper) as connected:
                        await connected.set_access(secured.authority.access_list())
                for stream in (events, messages, followed):
                    assert "revoked" in (await next_of(stream, "cut"))["reason"]
            assert (await made.get("/v1/overview", 401))["title"] == "NotSignedIn"
            assert "revoked" in (await made.post("/v1/session", card, 403))["detail"]


async def test_cards_are_listed_without_their_keys(secured: Cluster, served: RunningConsole) -> None:
    mine = card_of(secured, "looker", *EVERYTHING)
    with console(
        secured.zookeeper, "--authority", str(secured.folder / "authority.json"), ROQ_CARD=str(secured.owner)
    ) as running:
        async with program(running) as made:
            await made.sign_in(mine)
            answer = await made.client.get("/v1/access")
            cards = {card["name"]: card for card in answer.json()["cards"]}
            assert {"owner", "gcm-1", "host-1", "looker"} <= cards.keys()
            assert (cards["looker"]["signed_in"], cards["owner"]["signed_in"]) == (True, False)
            assert {"right": "admin", "names": "*"} in cards["looker"]["rights"]
            assert not any(secret in answer.text for secret in (mine["secret"], mine["card"], mine["server"]))
    assert not any(mine["secret"] in line for line in served.lines + running.lines)


async def test_a_link_signs_in_as_the_consoles_card_once(secured: Cluster) -> None:
    with console(secured.zookeeper, "--link", ROQ_CARD=str(secured.owner)) as running:
        ticket = running.until("sign in as owner").rpartition("ticket=")[2].strip()
        async with program(running) as made:
            assert (await made.sign_in({"ticket": ticket}))["name"] == "owner"
            assert (await made.get("/v1/overview"))["hosts"]["total"] == 2
            made.client.headers.pop("authorization")
            assert "was used" in (await made.post("/v1/session", {"ticket": ticket}, 403))["detail"]


async def test_a_proxy_says_who_it_is_and_a_file_what_that_name_may(secured: Cluster, tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text('alice = ["admin orders", "describe *"]\n"*" = ["describe *"]\n')
    options = ("--writable", "--trust-header", "X-Forwarded-User", "--trusted-proxy", "127.0.0.1", "--users", str(users))
    with console(secured.zookeeper, *options, ROQ_CARD=str(secured.owner)) as running:
        async with program(running) as alice, program(running) as bob:
            assert (await alice.get("/v1/session"))["signed_in"] is False
            await alice.get("/v1/overview", 401)
            await alice.get("/v1/overview", 401, headers=[("x-forwarded-user", "alice"), ("x-forwarded-user", "bob")])
            for one, name in ((alice, "alice"), (bob, "bob")):
                one.client.headers["x-forwarded-user"] = name
                session = await one.get("/v1/session")
                assert (session["name"], session["login"], session["expires"]) == (name, "proxy", None)
                one.client.headers["x-csrf-token"] = session["csrf"]
            policy = {"policy": {"bounds": {"max_exchanges": 3}}}
            await alice.ask("PUT", "/v1/queues/orders/policy", json=policy)
            assert "bob needs" in (await bob.ask("PUT", "/v1/queues/orders/policy", 403, json=policy))["detail"]
            assert (await bob.get("/v1/overview"))["hosts"]["total"] == 2
            bob.client.headers["x-forwarded-user"] = "alice"  # the session is bob's
            assert (await bob.ask("PUT", "/v1/queues/orders/policy", 403, json=policy))["title"] == "CsrfMissing"
        await running.has_audited(("alice", "SetPolicy", ""))


async def test_it_speaks_tls(secured: Cluster, tmp_path: Path) -> None:
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(key))
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    with console(secured.zookeeper, "--certificate", str(chain), "--key", str(key), ROQ_CARD=str(secured.owner)) as running:
        assert running.url.startswith("https://")
        async with program(running, verify=trusting) as made, asyncio.timeout(WAIT_SECONDS):
            answer = await made.client.post("/v1/session", json=card_of(secured, "tls", *EVERYTHING))
            assert "Secure" in answer.headers["set-cookie"].split("; ")
            assert (await signed_in(made))["name"] == "tls"


async def signed_in(made: Program) -> Any:
    return await made.get("/v1/session")


def test_a_console_without_a_card_does_not_start(secured: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "roq.cli", "console", "-c", secured.zookeeper, "--listen", "127.0.0.1:0"]
    nobody = {**environment(), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=nobody, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("roq: AccessDenied: this cluster takes only who shows a card")
