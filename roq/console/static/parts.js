/* What pages are made of: headings, tables, states, notices, dialogs. */

import { h, svg } from "./dom.js";
import * as show from "./format.js";

/* "#/queues/a%2Fb?page=2" */
export function link(segments, query = {}) {
    const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
    return `#/${segments.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

export function anchor(text, segments, query) {
    return h("a", { href: link(segments, query) }, text);
}

/* The head of a page. crumbs: [text, segments] of the pages above; actions: at its right end. */
export function head(title, { crumbs = [], actions = [], about = "" } = {}) {
    const above = crumbs.map(([text, segments]) => h("li", null, anchor(text, segments)));
    return h(
        "div",
        { class: "stack", key: "head" },
        crumbs.length ? h("nav", { class: "crumbs", "aria-label": "Above this page" }, h("ol", null, above)) : null,
        h(
            "div",
            { class: "head" },
            h("h1", { tabindex: "-1", id: "title" }, title),
            about ? h("span", { class: "quiet" }, about) : null,
            actions.length ? h("div", { class: "actions" }, actions) : null,
        ),
    );
}

/* A titled part of a page. */
export function panel(title, { about = null, key = title } = {}, ...children) {
    const id = `panel-${key.replaceAll(/\W+/g, "-")}`;
    return h(
        "section",
        { class: "panel", key: `panel ${key}`, "aria-labelledby": id },
        h("header", null, h("h2", { id }, title), about ? h("span", { class: "quiet" }, about) : null),
        children,
    );
}

/* Numbers that are read first: [name, number, below, kind]. */
export function tiles(found, label) {
    const one = ([name, number, below, kind]) =>
        h(
            "div",
            { class: "tile", key: name },
            h("dt", null, name),
            h("dd", { class: kind ?? false }, number, h("small", null, below ?? "")),
        );
    return h("dl", { class: "tiles", "aria-label": label, key: `tiles ${label}` }, found.map(one));
}

/* A table. columns: {name, cell(row), number?, wide?, head?, sort?: name of the order}; key(row) names a row. sorted: {by,
   down, to(by)}. */
export function table(caption, columns, rows, { key, empty = "None.", sorted = null } = {}) {
    if (rows.length === 0) return h("p", { class: "empty", key: `none of ${caption}` }, empty);
    const kind = (column) => (column.number ? "number" : column.wide ? "wide" : false);
    const body = rows.map((row, place) =>
        h(
            "tr",
            { key: key ? key(row) : String(place) },
            columns.map((column) =>
                h(column.head ? "th" : "td", { class: kind(column), scope: column.head ? "row" : false }, column.cell(row)),
            ),
        ),
    );
    return h(
        "div",
        { class: "scroll", key: `table ${caption}`, tabindex: "0", role: "group", "aria-label": `${caption}, table` },
        h(
            "table",
            null,
            h("caption", { class: "unseen" }, caption),
            h(
                "thead",
                null,
                h(
                    "tr",
                    null,
                    columns.map((column) => title(column, kind(column), sorted)),
                ),
            ),
            h("tbody", null, body),
        ),
    );
}

function title(column, kind, sorted) {
    if (!column.sort || !sorted) return h("th", { scope: "col", class: kind }, column.name);
    const here = sorted.by === column.sort;
    return h(
        "th",
        { scope: "col", class: kind, "aria-sort": here ? (sorted.down ? "descending" : "ascending") : false },
        h("button", { type: "button", class: "sort", onclick: () => sorted.to(column.sort) }, column.name),
    );
}

/* A state by a dot and a word; colour is never all there is. kind: good, warn, bad, quiet. */
export function state(word, kind) {
    return h("span", { class: `tag ${kind}` }, h("span", { class: "dot", "aria-hidden": "true" }), word);
}

export function note(kind, ...children) {
    return h("p", { class: `note ${kind}` }, children);
}

/* An error as a note, with what to do. */
export function trouble(error) {
    return h(
        "div",
        { class: "note bad", role: "alert", key: "trouble" },
        h("strong", null, show.sentence(error.message)),
        error.advice ? h("div", null, show.sentence(error.advice)) : null,
    );
}

/* Pairs of a word and what it is: [["Master", "host-1"], …]. */
export function facts(pairs) {
    return h(
        "dl",
        { class: "facts" },
        pairs.filter(([, value]) => value !== null).map(([word, value]) => [h("dt", null, word), h("dd", null, value)]),
    );
}

/* A fraction as a bar and a number. */
export function meter(fraction) {
    const width = 100 * Math.min(1, Math.max(0, fraction || 0));
    const bar = svg(
        "svg",
        { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width, height: 10 }),
    );
    return [bar, ` ${show.percent(fraction)}`];
}

/* Which rows of how many, and the way to others. to(offset) shows those. */
export function pager(offset, shown, total, step, to, what) {
    const range = `${show.count(offset + 1)}–${show.count(offset + shown)}`;
    const text = total === 0 ? `No ${what}` : `${range} of ${show.counted(total, what)}`;
    return h(
        "nav",
        { class: "row", "aria-label": `Pages of ${what}s`, key: "pager" },
        h("span", { class: "quiet", role: "status" }, text),
        h("button", { type: "button", disabled: offset === 0, onclick: () => to(Math.max(0, offset - step)) }, "Previous"),
        h("button", { type: "button", disabled: offset + shown >= total, onclick: () => to(offset + step) }, "Next"),
    );
}

/* Ask before something is done; whether they said so. */
export function confirm({ title: asked, text, action, danger = false }) {
    return new Promise((resolve) => {
        const done = (answer) => {
            box.close();
            box.remove();
            resolve(answer);
        };
        const box = h(
            "dialog",
            { "aria-labelledby": "asked", "aria-describedby": "asked-text" },
            h(
                "form",
                {
                    method: "dialog",
                    onsubmit: (event) => {
                        event.preventDefault();
                        done(true);
                    },
                },
                h("h2", { id: "asked" }, asked),
                h("div", { id: "asked-text", class: "stack" }, text),
                h(
                    "div",
                    { class: "row" },
                    h("button", { type: "button", onclick: () => done(false) }, "Cancel"),
                    h("button", { class: danger ? "danger" : "first" }, action),
                ),
            ),
        );
        box.addEventListener("cancel", (event) => {
            event.preventDefault();
            done(false);
        });
        document.body.append(box);
        box.showModal();
    });
}

/* Tell who cannot see it what has happened. */
export function announce(text) {
    document.getElementById("announced").textContent = text;
}
