/* What is kept of a queue's messages: its tapes, named producers, durable subscribers. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, note, panel, state, table } from "../parts.js";
import { queueHead } from "./queue_head.js";

export const records = {
    title: ({ queue }) => `Record of ${queue}`,
    of: (page) => ["tapes", "producers", "durables"].map((part) => url(["queues", page.names.queue, part])),
    every: 5,
    without: "NotRecorded",
    view(answers, page) {
        const { queue } = page.names;
        const top = queueHead(queue, "records");
        if (answers === null)
            return [
                ...top,
                note(
                    "",
                    "This queue is not recorded. ",
                    h("code", null, `roq queue record ${queue} --days 7`),
                    " keeps its messages from then on.",
                ),
            ];
        const [tapes, producers, durables] = answers;
        return [
            ...top,
            panel(
                "Tapes",
                { about: show.count(tapes.length) },
                table("Tapes", TAPES, tapes, { key: (row) => row.log }),
            ),
            panel(
                "Producers with a name",
                { about: show.count(producers.length) },
                table("Producers with a name", PRODUCERS, producers, { key: (row) => row.name }),
            ),
            panel(
                "Durable subscribers",
                { about: show.count(durables.length) },
                table("Durable subscribers", DURABLES, durables, { key: (row) => row.name }),
            ),
        ];
    },
};

const TAPE_STATES = { live: "good", ending: "warn", ended: "quiet" };
const TAPES = [
    { name: "Exchange", head: true, cell: (row) => h("code", null, row.exchange.slice(0, 8)) },
    { name: "State", cell: (row) => state(row.state, TAPE_STATES[row.state] ?? "quiet") },
    { name: "First entry", number: true, cell: (row) => show.count(row.first) },
    { name: "Last entry", number: true, cell: (row) => show.count(row.last) },
    { name: "Segments", number: true, cell: (row) => show.count(row.segments) },
    { name: "Copies", number: true, cell: (row) => `${row.copies}, ${row.ack} before it counts` },
    { name: "On hosts", cell: (row) => row.hosts.map((host, at) => [at ? ", " : null, anchor(host, ["hosts", host])]) },
    { name: "Oldest closed", number: true, cell: (row) => show.moment(row.oldest_closed) },
];
const OPENED = [
    { name: "Opened by", cell: (row) => row.owner || "–" },
    { name: "Opened", number: true, cell: (row) => show.moment(row.opened) },
    { name: "Kept", number: true, cell: (row) => show.moment(row.kept) },
];
const PRODUCERS = [
    { name: "Name", head: true, cell: (row) => row.name },
    { name: "Last number stored", number: true, cell: (row) => show.count(row.number) },
    { name: "State", cell: (row) => (row.closed ? "closed" : "open, or ended without closing") },
    ...OPENED,
];
const DURABLES = [
    { name: "Name", head: true, cell: (row) => row.name },
    { name: "Entries done", number: true, cell: (row) => show.count(row.entries) },
    { name: "Tapes begun", number: true, cell: (row) => show.count(row.tapes) },
    ...OPENED,
];
