"""The console's pages in a real browser, on a real cluster: each opens without an error and can be used by everybody; what is
changed by them; what they show while the cluster changes or is away.

`ROQ_SCREENSHOTS=1` takes the pictures of docs/console.md anew; else they go to pytest's folder, as all others do.

Not covered: what the server answers (test_console.py), signing in (test_console_sign_in.py), how pages stay as the cluster is
(test_console_live.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.harness.documented import block, run
from tests.harness.tiers import quick_first
from tests.integration.console_rig import console
from tests.integration.console_scene import (
    GROUP,
    INVOICES,
    NASTY,
    ORDERS,
    PARCELS,
    ROOT,
    SLOW_LETTERS,
    TRIPS,
    WRONG_LETTERS,
    Scene,
    Watched,
)

pytestmark = pytest.mark.timeout(180)
DOCUMENT = ROOT / "docs" / "console.md"
TAKE = bool(os.environ.get("ROQ_SCREENSHOTS"))  # read before the tests hide ROQ_*
SLOW_PATTERN, WRONG_PATTERN = "no answer from the provider", "</script><script>window.hit="


class Shown(NamedTuple):
    """A page. text: comes with its data only; picture: its name."""

    path: str
    heading: str
    text: str
    picture: str


PAGES = [
    Shown("", "Overview", "Busiest queues", "first-overview"),
    Shown("queues", "Queues", ORDERS, "queues"),
    Shown(f"queues/{ORDERS}", ORDERS, "active", "queue"),
    Shown(f"queues/{ORDERS}/members", ORDERS, "attached", "members"),
    Shown(f"queues/{ORDERS}/history", ORDERS, "a point is", "history"),
    Shown(f"queues/{ORDERS}/policy", ORDERS, "One Exchange carries at most", "policy"),
    Shown(f"queues/{ORDERS}/records", ORDERS, "live", "records"),
    Shown("work-queues", "Work queues", INVOICES, "work-queues"),
    Shown(f"work-queues/{INVOICES}", INVOICES, "a task that waits", "work-queue"),
    Shown(f"work-queues/{ORDERS}%40{GROUP}", f"{ORDERS}@{GROUP}", "Order", "group"),
    Shown(f"work-queues/{INVOICES}/dead", "Dead letters", SLOW_PATTERN, "dead-letters"),
    Shown("hosts", "Hosts", "host-1", "hosts"),
    Shown("hosts/host-1", "host-1", "running", "host"),
    Shown("hosts/host-1/store", "store", "Log", "log"),
    Shown("health", "Stores and copies", "Free on disk", "health"),
    Shown("shuffles", "Shuffles", TRIPS, "shuffles"),
    Shown(f"shuffles/{TRIPS}", TRIPS, "Holders", "shuffle"),
    Shown("zookeeper", "ZooKeeper", "Leading GCM", "zookeeper"),
    Shown("access", "Access cards", "no security", "access"),
    Shown("events", "Events", "watching", "events"),
    Shown("nowhere", "No such page", "The menu leads", "nowhere"),
]


@pytest.fixture(scope="module")
def watched(browser: Browser, writable: str) -> Iterator[Watched]:
    """One page for all tests of this file, in which nothing has gone wrong."""
    found = Watched(browser, writable)
    yield found
    found.context.close()


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(watched: Watched) -> Iterator[None]:
    watched.wrong.clear()
    yield
    assert watched.wrong == []
    assert watched.page.evaluate("window.hit") is None


@pytest.mark.parametrize("shown", quick_first(PAGES), ids=[page.picture for page in PAGES])
def test_a_page_opens_and_everybody_can_use_it(watched: Watched, tmp_path: Path, shown: Shown) -> None:
    page = watched.visit(shown.path, shown.heading)
    expect(page.locator("#page")).to_contain_text(shown.text)
    assert watched.violations() == []
    page.emulate_media(color_scheme="dark")
    assert watched.violations("color-contrast") == []
    page.emulate_media(color_scheme="light")
    page.mouse.move(0, 0)
    picture(page, shown.picture, tmp_path)


def test_stores_are_shown_before_what_the_doctor_finds(watched: Watched) -> None:
    page = watched.visit("health", "Stores and copies")
    rows = page.get_by_role("table", name="Stores").get_by_role("row").filter(has_text="answers")
    expect(rows.get_by_role("rowheader")).to_have_text(["host-1", "host-2", "host-3"])
    expect(rows.first.get_by_role("cell").nth(1)).to_contain_text("iB")  # of its disk
    expect(page.get_by_role("table", name="Findings")).to_contain_text("ZooKeeper")
    expect(page.locator("main h2")).to_have_text(["Stores", "Findings"])
    assert watched.violations() == []


def picture(page: Page, name: str, folder: Path) -> None:
    """Of what is seen now."""
    file = f"images/console-{name}.png"
    named = TAKE and f"]({file})" in DOCUMENT.read_text()
    page.screenshot(path=DOCUMENT.parent / file if named else folder / Path(file).name)


def test_every_page_fits_a_narrow_window(watched: Watched) -> None:
    page = watched.page
    page.set_viewport_size({"width": 380, "height": 700})
    try:
        for path, heading, text, _ in PAGES:
            watched.visit(path, heading)
            expect(page.locator("#page")).to_contain_text(text)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
    finally:
        page.set_viewport_size({"width": 1200, "height": 800})


WRITTEN = [
    (
        "short",
        [0, 7.25, 999, 999.6, 1_234, 99_949, 1.5e6, 2e12, None],
        ["0", "7.3", "999", "1.0 k", "1.2 k", "99.9 k", "1.5 M", "2.0 T", "-"],
    ),
    ("bytes", [0, 1023, 1024, 1536, 5 << 30], ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"]),
    (
        "duration",
        [0, 0.00035, 0.012, 3.44, 59, 300, 7_200, 400_000],
        ["0 s", "350 µs", "12 ms", "3.4 s", "59 s", "5 min", "2 h", "5 d"],
    ),
    ("percent", [0, 0.126, 1, None], ["0 %", "13 %", "100 %", "-"]),
    ("count", [1_234_567, None], ["1,234,567", "-"]),
    ("sentence", ["", "no host", "Why?"], ["", "No host.", "Why?"]),
]


@pytest.mark.parametrize(("kind", "values", "texts"), WRITTEN, ids=[one[0] for one in WRITTEN])
def test_numbers_are_written_for_people(watched: Watched, kind: str, values: list[object], texts: list[str]) -> None:
    page = watched.visit("nowhere", "No such page")
    script = "async ([kind, values]) => { const show = await import('/static/format.js'); return values.map(show[kind]); }"
    assert [text.replace("\N{EN DASH}", "-") for text in page.evaluate(script, [kind, values])] == texts


def test_what_somebody_does_stays_while_numbers_change(watched: Watched) -> None:
    page = watched.visit(f"queues/{ORDERS}", ORDERS)
    messages = page.get_by_role("figure", name="Messages")
    messages.get_by_text("As a table").click()
    rows = messages.get_by_role("table", name="Messages").get_by_role("row")
    expect(rows.nth(1)).to_be_visible()
    before = rows.count()
    host = page.get_by_role("table", name="Exchanges").get_by_role("link").first
    host.focus()
    expect(rows.nth(before + 1)).to_be_visible()  # two seconds later
    expect(host).to_be_focused()


def test_queues_are_searched_and_paged_by_the_server(watched: Watched) -> None:
    page = watched.visit("queues?limit=2", "Queues")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    told = page.get_by_role("navigation", name="Pages of queues").get_by_role("status")
    expect(told).to_have_text(re.compile(r"^1.2 of \d queues$"))
    page.get_by_role("button", name="Next").click()
    expect(told).to_have_text(re.compile(r"^3."))
    page.get_by_label("Name").fill("ELEM")
    expect(page.get_by_role("rowheader")).to_have_text(["telemetry"])
    expect(page).to_have_url(re.compile(r"#/queues\?limit=2&search=ELEM$"))
    page.reload()
    expect(page.get_by_role("rowheader")).to_have_text(["telemetry"])
    page.get_by_label("Name").fill("")
    page.get_by_role("button", name="Published").click()
    expect(page.get_by_role("rowheader").first).to_have_text(ORDERS)  # the one with traffic


def test_a_name_is_shown_as_it_is_wherever_it_stands(watched: Watched) -> None:
    page = watched.visit("queues", "Queues")
    page.get_by_role("link", name=NASTY).click()
    for part in ("Now", "Members", "History", "Policy", "Record"):
        page.get_by_role("navigation", name="About this queue").get_by_role("link", name=part).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(NASTY)
        expect(page.get_by_role("navigation", name="About this queue").locator("[aria-current]")).to_have_text(part)
        expect(page.locator("#page")).to_have_attribute("aria-busy", "false")
        expect(page.get_by_role("alert").filter(has_text=re.compile(r"\S"))).to_have_count(0)
    assert page.locator("#page img, #page script").count() == 0
    watched.visit("work-queues", "Work queues")
    page.get_by_role("link", name=NASTY, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(NASTY)
    page.get_by_role("link", name="Dead letters: 1").click()
    page.get_by_role("button", name=re.compile("^Look at")).click()
    expect(page.get_by_label("Payload")).to_have_value(NASTY)
    expect(page.locator("#page")).to_contain_text(NASTY)  # its error
    assert page.locator("#page img, #page script").count() == 0


def test_a_policy_is_tried_before_it_is_applied(watched: Watched, scene: Scene, tmp_path: Path) -> None:
    page = watched.visit(f"queues/{ORDERS}/policy", ORDERS)
    apply = page.get_by_role("button", name="Apply", exact=True)
    expect(apply).to_be_disabled()
    page.get_by_role("group", name="Average over all Exchanges, at most").get_by_label("Publishers").fill("one")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_role("alert").last).to_contain_text("policy")  # no number: refused, with why
    watched.wrong.clear()  # the browser tells of the refusal, too
    page.get_by_role("group", name="Average over all Exchanges, at most").get_by_label("Publishers").fill("1")
    page.get_by_role("button", name="Replay").click()
    would = page.get_by_role("table", name="Decisions of this policy and those taken")
    expect(would.get_by_role("row").filter(has_text="scale-out").filter(has_text="this policy").first).to_be_visible()
    assert watched.violations() == []
    page.get_by_label("What would it have done").evaluate("one => one.scrollIntoView()")
    picture(page, "what-if", tmp_path)
    assert scene.policy().queue.max_publishers_per_exchange is None  # nothing was changed by looking
    apply.click()
    asked = page.get_by_role("dialog")
    expect(asked).to_contain_text("queue.max_publishers_per_exchange: off → 1")
    assert watched.violations() == []
    asked.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("It holds from the next second on")).to_be_visible()
    assert scene.policy().queue.max_publishers_per_exchange == 1
    page.get_by_role("link", name="Now").click()
    taken = page.get_by_role("table", name="Decisions").get_by_role("row").filter(has_text="scale-out")
    expect(taken).to_contain_text("publishers per Exchange on average over 1")  # its cause


def test_dead_letters_are_edited_and_redriven_one_then_all(watched: Watched, scene: Scene, tmp_path: Path) -> None:
    page = watched.visit(f"work-queues/{INVOICES}/dead", "Dead letters")
    row = page.get_by_role("row").filter(has_text=SLOW_PATTERN)
    expect(row.get_by_role("cell").first).to_have_text(str(SLOW_LETTERS))
    row.get_by_role("button").click()
    payload = page.get_by_label("Payload")
    expect(payload).to_have_value(re.compile('"amount": "12,50"'))
    assert watched.violations() == []
    picture(page, "dead-letter", tmp_path)
    payload.fill('{"order": 0, "amount": "12.50"}')
    page.get_by_role("button", name="Redrive this one").click()
    expect(page.get_by_text("as edited")).to_be_visible()
    expect(row.get_by_role("cell").first).to_have_text(str(SLOW_LETTERS - 1))
    assert b'{"order": 0, "amount": "12.50"}' in scene.waiting().values()
    page.get_by_role("button", name=f"Redrive all {SLOW_LETTERS - 1}").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive all").click()
    expect(page.get_by_text(f"{SLOW_LETTERS - 1} letters of")).to_be_visible()
    expect(row).to_have_count(0)
    assert len(scene.letters()) == WRONG_LETTERS
    assert len(scene.waiting()) == 1 + SLOW_LETTERS


def test_a_payload_that_is_not_edited_stays_as_it_is(watched: Watched, scene: Scene) -> None:
    page = watched.visit(f"work-queues/{PARCELS}/dead", "Dead letters")
    before, payload = scene.letters(PARCELS), page.get_by_label("Payload")
    once = page.get_by_role("button", name="Redrive this one")
    for error, editable, left in (("windows", True, 3), ("mixed", False, 2), ("large", False, 1)):
        page.get_by_role("button", name=f"Look at: {error}").click()
        expect(payload).to_be_editable(editable=editable)
        with page.expect_response(lambda answer: answer.url.endswith("/redrive")):  # what #result says may be of the last one
            once.click()
        expect(page.locator("#result")).to_contain_text("waits again.")
        assert len(scene.letters(PARCELS)) == left
    again = scene.waiting(PARCELS)
    assert len(again) == 3
    assert again.items() <= before.items()  # the very tasks, not new ones
    page.get_by_role("button", name="Look at: windows").click()
    (source,) = scene.letters(PARCELS).values()
    expect(payload).to_have_value(source.decode().replace("\r\n", "\n"))
    payload.press("End")
    payload.type("!")
    once.click()
    expect(page.locator("#result")).to_contain_text("as edited")
    (edited,) = set(scene.waiting(PARCELS).values()) - set(before.values())
    assert sorted(edited) == sorted(source + b"!")  # wherever it was typed
    assert edited.count(b"\r\n") == 1


def test_a_letter_is_redriven_by_the_keyboard_alone(watched: Watched, scene: Scene) -> None:
    page = watched.visit("", "Overview")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    watched.tab_to("link", "Skip to the page", steps=1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    page.reload()
    before = len(scene.letters())
    for role, name, title in (
        ("link", "Work queues", "Work queues"),
        ("link", INVOICES, INVOICES),
        ("link", f"Dead letters: {before}", "Dead letters"),
    ):
        watched.tab_to(role, name)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text(title)
        expect(page.get_by_role("heading", level=1)).to_be_focused()
    row = page.get_by_role("row").filter(has_text=WRONG_PATTERN)
    watched.tab_to("button", row.get_by_role("button").get_attribute("aria-label") or "")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Payload")).to_be_visible()
    watched.tab_to("textbox", "Payload")
    page.keyboard.press("Control+a")
    page.keyboard.type('{"by": "hand"}')
    watched.tab_to("button", "Redrive this one", steps=1)
    page.keyboard.press("Enter")
    expect(page.get_by_text("as edited")).to_be_visible()
    assert b'{"by": "hand"}' in scene.waiting().values()
    watched.tab_to("button", "Remove all …")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Remove all …")).to_be_focused()
    assert len(scene.letters()) == before - 1


@pytest.mark.parametrize("origin", ["http://elsewhere.test", "http://127.0.0.1:1"])
def test_another_site_s_form_changes_nothing(browser: Browser, writable: str, scene: Scene, origin: str) -> None:
    visitor = Watched(browser, writable)
    visitor.visit("", "Overview")  # has the session's cookie
    page = visitor.page
    form = f'<form method="post" action="{writable}/v1/queues/telemetry/stop"><button>Win</button></form>'

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/html", body=form)

    page.route(f"{origin}/", answer)
    page.goto(f"{origin}/")
    with page.expect_response(re.compile("/stop$")) as answered:
        page.get_by_role("button").click()
    assert answered.value.status == 403
    visitor.context.close()
    assert scene.runs("telemetry")


def test_a_console_that_only_reads_until_it_is_started_again(browser: Browser, scene: Scene) -> None:
    with console(scene.address) as running:
        reader = Watched(browser, running.url)
        page = reader.visit(f"work-queues/{INVOICES}/dead", "Dead letters")
        expect(page.locator("#who")).to_contain_text("read-only")
        page.get_by_role("button", name=re.compile("^Look at")).first.click()
        expect(page.get_by_label("Payload")).not_to_be_editable()
        for name in ("Redrive this one", "Remove all …"):
            expect(page.get_by_role("button", name=name)).to_be_disabled()
        expect(page.get_by_text("This console is read-only")).to_be_visible()
        reader.visit("hosts/host-1", "host-1")
        expect(page.get_by_role("button", name="Cordon")).to_be_disabled()
        reader.visit(f"queues/{ORDERS}/policy", ORDERS)
        page.get_by_role("button", name="Replay").click()
        expect(page.get_by_text("What it would have done")).to_be_visible()  # looking is allowed
        expect(page.get_by_role("button", name="Apply", exact=True)).to_be_disabled()
        assert reader.violations() == []
        assert reader.wrong == []
        assert answered(page, "POST", "/v1/queues/telemetry/stop") == (403, "ReadOnlyConsole")
        assert scene.runs("telemetry")
        reader.visit("hosts/host-1", "host-1")
    banner = page.get_by_role("alert").filter(has_text="The console does not answer since")
    expect(banner).to_be_visible()
    with console(scene.address, "--writable", listen=running.url.removeprefix("http://")):
        expect(banner).to_have_count(0)
        for action, state in (("Cordon", "cordoned"), ("Uncordon", "alive")):
            page.get_by_role("button", name=action).click()
            page.get_by_role("dialog").get_by_role("button", name=action).click()
            expect(page.locator(".head")).to_contain_text(state)
        reader.context.close()


def answered(page: Page, method: str, path: str) -> tuple[int, str]:
    """Status and title of what this page's own session is answered, with its CSRF token."""
    script = """async ([method, path]) => {
        const { csrf } = await (await fetch("/v1/session")).json();
        const answer = await fetch(path, { method, headers: { "X-CSRF-Token": csrf } });
        return [answer.status, (await answer.json()).title];
    }"""
    status, title = page.evaluate(script, [method, path])
    return status, title


def test_what_the_document_shows(watched: Watched, writable: str, tmp_path: Path) -> None:
    assert block("docs/console.md", "The console") == "roq console\n"  # as `console` starts it
    program = block("docs/console.md", "REST and streams").replace("http://127.0.0.1:9470", writable)
    assert run(program, tmp_path) == "201 routed\nroom.3 {\"celsius\": 21} {'sensor': '7'}\n"
    page = watched.visit("", "Overview")
    expect(page.get_by_label("The cluster in numbers")).to_contain_text("all alive")
    picture(page, "overview", tmp_path)  # with the load of all tests before
    with page.expect_console_message(lambda message: "eu.paris" in message.text):
        page.evaluate(f"() => {{ {block('docs/console.md', 'REST and streams', 2)} }}")
    page.reload()  # ends the WebSocket


def test_a_host_that_is_lost_while_somebody_looks(watched: Watched, scene: Scene) -> None:
    page = watched.visit("hosts", "Hosts")
    row = page.get_by_role("row").filter(has_text="host-3")
    expect(row).to_contain_text("alive")
    scene.running.call(scene.running.local.lose_host("host-3"))
    expect(row).to_contain_text("away")
    page.get_by_role("link", name="Stores and copies").click()
    store = page.get_by_role("table", name="Stores").get_by_role("row").filter(has_text="host-3")
    expect(store).to_contain_text("does not answer")
    expect(store).to_contain_text("its host is away")
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_label("The cluster in numbers")).to_contain_text("2 of 3")
    expect(page.get_by_role("region", name="What needs somebody")).to_contain_text("host-3")
    assert watched.violations() == []
    page.get_by_role("link", name="all events").click()
    expect(page.get_by_role("listitem").filter(has_text="host-left")).to_contain_text("host-3")


def test_a_cluster_that_goes_away_and_comes_back(watched: Watched, scene: Scene, tmp_path: Path) -> None:
    page = watched.visit("queues", "Queues")
    scene.running.call(scene.running.local.kill_gcm("gcm-1"))
    banner = page.get_by_role("alert").filter(has_text="The cluster is unreachable since")
    expect(banner).to_be_visible()
    expect(page.get_by_role("link", name=ORDERS)).to_be_visible()  # what was known stays
    assert watched.violations() == []
    picture(page, "unreachable", tmp_path)
    scene.running.call(scene.running.local.start_gcm("gcm-1"))
    expect(banner).to_have_count(0)
    expect(page.locator("#announced")).to_have_text("The cluster is reachable again.")
    page.get_by_role("link", name=ORDERS).click()
    expect(page.get_by_role("table", name="Exchanges")).to_be_visible()
