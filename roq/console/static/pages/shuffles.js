/* All shuffles. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, head, panel, table } from "../parts.js";

export const shuffles = {
    title: () => "Shuffles",
    of: () => [url(["shuffles"])],
    every: 3,
    view: ([rows]) => [
        head("Shuffles"),
        panel(
            "Shuffles",
            {},
            table("Shuffles", COLUMNS, rows, { key: (row) => row.id, empty: "None: programs and Spark make them." }),
        ),
    ],
};

const COLUMNS = [
    { name: "Shuffle", head: true, cell: (row) => h("div", { class: "name" }, anchor(row.name, ["shuffles", row.name])) },
    { name: "State", cell: (row) => row.state + (row.moving ? ", moving" : "") },
    { name: "Keys", cell: (row) => row.keys.join(", ") },
    { name: "Rows", number: true, cell: (row) => show.count(row.rows) },
    { name: "Size", number: true, cell: (row) => show.bytes(row.bytes) },
    { name: "Ranges", number: true, cell: (row) => show.count(row.ranges.length) },
    { name: "Attempts", number: true, cell: (row) => show.count(row.attempts) },
    { name: "Copies", number: true, cell: (row) => show.count(row.replicas) },
    { name: "Largest / mean", number: true, cell: (row) => (row.imbalance ? row.imbalance.toFixed(2) : "–") },
    { name: "Created", number: true, cell: (row) => show.moment(row.created) },
];
