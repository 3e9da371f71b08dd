"""The console's pages while they are open: what changes in the cluster comes by streams, and nothing is asked for.

Not covered: what the streams tell (test_console_follow.py), a cluster that goes away (test_console_browser.py).
"""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from roq import blocking
from roq.ids import new_token
from tests.harness.tiers import quick_first
from tests.integration.console_scene import INVOICES, ORDERS, PARCELS, Scene, Watched

pytestmark = pytest.mark.timeout(180)
IDLE_SECONDS = 5  # more than between two looks of the console
FOLLOWING = ["queues", f"queues/{ORDERS}", f"queues/{ORDERS}/records", f"work-queues/{INVOICES}", "hosts/host-1", "health"]


def test_what_happens_elsewhere_is_on_the_page_at_once(browser: Browser, writable: str, scene: Scene) -> None:
    watched = Watched(browser, writable)
    name = f"made-elsewhere-{new_token()[:8]}"
    try:
        page = watched.visit("queues", "Queues")
        expect(page.get_by_role("link", name=ORDERS, exact=True)).to_be_visible()
        asked = asked_from_now_on(page)
        with blocking.connect(scene.address) as cluster:
            cluster.create_queue(name)
            expect(page.get_by_role("link", name=name)).to_be_visible()
            page.get_by_role("link", name=name).click()
            expect(page.get_by_role("heading", level=1)).to_have_text(name)
            cluster.stop_queue(name)
            expect(page.locator("#page")).to_contain_text("stopped")
            watched.visit("queues", "Queues")
            expect(page.get_by_role("link", name=name)).to_be_visible()
            cluster.remove_queue(name)
            expect(page.get_by_role("link", name=name)).to_have_count(0)
        assert {request.resource_type for request in asked} == {"eventsource"}  # of the page that was gone to, and back
        assert watched.wrong == []
    finally:
        watched.context.close()


def asked_from_now_on(page: Page) -> list[Request]:
    """Once it is live, and knows who is signed in: what it asks the console for."""
    found = list[Request]()
    expect(page.locator("#who")).to_contain_text("Live")
    page.wait_for_load_state("load")
    page.wait_for_timeout(1000)
    page.on("request", lambda request: found.append(request) if "/v1/" in request.url else None)
    return found


@pytest.mark.parametrize("path", quick_first(FOLLOWING))
def test_a_page_that_is_open_asks_for_nothing(browser: Browser, writable: str, path: str) -> None:
    """What is new comes by its streams, which are few; a tab that nobody looks at has none."""
    watched, streams = Watched(browser, writable), set[str]()
    page = watched.page
    try:
        page.on("request", lambda request: streams.add(request.url) if request.resource_type == "eventsource" else None)
        page.goto(f"{writable}/#/{path}")
        expect(page.locator("#page")).to_have_attribute("aria-busy", "false")
        asked = asked_from_now_on(page)
        page.wait_for_timeout(IDLE_SECONDS * 1000)
        assert asked == []
        assert len(streams) == 2 + (path == f"queues/{ORDERS}")
        with page.expect_event("requestfailed", lambda request: "/v1/follow" in request.url):
            looked_at(page, "hidden")
        assert asked == []
        with page.expect_request("**/v1/follow?**"):
            looked_at(page, "visible")
        assert watched.wrong == []
    finally:
        watched.context.close()


def looked_at(page: Page, state: str) -> None:
    """Somebody shows, or hides, the page's tab."""
    page.evaluate(
        """state => {
            Object.defineProperty(document, "hidden", { value: state === "hidden", configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        state,
    )


def test_a_stream_that_is_refused_says_why_and_is_asked_for_again(browser: Browser, writable: str) -> None:
    watched, problem = (
        Watched(browser, writable),
        '{"title": "TooManyStreams", "detail": "no more streams", "advice": "close one"}',
    )

    def refuse(route: Route) -> None:
        route.fulfill(status=429, content_type="application/problem+json", body=problem)

    try:
        watched.page.route("**/v1/follow?**", refuse)
        page = watched.visit("hosts", "Hosts")
        expect(page.get_by_role("alert").filter(has_text="No more streams.")).to_be_visible()
        page.unroute("**/v1/follow?**")
        expect(page.get_by_role("link", name="host-1")).to_be_visible()
        expect(page.get_by_role("alert").filter(has_text="streams")).to_have_count(0)
    finally:
        watched.context.close()


def test_a_number_that_no_event_reports_is_on_the_page_soon(browser: Browser, writable: str, scene: Scene) -> None:
    watched = Watched(browser, writable)
    try:
        page = watched.visit(f"work-queues/{PARCELS}", PARCELS)
        tiles = page.get_by_label("The work queue in numbers")
        expect(tiles).to_contain_text("Waiting")
        waiting = len(scene.waiting(PARCELS))
        expect(tiles.locator("dd").first).to_contain_text(str(waiting))
        asked = asked_from_now_on(page)
        scene.put(PARCELS, b"one more")
        expect(tiles.locator("dd").first).to_contain_text(str(waiting + 1))
        assert asked == []
    finally:
        watched.context.close()
