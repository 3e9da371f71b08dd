"""Signing in at the console of a secured cluster, in a real browser: by a card, with its rights, until one signs out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import roq
from roq.runtime.security import write_secret
from roq.tools.authority import Authority
from roq.wire.card import CardRole, Grant, Right
from tests.integration.console_rig import console
from tests.integration.console_scene import Watched
from tests.integration.running import RunningCluster

pytestmark = pytest.mark.timeout(180)
QUEUE = "orders"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path_factory.mktemp("secured"), zookeeper=None, secured=True)

    async def fill() -> None:
        async with roq.connect(running.zookeeper) as cluster:
            await cluster.create_queue(QUEUE)

    running.call(fill())
    yield running
    running.stop()


@pytest.fixture(scope="module")
def address(secured: RunningCluster) -> Iterator[str]:
    """Of a console that may change things, with a card of its own."""
    with console(secured.zookeeper, "--writable", ROQ_CARD=str(secured.local.card)) as running:
        yield running.url


def card(secured: RunningCluster, folder: Path, name: str, *grants: Grant) -> Path:
    """A card file, as `roq access grant` writes it."""
    path = folder / f"{name}.card"
    write_secret(path, Authority.load(secured.local.directory / "authority.json").issue(name, CardRole.CLIENT, list(grants)))
    return path


def test_rights_are_those_of_the_card_until_one_signs_out(
    browser: Browser, secured: RunningCluster, address: str, tmp_path: Path
) -> None:
    watched = Watched(browser, address)
    page = watched.visit(f"queues/{QUEUE}/policy", "Sign in")
    assert watched.violations() == []
    page.get_by_label("Card file").set_input_files(card(secured, tmp_path, "viewer", Grant(Right.DESCRIBE, "*")))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(QUEUE)  # where they wanted to go
    expect(page.locator("#who")).to_contain_text("viewer")
    expect(page.get_by_text(f"Your card has no right admin to {QUEUE}. Looking is allowed.")).to_be_visible()
    expect(page.get_by_role("button", name="Apply", exact=True)).to_be_disabled()
    watched.visit("access", "Access cards")
    expect(page.locator("#page")).to_contain_text("viewer")
    assert watched.violations() == []
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    assert watched.wrong == []
    watched.context.close()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "may not read this cluster's history: keeper needs the right"),
        ((Grant(Right.READ, "_roq.*"),), "keeps no history to replay"),
    ],
)
def test_who_has_the_right_changes_a_policy(
    browser: Browser, secured: RunningCluster, address: str, tmp_path: Path, more: tuple[Grant, ...], told: str
) -> None:
    watched = Watched(browser, address)
    page = watched.visit("", "Sign in")
    keeper = card(secured, tmp_path, "keeper", Grant(Right.DESCRIBE, "*"), Grant(Right.ADMIN, "ord*"), *more)
    page.get_by_label("Card file").set_input_files(keeper)
    page.get_by_role("button", name="Sign in").click()
    watched.visit(f"queues/{QUEUE}/policy", QUEUE)
    page.get_by_label("Exchanges, at most").fill("7")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_text(told)).to_be_visible()
    page.get_by_role("button", name="Apply", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    expect(page.get_by_text("It holds from the next second on")).to_be_visible()

    async def read() -> roq.Policy:
        async with roq.connect(secured.zookeeper) as cluster:
            return await cluster.get_policy(QUEUE)

    assert secured.call(read()).bounds.max_exchanges == 7
    watched.context.close()


def test_who_may_see_one_queue_works_with_that(browser: Browser, secured: RunningCluster, address: str, tmp_path: Path) -> None:
    watched = Watched(browser, address)
    page = watched.visit("queues?search=ord", "Sign in")
    page.get_by_label("Card file").set_input_files(card(secured, tmp_path, "narrow", Grant(Right.DESCRIBE, QUEUE)))
    with page.expect_response("**/v1/events") as stream:
        page.get_by_role("button", name="Sign in").click()
    assert stream.value.status == 403  # the cluster's events are not theirs to see
    expect(page.get_by_role("link", name=QUEUE)).to_be_visible()
    visit = page.locator("#page").get_attribute("data-visit")
    with page.expect_response("**/v1/session"):  # whether the session has ended
        page.get_by_label("Name").fill("orders")
    expect(page.get_by_label("Name")).to_have_value("orders")
    expect(page.locator("#page")).to_have_attribute("data-visit", visit or "")  # nobody is thrown out of what they do
    watched.visit("", "Overview")
    expect(page.get_by_role("alert").filter(has_text="describe")).to_be_visible()
    watched.context.close()


def test_who_signs_out_in_one_tab_is_signed_out_in_all(
    browser: Browser, secured: RunningCluster, address: str, tmp_path: Path
) -> None:
    watched = Watched(browser, address)
    page = watched.visit(f"queues/{QUEUE}", "Sign in")
    page.get_by_label("Card file").set_input_files(card(secured, tmp_path, "leaver", Grant(Right.DESCRIBE, "*")))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("table", name="Exchanges")).to_be_visible()
    other = watched.context.new_page()
    other.goto(f"{address}/#/hosts")
    other.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    watched.context.close()


def test_a_file_that_is_no_card_is_refused(browser: Browser, address: str, tmp_path: Path) -> None:
    watched = Watched(browser, address)
    page = watched.visit("", "Sign in")
    (tmp_path / "no.card").write_text('{"name": "me"}')
    page.get_by_label("Card file").set_input_files(tmp_path / "no.card")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert").filter(has_text="card")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
    watched.context.close()


def test_the_link_that_the_console_prints_is_good_for_once(browser: Browser, secured: RunningCluster) -> None:
    with console(secured.zookeeper, "--link", ROQ_CARD=str(secured.local.card)) as running:
        link = running.until("ticket=").split()[-1]
        first, second = Watched(browser, running.url), Watched(browser, running.url)
        first.page.goto(link)
        expect(first.page.get_by_role("heading", level=1)).to_have_text("Overview")
        expect(first.page.locator("#who")).to_contain_text("owner")
        assert "ticket" not in first.page.url
        second.page.goto(link)
        expect(second.page.get_by_role("alert").filter(has_text="this link was used")).to_be_visible()
        expect(second.page.get_by_label("Card file")).to_be_visible()
        assert first.wrong == []
        first.context.close()
        second.context.close()
