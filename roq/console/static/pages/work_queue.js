/* One work queue or group: how it stands, and what waits in it. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, facts, head, link, note, panel, table, tiles } from "../parts.js";
import { own } from "../own.js";
import { workState } from "./work_queues.js";

const COUNT = 50;
const STATES = ["ready", "delayed", "leased", "dead"];

export const workQueue = {
    title: ({ name }) => name,
    of(page) {
        const { name } = page.names;
        const wanted = page.query.state ?? "ready";
        return [url(["work-queues", name]), url(["work-queues", name, "tasks"], { state: wanted, count: COUNT })];
    },
    view([row, tasks], page) {
        const desk = row.dead
            ? [
                  h(
                      "a",
                      { class: "button", href: link(["work-queues", row.name, "dead"]) },
                      `Dead letters: ${show.count(row.dead)}`,
                  ),
              ]
            : [];
        return [
            head(row.name, { crumbs: [["Work queues", ["work-queues"]]], about: workState(row), actions: desk }),
            row.problem ? note("bad", row.problem) : null,
            numbers(row),
            about(row),
            own(`state of ${row.name}`, () => chooser(page)),
            panel(
                "Tasks",
                { about: `the first ${COUNT} that are ${page.query.state ?? "ready"}`, key: "tasks" },
                table("Tasks", TASKS, tasks, { key: (one) => one.id }),
            ),
        ];
    },
};

function numbers(row) {
    return tiles(
        [
            [
                "Waiting",
                show.count(row.waiting),
                row.oldest_seconds ? `the oldest for ${show.duration(row.oldest_seconds)}` : "",
            ],
            ["Leased", show.count(row.leased), "being worked on"],
            [
                "Dead letters",
                show.count(row.dead),
                row.max_attempts ? `after ${show.counted(row.max_attempts, "attempt")}` : "if rejected",
                row.dead > 0 && "bad",
            ],
            ["Completed", show.count(row.completed), row.expired ? `${show.count(row.expired)} expired` : ""],
            ["Inserted", show.count(row.inserted), ""],
            ...(row.group
                ? [["Behind", show.duration(row.behind_seconds), row.lag === null ? "" : show.counted(row.lag, "message")]]
                : []),
        ],
        "The work queue in numbers",
    );
}

function about(row) {
    const group = row.group
        ? [
              ["Group", h("span", null, row.group, " of ", anchor(row.queue, ["queues", row.queue]))],
              ["Topics", row.topics.length ? row.topics.join("  ") : "all"],
              ["Order", String(row.order)],
              ["Condition", row.where ? h("code", null, row.where) : "none"],
              ["Began at", row.start],
          ]
        : [];
    return panel(
        "About",
        {},
        h(
            "div",
            { class: "body" },
            facts([
                ["Master", row.master ? anchor(row.master, ["hosts", row.master]) : "none serves"],
                ["Copies", row.copies || "–"],
                ...group,
            ]),
        ),
    );
}

function chooser(page) {
    const chosen = page.query.state ?? "ready";
    const options = STATES.map((each) => h("option", { value: each, selected: each === chosen }, each));
    return h(
        "div",
        { class: "row" },
        h("label", { for: "task-state" }, "Tasks that are"),
        h("select", { id: "task-state", onchange: (event) => page.ask({ state: event.target.value }) }, options),
    );
}

const TASKS = [
    { name: "Id", head: true, cell: (one) => h("code", null, one.id) },
    { name: "Topic", cell: (one) => one.topic || "–" },
    { name: "Attempts", number: true, cell: (one) => show.count(one.attempts) },
    { name: "Inserted", number: true, cell: (one) => show.moment(one.inserted) },
    { name: "Holder", cell: (one) => one.holder || "–" },
    { name: "Payload", wide: true, cell: (one) => h("code", null, start(one.payload)) },
];

function start({ encoding, text, bytes }) {
    return encoding === "base64" ? `${show.bytes(bytes)} of binary` : text.slice(0, 120) + (text.length > 120 ? " …" : "");
}
