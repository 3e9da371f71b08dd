/* One queue now: its load as it comes in, its Exchanges, its decisions. */

import { url } from "../api.js";
import { chart, windowBegin } from "../chart.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, facts, link, meter, note, panel, state, table, tiles } from "../parts.js";
import { queueHead } from "./queue_head.js";
import { queueState } from "./queues.js";

const SECONDS = 180;
const AGAIN_MS = 3000;

export const queue = {
    title: ({ queue: name }) => name,
    of: (page) => [url(["queues", page.names.queue])],
    opened(page) {
        page.state.course = [];
        page.state.looked = () => (document.hidden ? leave(page) : follow(page));
        document.addEventListener("visibilitychange", page.state.looked);
        follow(page);
    },
    closed(page) {
        document.removeEventListener("visibilitychange", page.state.looked);
        leave(page);
    },
    view([found], page) {
        const row = found.summary;
        return [
            ...queueHead(row.queue, "", queueState(row)),
            row.problem ? note("bad", row.problem) : null,
            numbers(found, page.state.course.at(-1)),
            load(page.state.course),
            exchanges(found),
            found.groups.length ? groups(found) : null,
            decisions("Decisions", found.decisions),
            about(found),
        ];
    },
};

function leave(page) {
    clearTimeout(page.state.again);
    page.state.stream?.close();
}

/* The queue's numbers, each second. */
function follow(page) {
    leave(page);
    const stream = new EventSource(url(["queues", page.names.queue, "kpis"]));
    page.state.stream = stream;
    stream.addEventListener("kpi", (event) => {
        page.state.course = [...page.state.course, JSON.parse(event.data)].slice(-SECONDS);
        if (page.data) page.draw();
    });
    stream.onerror = () => {
        if (stream.readyState !== EventSource.CLOSED) return; // it comes back by itself
        page.state.again = setTimeout(() => follow(page), AGAIN_MS);
    };
}

function numbers({ summary: row }, latest) {
    const now = latest ?? row;
    return tiles(
        [
            ["Published", show.rate(now.messages_per_second), show.byteRate(now.bytes_per_second)],
            ["Delivered", show.rate(now.delivered_per_second), `${show.counted(row.subscribers, "subscriber")}`],
            ["Behind", show.duration(now.lag_seconds), "slowest subscriber"],
            ["Latency, p99", show.duration(now.latency_p99_seconds), "slowest subscriber"],
            ["Lost", show.count(row.lost), `${show.count(row.dropped)} given up`, row.lost > 0 && "bad"],
            ["Exchanges", show.count(row.exchanges), show.counted(row.publishers, "publisher")],
        ],
        "The queue in numbers",
    );
}

function load(course) {
    const end = course.at(-1)?.time ?? Date.now() / 1000;
    const shape = { begin: windowBegin(course, end, SECONDS), end, gap: 5 };
    const line = (name, field) => ({ name, points: course.map((each) => [each.time, each[field]]) });
    return panel(
        "Load",
        { about: `the last ${SECONDS / 60} minutes, while this page is open` },
        h(
            "div",
            { class: "body columns" },
            chart("Messages", [line("published", "messages_per_second"), line("delivered", "delivered_per_second")], {
                write: show.rate,
                ...shape,
            }),
            chart("How far behind", [line("lag", "lag_seconds"), line("latency p99", "latency_p99_seconds")], {
                write: show.duration,
                ...shape,
            }),
        ),
    );
}

function exchanges({ exchanges: rows }) {
    const kinds = { active: "good", starting: "warn", draining: "warn" };
    const columns = [
        { name: "Exchange", head: true, cell: (row) => h("code", null, row.exchange.slice(0, 8)) },
        { name: "Host", cell: (row) => anchor(row.host, ["hosts", row.host]) },
        { name: "State", cell: (row) => state(row.state, kinds[row.state] ?? "quiet") },
        { name: "Published", number: true, cell: (row) => show.rate(row.messages_per_second) },
        { name: "In", number: true, cell: (row) => show.byteRate(row.bytes_per_second) },
        { name: "Out", number: true, cell: (row) => show.byteRate(row.bytes_out_per_second) },
        { name: "Publishers", number: true, cell: (row) => show.count(row.publishers) },
        { name: "Attached", number: true, cell: (row) => show.count(row.attached) },
        { name: "CPU", number: true, cell: (row) => meter(row.cpu_fraction) },
        { name: "Memory", number: true, cell: (row) => show.bytes(row.memory_bytes) },
    ];
    return panel("Exchanges", {}, table("Exchanges", columns, rows, { key: (row) => row.exchange, empty: "None runs." }));
}

function groups({ groups: rows }) {
    const columns = [
        { name: "Group", head: true, cell: (row) => anchor(row.group, ["work-queues", row.name]) },
        { name: "State", cell: (row) => (row.ready ? state("ready", "good") : state(row.problem || "not ready", "bad")) },
        { name: "Waiting", number: true, cell: (row) => show.count(row.waiting) },
        { name: "Leased", number: true, cell: (row) => show.count(row.leased) },
        {
            name: "Dead",
            number: true,
            cell: (row) => (row.dead ? anchor(show.count(row.dead), ["work-queues", row.name, "dead"]) : "0"),
        },
        { name: "Behind", number: true, cell: (row) => show.duration(row.behind_seconds) },
        { name: "Master", cell: (row) => row.master },
    ];
    return panel("Groups", {}, table("Groups", columns, rows, { key: (row) => row.name }));
}

/* Scaling decisions, latest first, each with its cause. */
export function decisions(title, found, extra = []) {
    const columns = [
        { name: "When", cell: (one) => show.moment(one.time) },
        { name: "Decision", head: true, cell: (one) => one.action },
        { name: "Cause", wide: true, cell: (one) => one.cause },
        { name: "Outcome", cell: (one) => one.outcome || h("span", { class: "quiet" }, "under way") },
        ...extra,
    ];
    const empty = h("span", null, "None: the policy has had nothing to do.");
    return panel(title, {}, table(title, columns, [...found].reverse(), { key: (one) => `${one.time} ${one.cause}`, empty }));
}

function about(found) {
    const row = found.summary;
    const kept = found.recorded ? "on" : found.record ? "stopped, what was kept is there" : "off";
    return panel(
        "About",
        {},
        h(
            "div",
            { class: "body" },
            facts([
                ["Created", show.moment(found.created)],
                ["Recorded", h("a", { href: link(["queues", row.queue, "records"]) }, kept)],
                ["A slow subscriber", row.overflow === "block" ? "makes publishers wait (block)" : "misses messages (drop)"],
                [
                    "Monitors",
                    h(
                        "span",
                        null,
                        found.monitors.join(", "),
                        ` · term ${found.term}, ${show.counted(row.replication, "copy", "copies")}`,
                    ),
                ],
                ["A message has at most", show.bytes(found.max_frame_bytes)],
                [
                    "Since its Monitor started",
                    `${show.count(row.messages)} messages (${show.bytes(row.bytes)}) in, ${show.count(row.delivered)} out`,
                ],
            ]),
        ),
    );
}
