/* The cluster at one moment, and the last minutes of its load. */

import { url } from "../api.js";
import { chart, windowBegin } from "../chart.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { live } from "../live.js";
import { anchor, head, note, panel, table, tiles } from "../parts.js";
import { eventLine } from "./events.js";
import { queueColumns } from "./queues.js";

const MINUTES = 5;
const EVENTS_SHOWN = 8;

export const overview = {
    title: () => "Overview",
    of: () => [url(["overview"])],
    hears(kind, data, page) {
        if (page.data) page.draw(); // the load, and what has happened
    },
    view([found]) {
        return [
            head("Overview", { about: `as of ${show.moment(found.time)}` }),
            numbers(found),
            problems(found),
            load(found),
            busiest(found),
            happened(),
        ];
    },
};

function numbers(found) {
    const { hosts, queues, work_queues: work, exchanges, processes } = found;
    const rates = found.rates ?? {};
    const away = hosts.total - hosts.alive;
    const broken = queues.running - queues.ready;
    return tiles(
        [
            ["Published", show.rate(rates.messages_per_second), show.byteRate(rates.bytes_per_second)],
            ["Delivered", show.rate(rates.delivered_per_second), `${show.duration(rates.lag_seconds)} behind`],
            ["Lost", show.count(rates.lost), "messages", rates.lost > 0 && "bad"],
            [
                "Queues",
                show.count(queues.total),
                broken > 0 ? `${broken} not ready` : `${queues.running} running`,
                broken > 0 && "warn",
            ],
            ["Work queues", show.count(work.total), `${show.counted(work.groups, "group")}`],
            [
                "Hosts",
                `${hosts.alive} of ${hosts.total}`,
                away > 0 ? `${away} away` : hosts.draining ? `${hosts.draining} cordoned` : "all alive",
                away > 0 && "bad",
            ],
            [
                "Processes",
                show.count(processes.total),
                processes.failed ? `${processes.failed} given up` : `${show.count(exchanges.total)} Exchanges`,
                processes.failed > 0 && "bad",
            ],
        ],
        "The cluster in numbers",
    );
}

function problems({ problems: found, failed }) {
    const one = ({ queue, host, text }) =>
        h(
            "p",
            { class: "note warn", key: `${queue} ${host} ${text}` },
            queue ? [anchor(queue, ["queues", queue]), ": "] : null,
            host ? [anchor(host, ["hosts", host]), ": "] : null,
            text,
        );
    const given = ({ host, process, restarts, error }) =>
        h(
            "p",
            { class: "note bad", key: `${host} ${process}` },
            anchor(process, ["hosts", host, process]),
            ` on ${host} was given up after ${show.counted(restarts, "restart")}: ${error}`,
        );
    const all = [...failed.map(given), ...found.map(one)];
    return panel(
        "What needs somebody",
        { about: all.length ? show.counted(all.length, "thing") : null },
        h(
            "div",
            { class: "body" },
            all.length ? all : note("good", "Nothing: all hosts, queues and processes are as they should be."),
        ),
    );
}

function load(found) {
    const points = live.course;
    const line = (name, field) => ({ name, points: points.map((each) => [each.time, each[field]]) });
    const end = points.at(-1)?.time ?? found.time;
    const shape = { begin: windowBegin(points, end, 60 * MINUTES), end, gap: 15 };
    return panel(
        "Load",
        { about: `the last ${MINUTES} minutes, while this page is open` },
        h(
            "div",
            { class: "body columns" },
            chart("Messages", [line("published", "messages_per_second"), line("delivered", "delivered_per_second")], {
                write: show.rate,
                ...shape,
            }),
            chart("Bytes published", [line("bytes", "bytes_per_second")], { write: show.byteRate, base: 1024, ...shape }),
        ),
    );
}

function busiest({ rates }) {
    const rows = rates?.busiest ?? [];
    return panel(
        "Busiest queues",
        { about: anchor("all queues", ["queues"]) },
        table("Busiest queues", queueColumns(), rows, {
            key: (row) => row.queue,
            empty: rates ? "No queue yet: roq queue create NAME makes one." : "The Monitors are being asked.",
        }),
    );
}

function happened() {
    const latest = live.events.slice(0, EVENTS_SHOWN);
    return panel(
        "Just now",
        { about: anchor("all events", ["events"]) },
        latest.length
            ? h("ul", { class: "body plain" }, latest.map(eventLine))
            : h("p", { class: "empty" }, "Nothing has happened since this page is open."),
    );
}
