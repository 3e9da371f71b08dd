/* The dead-letter desk: letters by the pattern of their error; one is looked at, edited and tried; then all of the pattern. */

import { post, url, whyNot } from "../api.js";
import { flat, h, morphChildren } from "../dom.js";
import * as show from "../format.js";
import { confirm, facts, head, note, panel, table, trouble } from "../parts.js";
import { own } from "../own.js";

const EDITED = "What you change is put as a new task, and this letter is removed.";
const REPUBLISHED =
    "What you change is published to the queue again, for every group and subscriber, and this letter is removed.";

export const deadLetters = {
    title: ({ name }) => `Dead letters of ${name}`,
    of: (page) => [url(["work-queues", page.names.name, "dead"])],
    every: 3,
    view([found], page) {
        const { name } = page.names;
        const chosen = found.patterns.find((one) => one.id === page.query.pattern);
        const looked =
            found.looked_at < found.total
                ? `the oldest ${show.count(found.looked_at)} of ${show.count(found.total)} were looked at`
                : show.counted(found.total, "letter");
        return [
            head("Dead letters", {
                crumbs: [
                    ["Work queues", ["work-queues"]],
                    [name, ["work-queues", name]],
                ],
                about: looked,
            }),
            h("div", { key: "result", id: "result", tabindex: "-1", role: "status" }, page.state.result ?? null),
            panel(
                "Errors",
                { about: "numbers, ids and addresses in their texts are put together" },
                table("Errors", columns(page, chosen), found.patterns, {
                    key: (one) => one.id,
                    empty: "No dead letter: nothing has failed for good.",
                }),
            ),
            chosen ? own(`letter ${name} ${chosen.example.id}`, () => desk(chosen, page)) : null,
        ];
    },
};

function columns(page, chosen) {
    const open = (one) =>
        h(
            "button",
            {
                type: "button",
                "aria-pressed": String(one === chosen),
                "aria-label": `Look at: ${one.pattern}`,
                onclick: () => page.ask({ pattern: one === chosen ? "" : one.id }),
            },
            one === chosen ? "Close" : "Look at",
        );
    return [
        { name: "Error", head: true, wide: true, cell: (one) => one.pattern || "no error text" },
        { name: "Letters", number: true, cell: (one) => show.count(one.count) },
        { name: "First", number: true, cell: (one) => show.moment(one.first) },
        { name: "Last", number: true, cell: (one) => show.moment(one.last) },
        { name: "Attempts", number: true, cell: (one) => show.count(one.attempts_most) },
        { name: "Example", cell: open },
    ];
}

function desk(pattern, page) {
    const { name } = page.names;
    const letter = pattern.example;
    const group = name.includes("@"); // of a recorded queue
    const why = whyNot("admin", name);
    const answer = h("div", { class: "stack", role: "status" });
    const tell = (...nodes) => morphChildren(answer, flat(nodes));
    const fixed = whyFixed(letter.payload) || whyNot(...(group ? ["publish", name.split("@")[0]] : ["put", name]));
    const text = h("textarea", { id: "payload", class: "mono", readonly: Boolean(why || fixed), spellcheck: "false" });
    text.value = letter.payload.text;
    const shown = text.value; // with its own idea of line ends

    async function act(work, done) {
        try {
            const found = await work();
            page.state.result = note("good", done(found));
            await page.reload();
            document.getElementById("result").focus(); // the letter, and with it the button, may have gone
        } catch (error) {
            tell(trouble(error));
        }
    }

    const one = async () => {
        const edited = !fixed && text.value !== shown;
        if (edited && group && !(await confirm({ title: "Publish it again?", text: REPUBLISHED, action: "Publish" })))
            return undefined;
        const body = edited
            ? {
                  payload: { encoding: letter.payload.encoding, text: withLineEnds(text.value, letter.payload.text) },
                  ...(group && { republish: true }),
              }
            : {};
        return act(
            () => post(["work-queues", name, "dead", letter.id, "redrive"], body),
            (found) =>
                [
                    `Letter ${letter.id} waits again${found.edited ? ", as edited" : ""}.`,
                    found.id && found.id !== letter.id ? `Its new id is ${found.id}.` : "",
                ].join(" "),
        );
    };
    const all = async () => {
        const asked = `All ${show.counted(pattern.count, "letter")} with this error wait again, as they are.`;
        if (
            !(await confirm({ title: `Redrive ${show.counted(pattern.count, "letter")}?`, text: asked, action: "Redrive all" }))
        )
            return;
        await act(
            () => post(["work-queues", name, "dead", "requeue"], { pattern: pattern.id }),
            ({ done, left }) => `${show.counted(done, "letter")} of “${pattern.pattern}” redriven; ${show.count(left)} left.`,
        );
    };
    const remove = async () => {
        const asked = `Removed for good: ${show.counted(pattern.count, "letter")} with this error. Nobody can bring them back.`;
        if (
            !(await confirm({
                title: `Remove ${show.counted(pattern.count, "letter")}?`,
                text: asked,
                action: "Remove all",
                danger: true,
            }))
        )
            return;
        await act(
            () => post(["work-queues", name, "dead", "remove"], { pattern: pattern.id }),
            ({ done, left }) => `${show.counted(done, "letter")} removed; ${show.count(left)} left.`,
        );
    };

    return panel(
        `An example of ${show.counted(pattern.count, "letter")}`,
        { about: pattern.pattern, key: "example" },
        h(
            "div",
            { class: "body stack" },
            about(letter),
            h(
                "div",
                { class: "field" },
                h("label", { for: "payload" }, "Payload"),
                text,
                h("span", { class: "hint" }, hint(letter, why ? "" : fixed || (group ? REPUBLISHED : EDITED))),
            ),
            why ? note("", why) : null,
            h(
                "div",
                { class: "row" },
                h("button", { type: "button", class: "first", disabled: Boolean(why), onclick: one }, "Redrive this one"),
                h(
                    "button",
                    { type: "button", disabled: Boolean(why), onclick: all },
                    `Redrive all ${show.count(pattern.count)}`,
                ),
                h("button", { type: "button", disabled: Boolean(why), onclick: remove }, "Remove all …"),
            ),
            answer,
        ),
    );
}

function hint({ payload }, more) {
    const kind = { json: "JSON", text: "Text", base64: "Binary, as base64" }[payload.encoding];
    return `${kind}, ${show.bytes(payload.bytes)}. ${more}`;
}

/* Why a payload can't be edited here, "" if it can. */
function whyFixed({ encoding, text, cut }) {
    if (cut) return "Only its beginning is shown, so it can't be edited here.";
    if (encoding === "base64") return "It can't be edited here.";
    const mixed = /\r(?!\n)/.test(text) || (text.includes("\r") && /(^|[^\r])\n/.test(text));
    return mixed ? "Its line ends can't be kept here, so it can't be edited: redrive it as it is." : "";
}

/* A textarea gives every line end back as LF: as `source` had them. */
function withLineEnds(text, source) {
    return source.includes("\r\n") ? text.replaceAll("\n", "\r\n") : text;
}

function about(letter) {
    const headers = Object.entries(letter.headers ?? {});
    return facts([
        ["Id", h("code", null, letter.id)],
        ["Topic", letter.topic || null],
        ["Inserted", show.moment(letter.inserted)],
        ["Attempts", show.count(letter.attempts)],
        ["Error", h("pre", { tabindex: "0", role: "group", "aria-label": "Error" }, letter.error || "none was given")],
        [
            "Headers",
            headers.length ? headers.map(([name, value]) => h("div", null, h("code", null, `${name}: ${value}`))) : null,
        ],
    ]);
}
