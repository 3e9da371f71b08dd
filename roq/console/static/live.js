/* What the cluster says by itself: one stream for the whole page, which comes back when it was cut. */

import { session } from "./api.js";

const EVENTS_KEPT = 500;
const COURSE_SECONDS = 300;
const AGAIN_MS = 2000;
const PATIENCE_MS = 4000; // a stream that was cut is back within that, if there is a console

/* The state of the stream. course: the rates of the last minutes; events: latest first. down: null, or {since, detail, advice}
   while the cluster, or the console, is away. */
export const live = { course: [], events: [], down: null, connected: false };

const listeners = new Set();
let source = null;
let timer = 0;

/* Call `heard(kind, data)` for every overview, cluster, unreachable and reachable from now on, for every time the stream is
   connected or cut, and when it has ended for good; gives what ends it. */
export function listen(heard) {
    listeners.add(heard);
    return () => listeners.delete(heard);
}

/* Connect, again if need be. */
export function start() {
    stop();
    if (!session.signed_in || document.hidden) return;
    source = new EventSource("/v1/events");
    source.onopen = () => {
        clearTimeout(timer);
        timer = 0;
        live.connected = true;
        if (live.down?.console) up(live.down);
        else tell("connected", null);
    };
    source.onerror = () => {
        live.connected = false;
        tell("cut", null);
        if (source.readyState === EventSource.CLOSED) {
            clearTimeout(timer);
            timer = setTimeout(() => tell("ended", null), AGAIN_MS);
        } else if (!timer) {
            const since = Date.now() / 1000;
            timer = setTimeout(
                () => down({ since, console: true, detail: "", advice: "Is roq console running?" }),
                PATIENCE_MS,
            );
        }
    };
    for (const kind of ["overview", "cluster", "unreachable", "reachable"]) {
        source.addEventListener(kind, (event) => take(kind, JSON.parse(event.data)));
    }
}

export function stop() {
    clearTimeout(timer);
    timer = 0;
    source?.close();
    source = null;
    live.connected = false;
}

function take(kind, data) {
    if (kind === "overview") keep(data);
    if (kind === "cluster") live.events = [data, ...live.events].slice(0, EVENTS_KEPT);
    if (kind === "unreachable") return down(data);
    if (kind === "reachable") return up(data);
    tell(kind, data);
}

function keep({ rates }) {
    if (!rates || rates.time === live.course.at(-1)?.time) return;
    live.course = [...live.course, rates].filter((each) => each.time > rates.time - COURSE_SECONDS);
}

function down(data) {
    if (live.down && (data.console || !live.down.console)) return;
    live.down = data;
    tell("unreachable", data);
}

function up(data) {
    live.down = null;
    tell("reachable", data);
}

function tell(kind, data) {
    for (const heard of [...listeners]) heard(kind, data);
}
