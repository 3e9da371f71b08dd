/* One shuffle and its ranges. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, head, panel, table, tiles } from "../parts.js";

const SHOWN_MAX = 300;

export const shuffle = {
    title: ({ name }) => name,
    of: (page) => [url(["shuffles", page.names.name])],
    every: 3,
    view([row]) {
        const more =
            row.ranges.length > SHOWN_MAX
                ? `the first ${SHOWN_MAX} of ${show.count(row.ranges.length)}`
                : show.count(row.ranges.length);
        return [
            head(row.name, { crumbs: [["Shuffles", ["shuffles"]]], about: row.state }),
            tiles(
                [
                    ["Rows", show.count(row.rows), `by ${row.keys.join(", ")}`],
                    ["Size", show.bytes(row.bytes), show.counted(row.replicas, "copy", "copies")],
                    ["Attempts", show.count(row.attempts), "stored"],
                    ["Ranges", show.count(row.ranges.length), row.moving ? "moving" : `table ${row.table}`],
                    ["Largest / mean", row.imbalance ? row.imbalance.toFixed(2) : "–", "of ranges"],
                    ["Moved", show.bytes(row.moved), `${show.bytes(row.moved_least)} had to`],
                ],
                "The shuffle in numbers",
            ),
            panel(
                "Ranges",
                { about: more },
                table("Ranges", COLUMNS, row.ranges.slice(0, SHOWN_MAX), {
                    key: (one) => String(one.number),
                    empty: "None yet: it is being written.",
                }),
            ),
        ];
    },
};

const counted = (number) => (number < 0 ? "–" : show.count(number));
const COLUMNS = [
    { name: "Range", head: true, number: true, cell: (one) => show.count(one.number) },
    { name: "Rows", number: true, cell: (one) => counted(one.rows) },
    { name: "Size", number: true, cell: (one) => (one.bytes < 0 ? "–" : show.bytes(one.bytes)) },
    { name: "Holders", cell: (one) => one.holders.map((host, at) => [at ? ", " : null, anchor(host, ["hosts", host])]) },
    { name: "Begins at key", wide: true, cell: (one) => h("code", null, one.lower.slice(0, 64) || "the first") },
];
