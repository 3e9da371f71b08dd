/* All queues, a page at a time: search and order are the server's. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, head, pager, panel, state, table } from "../parts.js";
import { own } from "../own.js";

const STEP = 50; // rows of a page, unless its address has a limit
const WAIT_MS = 200; // after a key, before it is searched
const STATES = [
    ["all", "all"],
    ["problem", "with a problem"],
    ["stopped", "stopped"],
    ["recorded", "recorded"],
    ["own", "the cluster's own"],
];

export const queues = {
    title: () => "Queues",
    of: (page) => {
        const { search, state: wanted, sort, offset = 0, limit = STEP } = page.query;
        return [url(["queues"], { search, state: wanted, sort, offset, limit })];
    },
    view([{ total, offset, rows }], page) {
        const sort = page.query.sort ?? "queue";
        const sorted = {
            by: sort.replace(/^-/, ""),
            down: sort.startsWith("-"),
            to: (by) => page.ask({ sort: by === "queue" ? "" : `-${by}`, offset: "" }),
        };
        return [
            head("Queues"),
            own("queues-search", () => finder(page)),
            panel(
                "Queues",
                { about: null, key: "queues" },
                table("Queues", queueColumns(), rows, {
                    key: (row) => row.queue,
                    sorted,
                    empty: page.query.search ? "No queue has that in its name." : "No such queue.",
                }),
            ),
            pager(
                offset,
                rows.length,
                total,
                Number(page.query.limit ?? STEP),
                (to) => page.ask({ offset: String(to) }),
                "queue",
            ),
        ];
    },
};

function finder(page) {
    let timer = 0;
    const typed = (event) => {
        clearTimeout(timer);
        timer = setTimeout(() => page.ask({ search: event.target.value, offset: "" }), WAIT_MS);
    };
    const search = h("input", {
        type: "search",
        id: "search",
        value: page.query.search ?? "",
        oninput: typed,
        placeholder: "part of a name",
        autocomplete: "off",
    });
    const chosen = page.query.state ?? "all";
    const states = STATES.map(([value, text]) => h("option", { value, selected: value === chosen }, text));
    return h(
        "form",
        { class: "row", role: "search", onsubmit: (event) => event.preventDefault() },
        h("label", { for: "search" }, "Name"),
        search,
        h("label", { for: "state" }, "Show"),
        h(
            "select",
            {
                id: "state",
                onchange: (event) => page.ask({ state: event.target.value === "all" ? "" : event.target.value, offset: "" }),
            },
            states,
        ),
    );
}

/* How a queue is, in a word. */
export function queueState(row) {
    if (!row.running) return state("stopped", "quiet");
    if (row.problem) return state("problem", "bad");
    return row.ready ? state("ready", "good") : state("starting", "warn");
}

/* The columns of a table of queues. */
export function queueColumns() {
    return [
        {
            name: "Queue",
            head: true,
            sort: "queue",
            cell: (row) => h("div", { class: "name" }, anchor(row.queue, ["queues", row.queue])),
        },
        { name: "State", cell: queueState },
        { name: "Published", number: true, sort: "messages_per_second", cell: (row) => show.rate(row.messages_per_second) },
        { name: "Bytes", number: true, cell: (row) => show.byteRate(row.bytes_per_second) },
        { name: "Delivered", number: true, cell: (row) => show.rate(row.delivered_per_second) },
        { name: "Behind", number: true, cell: (row) => show.duration(row.lag_seconds) },
        { name: "Lost", number: true, cell: (row) => h("span", { class: row.lost > 0 ? "bad" : false }, show.count(row.lost)) },
        { name: "Publishers", number: true, cell: (row) => show.count(row.publishers) },
        { name: "Subscribers", number: true, cell: (row) => show.count(row.subscribers) },
        { name: "Exchanges", number: true, cell: (row) => show.count(row.exchanges) },
    ];
}
