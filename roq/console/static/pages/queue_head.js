/* What the pages of one queue share: its name, state and the way between them. */

import { h } from "../dom.js";
import { head, link } from "../parts.js";

const PARTS = [
    ["Now", []],
    ["Members", ["members"]],
    ["History", ["history"]],
    ["Policy", ["policy"]],
    ["Record", ["records"]],
];

/* here: last word of the address, "" for the first page. */
export function queueHead(queue, here, about = "") {
    const entry = ([text, words]) =>
        h(
            "li",
            null,
            h(
                "a",
                { href: link(["queues", queue, ...words]), "aria-current": (words[0] ?? "") === here ? "page" : false },
                text,
            ),
        );
    return [
        head(queue, { crumbs: [["Queues", ["queues"]]], about }),
        h("nav", { class: "tabs", "aria-label": "About this queue", key: "tabs" }, h("ul", null, PARTS.map(entry))),
    ];
}
