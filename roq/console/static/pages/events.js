/* What has happened since the console's page is open, latest first. */

import { h } from "../dom.js";
import { moment } from "../format.js";
import { live } from "../live.js";
import { anchor, head, panel } from "../parts.js";
import { own } from "../own.js";

const SHOWN_MAX = 200;
const BAD = new Set(["host-left", "process-died", "process-given-up", "queue-unavailable", "work-queue-unavailable", "missed"]);

export const events = {
    title: () => "Events",
    of: () => [],
    hears(kind, data, page) {
        if (kind === "cluster" && page.data) page.draw();
    },
    view(_, page) {
        const wanted = (page.state.filter ?? "").toLowerCase();
        const found = live.events
            .filter((event) => !wanted || `${event.kind} ${event.sentence}`.toLowerCase().includes(wanted))
            .slice(0, SHOWN_MAX);
        return [
            head("Events", { about: "since this page is open; a cluster keeps none" }),
            own("events-filter", () => filter(page)),
            panel(
                "What happened",
                {},
                found.length
                    ? h("ul", { class: "body plain", "aria-label": "Events" }, found.map(eventLine))
                    : h("p", { class: "empty" }, "Nothing yet."),
            ),
        ];
    },
};

function filter(page) {
    const typed = (event) => {
        page.state.filter = event.target.value;
        page.draw();
    };
    return h(
        "div",
        { class: "row" },
        h("label", { for: "filter" }, "Only with"),
        h("input", { type: "search", id: "filter", oninput: typed, placeholder: "a name, a kind", autocomplete: "off" }),
    );
}

/* One event as an entry of a list. */
export function eventLine(event) {
    const about = event.work_queue
        ? ["work-queues", event.work_queue]
        : event.queue
          ? ["queues", event.queue]
          : event.host
            ? ["hosts", event.host]
            : null;
    return h(
        "li",
        { class: "event-line", key: `${event.time} ${event.kind} ${event.sentence}` },
        h("time", { class: "quiet", datetime: new Date(1000 * event.time).toISOString() }, moment(event.time)),
        h("span", { class: `chip ${BAD.has(event.kind) ? "bad" : ""}` }, event.kind),
        h("span", null, event.sentence, about ? [" ", anchor("show", about)] : null),
    );
}
