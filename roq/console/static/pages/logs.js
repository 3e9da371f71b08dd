/* The last lines of a process's log. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { head, panel } from "../parts.js";

const BYTES = 65_536;
const HIDDEN = new Set(["t", "level", "logger", "pid", "host", "process", "message", "exception"]);
const KINDS = { warning: "warn", error: "bad", critical: "bad" };

export const logs = {
    title: ({ process }) => process,
    of: (page) => [url(["hosts", page.names.host, "logs"], { process: page.names.process, bytes: BYTES })],
    every: 3,
    view([found], page) {
        const { host, process } = page.names;
        const shown =
            found.size > found.bytes
                ? `the last ${show.bytes(found.bytes)} of ${show.bytes(found.size)}`
                : show.bytes(found.size);
        const lines = found.text.split("\n").filter(Boolean);
        const follow = () => document.getElementById("log")?.scrollTo(0, Number.MAX_SAFE_INTEGER);
        if (!page.state.seen) {
            page.state.seen = true;
            queueMicrotask(follow);
        }
        return [
            head(process, {
                crumbs: [
                    ["Hosts", ["hosts"]],
                    [host, ["hosts", host]],
                ],
                about: shown,
                actions: [h("button", { type: "button", onclick: follow }, "To the end")],
            }),
            panel(
                "Log",
                {},
                lines.length
                    ? h(
                          "div",
                          { id: "log", class: "log", tabindex: "0", role: "group", "aria-label": `Log of ${process}` },
                          h(
                              "ol",
                              null,
                              lines.map((text, at) => line(text, `${found.size - found.bytes} ${at}`)),
                          ),
                      )
                    : h("p", { class: "empty" }, "It has written nothing."),
            ),
        ];
    },
};

/* A line as it was written, or what it says if it is one of RoQ's. */
function line(text, key) {
    let said;
    try {
        said = JSON.parse(text);
    } catch {
        return h("li", { key }, text);
    }
    if (said === null || typeof said.message !== "string") return h("li", { key }, text);
    const fields = Object.entries(said).filter(([name]) => !HIDDEN.has(name));
    return h(
        "li",
        { key },
        h("time", { class: "quiet", title: said.logger ?? "" }, show.moment(said.t)),
        " ",
        h("span", { class: KINDS[said.level] ?? "quiet" }, said.level),
        " ",
        h("strong", null, said.message),
        fields.map(([name, value]) => [
            " ",
            h("span", { class: "quiet" }, `${name}=`),
            typeof value === "string" ? value : JSON.stringify(value),
        ]),
        said.exception ? h("pre", null, said.exception) : null,
    );
}
