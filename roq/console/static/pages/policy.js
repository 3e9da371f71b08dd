/* A queue's scaling policy: what holds, what another one would have done, and only then the change. */

import { post, put, url, whyNot } from "../api.js";
import { flat, h, morphChildren } from "../dom.js";
import * as show from "../format.js";
import { announce, confirm, note, panel, table, tiles, trouble } from "../parts.js";
import { own } from "../own.js";
import { queueHead } from "./queue_head.js";

const TABLES = {
    exchange: "One Exchange carries at most",
    host: "A host is used at most",
    queue: "Average over all Exchanges, at most",
    target: "What the queue shall reach",
    group: "Its groups, at most",
    bounds: "Limits of the scaling itself",
};
const WORDS = {
    max_messages_per_second: "Messages",
    max_bytes_per_second: "Bytes",
    max_cpu_fraction: "CPU",
    max_memory_fraction: "Memory",
    max_messages_per_second_per_exchange: "Messages",
    max_publishers_per_exchange: "Publishers",
    max_subscribers_per_exchange: "Subscribers",
    max_latency_p99_seconds: "Latency, p99",
    min_messages_per_second: "Messages, at least",
    min_messages_per_second_per_publisher: "A publisher, at least",
    max_lag_messages: "Lag",
    max_behind_seconds: "Behind",
    max_ready_seconds: "Oldest that waits",
    min_exchanges: "Exchanges, at least",
    max_exchanges: "Exchanges, at most",
    cooldown_seconds: "Rest after a change",
    hysteresis: "Hysteresis",
    credit: "Credit",
};
const SPANS = [
    ["15m", "15 minutes"],
    ["1h", "hour"],
    ["6h", "6 hours"],
    ["1d", "day"],
    ["7d", "week"],
];

export const policy = {
    title: ({ queue }) => `Policy of ${queue}`,
    of: (page) => [url(["queues", page.names.queue, "policy"])],
    every: 5,
    view([found], page) {
        const { queue } = page.names;
        const why = whyNot("admin", queue);
        return [
            ...queueHead(queue, "policy"),
            changedMeanwhile(found, page),
            own(`policy of ${queue}`, () => editor(found, page, why)),
        ];
    },
};

/* The form shows what held when it was made. */
function changedMeanwhile(found, page) {
    page.state.holds ??= JSON.stringify(found.policy);
    const same = page.state.holds === JSON.stringify(found.policy);
    return h(
        "div",
        { key: "meanwhile" },
        same ? null : note("warn", "Somebody else has changed this policy meanwhile: load the page again to see it."),
    );
}

function editor(found, page, why) {
    const { queue } = page.names;
    const answer = h("div", { class: "stack", "aria-live": "polite" });
    const tell = (...nodes) => morphChildren(answer, flat(nodes));
    const apply = h("button", { type: "button", class: "first", disabled: true, "aria-describedby": "apply-why" }, "Apply");
    const reason = h(
        "span",
        { class: "quiet", id: "apply-why" },
        why ? `${why} Looking is allowed.` : "Replay it first: then you see what you apply.",
    );
    let tried = null;

    const form = h(
        "form",
        {
            class: "stack",
            oninput: () => touched(),
            onsubmit: (event) => {
                event.preventDefault();
                replay();
            },
        },
        h(
            "div",
            { class: "rules" },
            Object.keys(found.policy).map((name) => fieldset(name, TABLES[name] ?? name, found)),
        ),
        h(
            "div",
            { class: "row" },
            h("label", { for: "what-if-since" }, "What would it have done in the last"),
            h(
                "select",
                { id: "what-if-since" },
                SPANS.map(([value, text]) => h("option", { value, selected: value === "1h" }, text)),
            ),
            h("button", null, "Replay"),
            apply,
            reason,
        ),
    );

    /* What was replayed is not what stands there any more. */
    function touched() {
        tried = null;
        apply.disabled = true;
        if (!why) reason.textContent = "Replay it first: then you see what you apply.";
    }

    function ready(wanted) {
        tried = wanted;
        apply.disabled = Boolean(why);
        if (!why) reason.textContent = "";
    }

    async function replay() {
        const wanted = read(form);
        tell(h("p", { class: "quiet" }, "Replaying what was recorded …"));
        try {
            const course = await post(["queues", queue, "policy", "what-if"], {
                policy: wanted,
                since: form.querySelector("#what-if-since").value,
            });
            tell(comparison(course));
            ready(wanted);
        } catch (error) {
            if (error.title === "NotRecorded") {
                tell(
                    note(
                        "warn",
                        "This cluster keeps no history to replay. The policy can be applied all the same. ",
                        h("code", null, "roq history on"),
                        " changes that.",
                    ),
                );
                ready(wanted);
                return;
            }
            if (error.title === "AccessDenied") {
                tell(
                    note(
                        "warn",
                        `You may not read this cluster's history: ${error.message}. `,
                        "The policy can be applied all the same, untried.",
                    ),
                );
                ready(wanted);
                return;
            }
            tell(trouble(error));
        }
    }

    apply.onclick = async () => {
        const wanted = tried;
        const changes = differences(found, wanted);
        const text = changes.length
            ? h(
                  "ul",
                  null,
                  changes.map((one) => h("li", null, one)),
              )
            : h("p", null, "Nothing is different from what holds.");
        if (!(await confirm({ title: `Apply this policy to ${queue}?`, text, action: "Apply" }))) return;
        try {
            found = await put(["queues", queue, "policy"], { policy: wanted });
            page.state.holds = JSON.stringify(found.policy);
            tell(note("good", `It holds from the next second on: ${show.counted(changes.length, "change")}.`));
            announce("The policy was applied.");
            touched();
        } catch (error) {
            tell(trouble(error));
        }
    };
    return [panel("Policy", { about: "a rule that is left empty is off" }, h("div", { class: "body" }, form)), answer];
}

function fieldset(table_, title, { policy: holds, fields }) {
    const mine = fields.filter(({ name }) => name.startsWith(`${table_}.`));
    const field = ({ name, unit, meaning, sample }) => {
        const key = name.slice(table_.length + 1);
        const now = holds[table_][key];
        const id = `field-${table_}-${key}`;
        return h(
            "div",
            { class: "field" },
            h("label", { for: id }, `${WORDS[key] ?? key} `, h("span", { class: "quiet" }, `(${unit})`)),
            h("input", {
                id,
                name,
                inputmode: "decimal",
                value: now === null ? "" : String(now),
                placeholder: sample ? `off, as ${sample}` : "off",
                "aria-describedby": `${id}-hint`,
                autocomplete: "off",
            }),
            h("span", { class: "hint", id: `${id}-hint` }, meaning),
        );
    };
    return h("fieldset", null, h("legend", null, title), h("div", { class: "grid" }, mine.map(field)));
}

/* The tables as they stand in the form; what is no number goes as text, and the console says what is wrong with it. */
function read(form) {
    const found = {};
    for (const { name, value } of form.querySelectorAll("input[name]")) {
        const [table_, key] = name.split(".");
        const text = value.trim().replaceAll(/[_\s,]/g, "");
        found[table_] ??= {};
        if (text !== "") found[table_][key] = Number.isNaN(Number(text)) ? value : Number(text);
    }
    return found;
}

function differences({ policy: holds, fields }, wanted) {
    const write = (value) => (value === null || value === undefined ? "off" : String(value));
    return fields.flatMap(({ name }) => {
        const [table_, key] = name.split(".");
        const [before, after] = [write(holds[table_][key]), write(wanted[table_][key])];
        return before === after ? [] : [`${name}: ${before} → ${after}`];
    });
}

function comparison(course) {
    const both = (number, recorded) => [show.count(number), `${show.count(recorded)} in fact`];
    const marks = (one) => (one.taken && one.would ? "both" : one.taken ? "taken in fact" : "this policy");
    const columns = [
        { name: "When", cell: (one) => show.moment(one.time) },
        { name: "Who decides it", cell: marks },
        { name: "Decision", head: true, cell: (one) => one.action },
        { name: "Cause", wide: true, cell: (one) => one.cause },
        { name: "Outcome", cell: (one) => one.outcome || "–" },
    ];
    return panel(
        "What it would have done",
        { about: `${show.moment(course.begin)} to ${show.moment(course.end)}, ${show.counted(course.records, "record")}` },
        h(
            "div",
            { class: "body" },
            tiles(
                [
                    ["Decisions", ...both(course.would, course.taken)],
                    ["The same", show.count(course.same), "taken in fact, too"],
                    [
                        "Over a limit",
                        show.duration(course.over_seconds),
                        `${show.duration(course.recorded_over_seconds)} in fact`,
                    ],
                    ["Exchanges at most", ...both(course.exchanges_most, course.recorded_exchanges_most)],
                ],
                "This policy beside what happened",
            ),
        ),
        table("Decisions of this policy and those taken", columns, [...course.decisions].reverse(), {
            empty: "Neither this policy nor the one that held decides anything.",
        }),
    );
}
