/* Who publishes to a queue and who subscribes to it. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { panel, state, table } from "../parts.js";
import { queueHead } from "./queue_head.js";

const SHOWN_MAX = 200;

export const members = {
    title: ({ queue }) => `Members of ${queue}`,
    of: (page) => [url(["queues", page.names.queue])],
    view([found], page) {
        const of = (role) => found.members.filter((member) => member.role === role);
        return [
            ...queueHead(page.names.queue, "members"),
            part("Publishers", of("publisher"), publisher),
            part("Subscribers", of("subscriber"), subscriber),
        ];
    },
};

function part(title, rows, columns) {
    const more = rows.length > SHOWN_MAX ? `the first ${SHOWN_MAX} of ${show.count(rows.length)}` : show.count(rows.length);
    return panel(
        title,
        { about: more },
        table(title, columns, rows.slice(0, SHOWN_MAX), { key: (row) => row.id, empty: "Nobody." }),
    );
}

const id = { name: "Id", head: true, cell: (row) => h("code", null, row.id) };
const where = { name: "Exchanges", cell: (row) => row.exchanges.map((one) => one.slice(0, 8)).join(", ") };
const silent = { name: "Last heard", number: true, cell: (row) => `${show.duration(row.silent_seconds)} ago` };

const publisher = [
    id,
    where,
    { name: "Path", number: true, cell: (row) => show.count(row.path) },
    { name: "Published", number: true, cell: (row) => show.rate(row.messages_per_second) },
    { name: "Bytes", number: true, cell: (row) => show.byteRate(row.bytes_per_second) },
    { name: "Blocked", number: true, cell: (row) => show.percent(row.blocked_fraction) },
    { name: "Given up", number: true, cell: (row) => show.count(row.dropped) },
    silent,
];

const subscriber = [
    id,
    { name: "State", cell: (row) => (row.ready ? state("attached", "good") : state("attaching", "warn")) },
    where,
    { name: "Taken", number: true, cell: (row) => show.rate(row.messages_per_second) },
    { name: "Bytes", number: true, cell: (row) => show.byteRate(row.bytes_per_second) },
    { name: "Behind", number: true, cell: (row) => show.duration(row.lag_seconds) },
    { name: "Latency, p99", number: true, cell: (row) => show.duration(row.latency_p99_seconds) },
    { name: "Lost", number: true, cell: (row) => h("span", { class: row.lost > 0 ? "bad" : false }, show.count(row.lost)) },
    silent,
];
