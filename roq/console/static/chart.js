/* Lines over time as SVG, with the same numbers as a table for who reads them otherwise. */

import { h, svg } from "./dom.js";
import { day, moment } from "./format.js";

const WIDTH = 480;
const HEIGHT = 150;
const LEFT = 64;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;
const ROWS_MAX = 60; // of the table: more is not read
const STEPS = [1, 2, 2.5, 5, 10];

const WINDOW_LEAST = 60;

/* Where the axis of the last `seconds` begins, as long as there are not so many: a minute at least. */
export function windowBegin(points, end, seconds) {
    return Math.max(end - seconds, Math.min(points[0]?.time ?? end, end - WINDOW_LEAST));
}

/* A chart. lines: {name, points: [[unix seconds, number or null]…]}, 3 at most; write(number): as it is read. events: {time,
   text}, drawn as lines across. begin, end: of the axis of time. gap: points further apart are not joined, seconds. base: 1024
   for bytes. whole: no halves on the axis. */
export function chart(
    title,
    lines,
    { write, events = [], begin = null, end = null, gap = Infinity, base = 1000, whole = false } = {},
) {
    const times = lines.flatMap((line) => line.points.map(([time]) => time));
    const from = begin ?? Math.min(...times);
    const to = Math.max(end ?? Math.max(...times), from + 1);
    const most = Math.max(0, ...lines.flatMap((line) => line.points.map(([, value]) => value ?? 0)));
    const top = whole ? 2 * Math.ceil(Math.max(1, most) / 2) : ceiling(most, base);
    const x = (time) => LEFT + ((time - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    if (times.length === 0)
        return h("figure", { class: "chart", key: `chart ${title}` }, h("p", { class: "quiet" }, `${title}: no numbers yet.`));
    return h(
        "figure",
        { class: "chart", key: `chart ${title}` },
        h("figcaption", null, h("h3", null, title)),
        svg(
            "svg",
            { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary(title, lines, write) },
            [0, 0.5, 1].map((part) => rule(y(part * top), write(part * top))),
            ticks(from, to).map((time) => tick(x(time), time, to - from)),
            lines.map((line, place) => drawn(line, place, x, y, gap)),
            events.filter(({ time }) => time >= from && time <= to).map(({ time, text }) => mark(x(time), text)),
        ),
        legend(lines, events, write),
        numbers(title, lines, write),
    );
}

function rule(at, text) {
    return [
        svg("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }),
        svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, text),
    ];
}

function tick(at, time, span) {
    const clock = moment(time).slice(-8);
    const text = span > 90_000 ? day(time) : span > 600 ? clock.slice(0, 5) : clock;
    return svg("text", { x: at, y: HEIGHT - 6, "text-anchor": "middle" }, text);
}

function mark(at, text) {
    return svg("line", { class: "event", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", null, text));
}

function drawn(line, place, x, y, gap) {
    const stretches = [];
    let before = null; // null: what comes next is not joined to it
    for (const [time, value] of line.points) {
        const here = value !== null && value !== undefined;
        if (here && (before === null || time - before > gap)) stretches.push([]);
        if (here) stretches.at(-1).push([x(time), y(value)]);
        before = here ? time : null;
    }
    const path = (points) => points.map(([left, up], at) => `${at ? "L" : "M"}${left.toFixed(1)} ${up.toFixed(1)}`).join("");
    const floor = HEIGHT - BOTTOM;
    const area = (points) => `${path(points)}L${points.at(-1)[0].toFixed(1)} ${floor}L${points[0][0].toFixed(1)} ${floor}Z`;
    return [
        place === 0 ? svg("path", { class: "area c1", d: stretches.map(area).join("") }) : null,
        svg("path", { class: `line c${place + 1}`, d: stretches.map(path).join("") }),
    ];
}

function legend(lines, events, write) {
    const last = (line) => line.points.findLast(([, value]) => value !== null)?.[1];
    const one = (line, place) =>
        h(
            "li",
            { key: line.name },
            h("span", { class: `swatch c${place + 1}${place ? " dashed" : ""}`, "aria-hidden": "true" }),
            line.name,
            h("strong", null, write(last(line))),
        ); // colour and dashes both tell
    return h(
        "ul",
        { class: "legend" },
        lines.map(one),
        events.length ? h("li", { key: "-" }, h("span", { class: "warn" }, "┆"), "decisions") : null,
    );
}

function summary(title, lines, write) {
    const one = ({ name, points }) => {
        const values = points.map(([, value]) => value).filter((value) => value !== null && value !== undefined);
        return `${name}: least ${write(Math.min(...values))}, most ${write(Math.max(...values))}, last ${write(values.at(-1))}`;
    };
    return `${title}. ${lines.map(one).join(". ")}.`;
}

/* The table is made when it is opened, and again when its chart changes while it is open. */
function numbers(title, lines, write) {
    const times = lines[0].points.map(([time]) => time);
    const step = Math.max(1, Math.ceil(times.length / ROWS_MAX));
    const rows = times
        .map((time, at) => [time, at])
        .filter(([, at]) => at % step === 0)
        .reverse();
    const row = ([time, at]) =>
        h(
            "tr",
            { key: String(time) },
            h("th", { scope: "row" }, moment(time)),
            lines.map((line) => h("td", { class: "number" }, write(line.points[at]?.[1]))),
        );
    return h(
        "details",
        null,
        h("summary", null, "As a table"),
        h(
            "div",
            { class: "scroll", tabindex: "0", role: "group", "aria-label": `${title}, table` },
            h(
                "table",
                null,
                h("caption", { class: "unseen" }, title),
                h(
                    "thead",
                    null,
                    h(
                        "tr",
                        null,
                        h("th", { scope: "col" }, "Time"),
                        lines.map((line) => h("th", { scope: "col", class: "number" }, line.name)),
                    ),
                ),
                h("tbody", null, rows.map(row)),
            ),
        ),
    );
}

/* The least round number, in units of the base, that is not below this one. */
function ceiling(value, base) {
    if (!(value > 0)) return 1;
    const unit = base ** Math.floor(Math.log(value) / Math.log(base));
    const power = unit * 10 ** Math.floor(Math.log10(value / unit));
    return power * STEPS.find((step) => step * power >= value * 0.999);
}

function ticks(from, to) {
    const steps = [10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 259_200, 864_000];
    const step = steps.find((each) => (to - from) / each <= 6) ?? (to - from) / 5;
    const edge = (to - from) * 0.04; // nearer to an end a time would be cut off
    const first = Math.ceil((from + edge) / step) * step;
    return Array.from({ length: Math.max(0, Math.floor((to - edge - first) / step) + 1) }, (_, at) => first + at * step);
}
