/* Each host's store as it says itself, and what the doctor finds: ZooKeeper, leader, hosts, clocks, disks, and the copies of
   everything that is kept. */

import { Problem, url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, head, note, panel, state, table, trouble } from "../parts.js";

const WORDS = { good: ["good", "good"], warning: ["warning", "warn"], wrong: ["wrong", "bad"] };
const NO_STORES = "None yet: they start with the first queue that needs them.";
const RANK = { wrong: 0, warning: 1, good: 2 };

export const health = {
    title: () => "Stores and copies",
    of: () => [url(["stores"]), url(["doctor"])],
    every: 15,
    partly: true, // the doctor takes longer, and has something to say when no store can be asked
    view: ([stores, doctor], page) => [
        head("Stores and copies", { about: doctor?.time ? `as roq doctor finds them, ${show.moment(doctor.time)}` : "" }),
        doctor?.time ? verdictOnAll(doctor) : null,
        keptBy(stores, page),
        findings(doctor),
    ],
};

function verdictOnAll({ healthy }) {
    return healthy ? note("good", "Nothing is wrong.") : note("bad", "Something is wrong: see what to do below.");
}

function body(...children) {
    return h("div", { class: "body" }, children);
}

const loading = () => body(h("p", { class: "quiet" }, "Loading …"));

/* What was known stays while nobody can be asked. */
function keptBy(stores, page) {
    const wrong = stores instanceof Problem ? stores : null;
    if (!wrong) page.state.stores = stores;
    const rows = page.state.stores;
    const silent = rows?.filter((row) => !row.answers).length;
    return panel(
        "Stores",
        { about: rows ? `${rows.length - silent} of ${rows.length} answer` : null },
        wrong ? body(trouble(wrong)) : null,
        rows ? table("Stores", STORES, rows, { key: (row) => row.host, empty: NO_STORES }) : null,
        wrong || rows ? null : loading(),
    );
}

function findings(doctor) {
    if (doctor === undefined) return panel("Findings", {}, loading());
    if (doctor instanceof Problem) return panel("Findings", {}, body(trouble(doctor)));
    const rows = [...doctor.findings].sort((a, b) => RANK[a.verdict] - RANK[b.verdict]);
    return panel("Findings", { about: show.counted(rows.length, "finding") }, table("Findings", FINDINGS, rows));
}

/* Of the doctor, and of ZooKeeper's servers. */
export function verdict({ verdict: word }) {
    return state(...(WORDS[word] ?? [word, "quiet"]));
}

function storeState({ answers, problem }) {
    return answers ? state("answers", "good") : [state("does not answer", "bad"), h("div", { class: "quiet" }, problem)];
}

const STORES = [
    { name: "Host", head: true, cell: (row) => anchor(row.host, ["hosts", row.host]) },
    { name: "State", cell: storeState },
    { name: "Free on disk", number: true, cell: (row) => show.bytes(row.disk_free_bytes) },
    { name: "Journal", number: true, cell: (row) => show.bytes(row.journal_bytes) },
    { name: "Needed of it", number: true, cell: (row) => show.bytes(row.live_bytes) },
    { name: "Logs", number: true, cell: (row) => show.count(row.logs) },
    { name: "Segments", number: true, cell: (row) => show.count(row.segments) },
    { name: "Blobs", number: true, cell: (row) => show.count(row.blobs) },
    { name: "Bytes of blobs", number: true, cell: (row) => show.bytes(row.blob_bytes) },
    {
        name: "Damages",
        number: true,
        cell: (row) => h("span", { class: row.damages > 0 ? "bad" : false }, show.count(row.damages)),
    },
];

const FINDINGS = [
    { name: "What", head: true, cell: (one) => one.subject },
    { name: "Verdict", cell: verdict },
    {
        name: "Found",
        wide: true,
        cell: (one) => [one.found, one.advice ? h("div", { class: "quiet" }, "What to do: ", one.advice) : null],
    },
];
