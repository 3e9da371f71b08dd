/* What happened to a queue, as the cluster's history has it. */

import { url } from "../api.js";
import { chart } from "../chart.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { note, panel } from "../parts.js";
import { own } from "../own.js";
import { decisions } from "./queue.js";
import { queueHead } from "./queue_head.js";

const SPANS = [
    ["15m", "15 minutes"],
    ["1h", "hour"],
    ["6h", "6 hours"],
    ["1d", "day"],
    ["7d", "week"],
];

export const history = {
    title: ({ queue }) => `History of ${queue}`,
    of: (page) => [url(["queues", page.names.queue, "history"], { since: page.query.since ?? "1h" })],
    every: 15,
    without: "NotRecorded",
    view(answers, page) {
        const { queue } = page.names;
        if (answers === null)
            return [
                ...queueHead(queue, "history"),
                note(
                    "",
                    "This cluster keeps no history. ",
                    h("code", null, "roq history on --days 7"),
                    " keeps each queue's numbers and decisions from then on.",
                ),
            ];
        const [found] = answers;
        return [
            ...queueHead(queue, "history"),
            own(`span ${queue}`, () => span(page)),
            charts(found),
            decisions("Decisions", found.decisions),
        ];
    },
};

function span(page) {
    const chosen = page.query.since ?? "1h";
    const options = SPANS.map(([value, text]) => h("option", { value, selected: value === chosen }, `the last ${text}`));
    return h(
        "div",
        { class: "row" },
        h("label", { for: "since" }, "Show"),
        h("select", { id: "since", onchange: (event) => page.ask({ since: event.target.value }) }, options),
    );
}

function charts({ periods, decisions: taken }) {
    const line = (name, field) => ({ name, points: periods.map((each) => [each.begin, each.records ? each[field] : null]) });
    const events = taken.map(({ time, action, cause }) => ({ time, text: `${action}: ${cause}` }));
    return panel(
        "Course",
        { about: periods.length ? `a point is ${show.duration(periods[0].seconds)}` : null },
        h(
            "div",
            { class: "body columns" },
            chart(
                "Messages",
                [
                    line("published", "messages_per_second"),
                    line("at most", "messages_per_second_most"),
                    line("delivered", "delivered_per_second"),
                ],
                { write: show.rate, events },
            ),
            chart("Exchanges", [line("most", "exchanges_most"), line("least", "exchanges_least")], {
                write: show.count,
                events,
                whole: true,
            }),
            chart("How far behind", [line("lag", "lag_seconds"), line("latency p99", "latency_p99_seconds")], {
                write: show.duration,
                events,
            }),
            chart("Members", [line("publishers", "publishers_most"), line("subscribers", "subscribers_most")], {
                write: show.count,
                events,
                whole: true,
            }),
        ),
    );
}
