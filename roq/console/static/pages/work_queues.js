/* Work queues and groups, a page at a time. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, head, pager, panel, state, table } from "../parts.js";
import { own } from "../own.js";

const STEP = 50;
const WAIT_MS = 200;
const KINDS = [
    ["all", "all"],
    ["work", "work queues"],
    ["group", "groups"],
];

export const workQueues = {
    title: () => "Work queues",
    of: (page) => {
        const { search, kind, offset = 0 } = page.query;
        return [url(["work-queues"], { search, kind, offset, limit: STEP })];
    },
    view: ([{ total, offset, rows }], page) => [
        head("Work queues", { about: "and groups of recorded queues" }),
        own("work-queues-search", () => finder(page)),
        panel(
            "Work queues",
            {},
            table("Work queues", COLUMNS, rows, {
                key: (row) => row.name,
                empty: "None: programs make them, or roq task put.",
            }),
        ),
        pager(offset, rows.length, total, STEP, (to) => page.ask({ offset: String(to) }), "work queue"),
    ],
};

function finder(page) {
    let timer = 0;
    const typed = (event) => {
        clearTimeout(timer);
        timer = setTimeout(() => page.ask({ search: event.target.value, offset: "" }), WAIT_MS);
    };
    const chosen = page.query.kind ?? "all";
    return h(
        "form",
        { class: "row", role: "search", onsubmit: (event) => event.preventDefault() },
        h("label", { for: "search" }, "Name"),
        h("input", {
            type: "search",
            id: "search",
            value: page.query.search ?? "",
            oninput: typed,
            placeholder: "part of a name",
            autocomplete: "off",
        }),
        h("label", { for: "kind" }, "Show"),
        h(
            "select",
            {
                id: "kind",
                onchange: (event) => page.ask({ kind: event.target.value === "all" ? "" : event.target.value, offset: "" }),
            },
            KINDS.map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
        ),
    );
}

export function workState(row) {
    if (row.problem) return state("problem", "bad");
    return row.ready ? state("ready", "good") : state("no master", "bad");
}

/* Its dead letters, and the way to them. */
export function deadOf(row) {
    return row.dead
        ? h("a", { class: "bad", href: `#/work-queues/${encodeURIComponent(row.name)}/dead` }, show.count(row.dead))
        : "0";
}

const COLUMNS = [
    { name: "Work queue", head: true, cell: (row) => h("div", { class: "name" }, anchor(row.name, ["work-queues", row.name])) },
    { name: "Kind", cell: (row) => (row.group ? "group" : "work queue") },
    { name: "State", cell: workState },
    { name: "Waiting", number: true, cell: (row) => show.count(row.waiting) },
    { name: "Leased", number: true, cell: (row) => show.count(row.leased) },
    { name: "Dead letters", number: true, cell: deadOf },
    { name: "Completed", number: true, cell: (row) => show.count(row.completed) },
    { name: "Oldest", number: true, cell: (row) => show.duration(row.oldest_seconds) },
    { name: "Behind", number: true, cell: (row) => show.duration(row.behind_seconds) },
    { name: "Master", cell: (row) => (row.master ? anchor(row.master, ["hosts", row.master]) : "–") },
];
