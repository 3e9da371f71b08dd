/* All hosts. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { anchor, head, meter, panel, state, table } from "../parts.js";

export const hosts = {
    title: () => "Hosts",
    of: () => [url(["hosts"])],
    view: ([rows]) => [
        head("Hosts", { about: `${rows.filter((row) => row.alive).length} of ${rows.length} alive` }),
        panel(
            "Hosts",
            {},
            table("Hosts", COLUMNS, rows, { key: (row) => row.host, empty: "None: roq-hcm makes a machine one." }),
        ),
    ],
};

export function hostState(row) {
    if (!row.alive) return state("away", "bad");
    if (row.stopping) return state("stopping", "warn");
    if (row.leaving) return state("leaving", "warn");
    return row.draining ? state("cordoned", "warn") : state("alive", "good");
}

const COLUMNS = [
    { name: "Host", head: true, cell: (row) => anchor(row.host, ["hosts", row.host]) },
    { name: "Address", cell: (row) => row.address },
    { name: "State", cell: hostState },
    { name: "CPU", number: true, cell: (row) => meter(row.cpu_fraction) },
    { name: "Memory", number: true, cell: (row) => meter(row.memory_fraction) },
    { name: "Exchanges", number: true, cell: (row) => `${row.exchanges} of ${row.exchanges_max}` },
    { name: "Monitors", number: true, cell: (row) => show.count(row.monitors) },
    { name: "Processes", number: true, cell: (row) => show.count(row.processes) },
    { name: "Restarts", number: true, cell: (row) => show.count(row.restarts) },
    { name: "Given up", number: true, cell: (row) => h("span", { class: row.failed ? "bad" : false }, show.count(row.failed)) },
    { name: "Card ends", number: true, cell: (row) => (row.card_expires ? show.moment(row.card_expires) : "no card") },
];
