/* One host: what it has, and what runs on it. */

import { post, url, whyNot } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, announce, confirm, facts, head, meter, panel, state, table, tiles, trouble } from "../parts.js";
import { hostState } from "./hosts.js";

const STATES = { running: "good", starting: "warn", stopping: "warn", failed: "bad" };

export const host = {
    title: ({ host: name }) => name,
    of: (page) => [url(["hosts", page.names.host])],
    view([found], page) {
        const row = found.host;
        return [
            head(row.host, { crumbs: [["Hosts", ["hosts"]]], about: hostState(row), actions: [cordon(row, page)] }),
            h("div", { key: "result" }, page.state.wrong ? trouble(page.state.wrong) : null),
            numbers(row),
            panel(
                "Processes",
                {
                    about: h(
                        "span",
                        null,
                        "its HCM logs to its own standard error: ",
                        h("code", null, "journalctl -u roq-hcm"),
                        " there",
                    ),
                },
                table("Processes", columns(row.host), found.processes, {
                    key: (one) => one.name,
                    empty: row.alive ? "None." : "Its HCM is away, nobody says.",
                }),
            ),
            found.capacity ? capacity(found.capacity) : null,
        ];
    },
};

function cordon(row, page) {
    const why = whyNot("admin") || (row.stopping ? "It is about to end." : "");
    const [verb, text, asked] = row.draining
        ? ["uncordon", "Uncordon", "New queues and Exchanges are placed here again."]
        : ["cordon", "Cordon", "Nothing new is placed here from now on; what runs goes on."];
    const act = async () => {
        if (!(await confirm({ title: `${text} ${row.host}?`, text: asked, action: text }))) return;
        try {
            await post(["hosts", row.host, verb]);
            page.state.wrong = null;
            announce(`${row.host}: ${text.toLowerCase()} done.`);
        } catch (error) {
            page.state.wrong = error;
        }
        await page.reload();
    };
    return h("button", { type: "button", disabled: Boolean(why), title: why || false, onclick: act }, text);
}

function numbers(row) {
    return tiles(
        [
            ["CPU", show.percent(row.cpu_fraction), "of all cores"],
            ["Memory", show.percent(row.memory_fraction), "in use"],
            ["Exchanges", show.count(row.exchanges), `of ${show.counted(row.exchanges_max, "slot")}`],
            [
                "Processes",
                show.count(row.processes),
                row.failed ? `${row.failed} given up` : "none given up",
                row.failed > 0 && "bad",
            ],
            ["Restarts", show.count(row.restarts), "of its processes"],
            [
                "Address",
                h("span", { class: "small" }, row.address),
                row.card_expires ? `card ends ${show.moment(row.card_expires)}` : "no card",
            ],
        ],
        "The host in numbers",
    );
}

function columns(name) {
    const of = (one) => {
        if (!one.queue) return "–";
        return h("div", { class: "name" }, anchor(one.queue, [one.kind === "master" ? "work-queues" : "queues", one.queue]));
    };
    return [
        {
            name: "Process",
            head: true,
            cell: (one) => h("div", { class: "name" }, anchor(one.name, ["hosts", name, one.name])),
        },
        { name: "Kind", cell: (one) => one.kind },
        { name: "Of", cell: of },
        { name: "State", cell: (one) => state(one.state === "failed" ? "given up" : one.state, STATES[one.state] ?? "quiet") },
        { name: "Process id", number: true, cell: (one) => String(one.pid || "–") },
        { name: "Restarts", number: true, cell: (one) => show.count(one.restarts) },
        {
            name: "Ports",
            cell: (one) =>
                h(
                    "div",
                    { class: "ports" },
                    Object.entries(one.ports)
                        .map(([role, port]) => `${role} ${port}`)
                        .join(", "),
                ),
        },
        { name: "Error", cell: (one) => h("div", { class: one.error ? "ports bad" : false }, one.error || "–") },
    ];
}

function capacity(found) {
    const write = (field, value) => {
        if (field.includes("bytes")) return show.bytes(value);
        if (field.includes("fraction")) return meter(value);
        if (field === "time") return show.moment(value);
        return typeof value === "number" ? show.count(value) : String(value);
    };
    const words = (field) =>
        field[0].toUpperCase() +
        field
            .slice(1)
            .replace(/_(bytes|fraction)$/, "")
            .replaceAll("_", " ");
    const known = Object.entries(found).filter(([, value]) => value !== null && typeof value !== "object");
    return panel(
        "Machine",
        {},
        h("div", { class: "body" }, facts(known.map(([field, value]) => [words(field), write(field, value)]))),
    );
}
