/* What the doctor finds: ZooKeeper, leader, hosts, clocks, disks, and the copies of everything that is kept. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { head, note, panel, state, table } from "../parts.js";

const WORDS = { good: ["good", "good"], warning: ["warning", "warn"], wrong: ["wrong", "bad"] };
const RANK = { wrong: 0, warning: 1, good: 2 };

export const health = {
    title: () => "Stores and copies",
    of: () => [url(["doctor"])],
    every: 15,
    view([{ time, healthy, findings }]) {
        const rows = [...findings].sort((a, b) => RANK[a.verdict] - RANK[b.verdict]);
        return [
            head("Stores and copies", { about: `as roq doctor finds them, ${show.moment(time)}` }),
            healthy ? note("good", "Nothing is wrong.") : note("bad", "Something is wrong: see what to do below."),
            panel("Findings", { about: show.counted(rows.length, "finding") }, table("Findings", COLUMNS, rows)),
        ];
    },
};

/* Of the doctor, and of ZooKeeper's servers. */
export function verdict({ verdict: word }) {
    return state(...(WORDS[word] ?? [word, "quiet"]));
}

const COLUMNS = [
    { name: "What", head: true, cell: (one) => one.subject },
    { name: "Verdict", cell: verdict },
    {
        name: "Found",
        wide: true,
        cell: (one) => [one.found, one.advice ? h("div", { class: "quiet" }, "What to do: ", one.advice) : null],
    },
];
