/* ZooKeeper and who leads by it. */

import { url } from "../api.js";
import { h } from "../dom.js";
import { facts, head, panel, table } from "../parts.js";
import { verdict } from "./health.js";

export const zookeeper = {
    title: () => "ZooKeeper",
    of: () => [url(["zookeeper"])],
    every: 5,
    view: ([{ servers, leader, epoch, chroot, candidates }]) => [
        head("ZooKeeper"),
        panel("Servers", {}, table("Servers", COLUMNS, servers, { key: (one) => one.server })),
        panel(
            "Leadership",
            {},
            h(
                "div",
                { class: "body" },
                facts([
                    ["Leading GCM", leader || "none"],
                    ["Epoch", String(epoch)],
                    ["In the election", candidates.length ? candidates.join(", ") : "nobody"],
                    ["Chroot", h("code", null, chroot)],
                ]),
            ),
        ),
    ],
};

const COLUMNS = [
    { name: "Server", head: true, cell: (one) => one.server },
    { name: "Verdict", cell: verdict },
    {
        name: "Found",
        wide: true,
        cell: (one) => [one.found, one.advice ? h("div", { class: "quiet" }, "What to do: ", one.advice) : null],
    },
];
