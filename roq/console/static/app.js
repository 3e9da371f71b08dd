/* The shell of all pages: menu, who is signed in, what is unreachable; and the page that the address names. */

import * as api from "./api.js";
import { flat, h, morphChildren } from "./dom.js";
import { moment, sentence } from "./format.js";
import { follow } from "./follow.js";
import { listen, live, start, stop } from "./live.js";
import { announce, head, link, trouble } from "./parts.js";
import { access } from "./pages/access.js";
import { deadLetters } from "./pages/dead_letters.js";
import { events } from "./pages/events.js";
import { health } from "./pages/health.js";
import { host } from "./pages/host.js";
import { hosts } from "./pages/hosts.js";
import { logs } from "./pages/logs.js";
import { overview } from "./pages/overview.js";
import { policy } from "./pages/policy.js";
import { queue } from "./pages/queue.js";
import { history } from "./pages/history.js";
import { members } from "./pages/members.js";
import { queues } from "./pages/queues.js";
import { records } from "./pages/records.js";
import { shuffle } from "./pages/shuffle.js";
import { shuffles } from "./pages/shuffles.js";
import { signIn } from "./pages/sign_in.js";
import { workQueue } from "./pages/work_queue.js";
import { workQueues } from "./pages/work_queues.js";
import { zookeeper } from "./pages/zookeeper.js";

const MENU = [
    ["Overview", []],
    ["Queues", ["queues"]],
    ["Work queues", ["work-queues"]],
    ["Hosts", ["hosts"]],
    ["Stores and copies", ["health"]],
    ["Shuffles", ["shuffles"]],
    ["ZooKeeper", ["zookeeper"]],
    ["Access cards", ["access"]],
    ["Events", ["events"]],
];

/* Words of an address, ":name" for any; the first that fits. A page: title(names), of(page) → addresses of the REST API that it
   follows, view(answers, page) → nodes, every: s between two looks of the console (none: its own choice), without: the problem
   with which it is shown all the same (answers: null), partly: whether one good answer is enough (the others: a Problem, or
   undefined while they are not there), hears(kind, data, page): of the stream of events, opened(page), closed(page). */
const ROUTES = [
    ["", overview],
    ["queues", queues],
    ["queues/:queue", queue],
    ["queues/:queue/members", members],
    ["queues/:queue/history", history],
    ["queues/:queue/policy", policy],
    ["queues/:queue/records", records],
    ["work-queues", workQueues],
    ["work-queues/:name", workQueue],
    ["work-queues/:name/dead", deadLetters],
    ["hosts", hosts],
    ["hosts/:host", host],
    ["hosts/:host/:process", logs],
    ["health", health],
    ["shuffles", shuffles],
    ["shuffles/:name", shuffle],
    ["zookeeper", zookeeper],
    ["access", access],
    ["events", events],
    ["sign-in", signIn],
];
const NOWHERE = {
    title: () => "No such page",
    of: () => [],
    view: () => [head("No such page"), h("p", null, "The menu leads to all there are.")],
};

const LOADING_MS = 400; // that the page before stays, so that nothing flickers
const REFUSED_MS = 10_000; // until a stream that was refused is tried again

const place = document.getElementById("page");
let shown = null;

/* One visit to a page. state: the page's own, for as long as the visit lasts. */
class Visit {
    constructor(page, names, query, back) {
        Object.assign(this, { page, names, query, back, state: {}, data: undefined, error: null });
        this.end = () => null;
    }

    /* Follow what the page shows from now on, as it is now. Gives a promise: that is drawn, or somebody else's turn. */
    reload() {
        this.leave();
        const addresses = this.page.of(this);
        if (addresses.length === 0) this.take([]);
        if (addresses.length === 0 || document.hidden) return Promise.resolve(); // hidden: once somebody looks
        return new Promise((resolve) => {
            const took = (work) => (found) => {
                work(found);
                resolve();
            };
            const taken = took((answers) => this.take(answers));
            const failed = took((problem) => this.fail(problem));
            this.end = took(follow(addresses, this.page, taken, failed));
        });
    }

    /* Nothing is asked for any more. */
    leave() {
        this.end();
        this.end = () => null;
    }

    take(answers) {
        const problems = answers.filter((one) => one instanceof api.Problem);
        const without = problems.some((one) => one.title === this.page.without);
        const good = (one) => one !== undefined && !(one instanceof api.Problem);
        const enough = this.page.partly && answers.some(good);
        if (problems.length && !without && !enough) {
            this.fail(problems[0]);
            return;
        }
        this.data = without ? null : answers;
        this.error = null;
        this.draw();
    }

    fail(problem) {
        if (problem.status === 401) {
            refused();
            return;
        }
        this.error = problem;
        this.draw();
    }

    draw() {
        if (this !== shown) return;
        const title = this.page.title(this.names);
        const known = this.data !== undefined;
        const wrong = this.error && !(known && live.down) ? trouble(this.error) : null;
        const nodes = known
            ? this.page.view(this.data, this)
            : [head(title), wrong ? null : h("p", { class: "quiet" }, "Loading …")];
        const [first, ...rest] = flat(nodes);
        const next = flat([first, wrong, rest]);
        if (place.dataset.visit !== this.id) {
            place.dataset.visit = this.id;
            place.replaceChildren(...next);
            document.title = `${title} · RoQ`;
            if (this.back) document.getElementById("title")?.focus();
            window.scrollTo(0, 0);
        } else {
            morphChildren(place, next);
        }
        place.setAttribute("aria-busy", String(!known && !wrong));
    }

    /* Other values behind the "?" of this page's address, without a new visit. */
    ask(query) {
        this.query = { ...this.query, ...query };
        window.history.replaceState(null, "", link(words(), this.query));
        return this.reload();
    }

    close() {
        this.leave();
        this.page.closed?.(this);
    }
}

function words() {
    const [path] = window.location.hash.replace(/^#\/?/, "").split("?");
    return path.split("/").filter(Boolean).map(decodeURIComponent);
}

function found(path) {
    for (const [pattern, page] of ROUTES) {
        const parts = pattern.split("/").filter(Boolean);
        if (parts.length !== path.length) continue;
        if (!parts.every((part, at) => part.startsWith(":") || part === path[at])) continue;
        return [
            page,
            Object.fromEntries(parts.map((part, at) => [part.slice(1), path[at]]).filter((_, at) => parts[at].startsWith(":"))),
        ];
    }
    return [NOWHERE, {}];
}

let visits = 0;

function visit() {
    const query = Object.fromEntries(new URLSearchParams(window.location.hash.split("?")[1] ?? ""));
    const signedIn = api.session.signed_in;
    const [page, names] = signedIn ? found(words()) : [signIn, {}];
    const before = shown;
    shown = new Visit(page, names, query, before !== null);
    visits += 1;
    shown.id = String(visits);
    before?.close();
    menu();
    place.setAttribute("aria-busy", "true");
    shown.page.opened?.(shown);
    shown.reload();
    const here = shown;
    setTimeout(() => here.data === undefined && !here.error && here.draw(), LOADING_MS);
}

/* The session has ended. */
async function refused() {
    await api.loadSession();
    begin();
}

/* The stream was refused: the session has ended, or the person may not see what it tells, or nobody answers. */
async function ended() {
    try {
        await api.loadSession();
        if (!api.session.signed_in) {
            begin();
            return;
        }
    } catch (error) {
        if (!(error instanceof api.Problem)) throw error;
    }
    setTimeout(start, REFUSED_MS);
}

/* Nobody looks. */
function quiet() {
    stop();
    shown?.leave();
}

/* With the session as it is now. */
function begin() {
    start();
    who();
    visit();
}

function menu() {
    const here = words()[0] ?? "";
    const entry = ([text, segments]) =>
        h("li", null, h("a", { href: link(segments), "aria-current": (segments[0] ?? "") === here ? "page" : false }, text));
    morphChildren(document.getElementById("menu"), api.session.signed_in ? MENU.map(entry) : []);
}

function who() {
    const { session } = api;
    const left = async () => {
        await api.signOut();
        begin();
    };
    document.getElementById("where").textContent = session.cluster;
    const connected = live.connected && !live.down;
    morphChildren(
        document.getElementById("who"),
        flat([
            h(
                "span",
                { class: "live" },
                h("span", { class: `dot ${connected ? "good" : "warn"}`, "aria-hidden": "true" }),
                session.signed_in ? (connected ? "Live" : "Not live") : "Signed out",
            ),
            session.signed_in && !session.writable ? h("span", { class: "chip" }, "read-only") : null,
            session.signed_in && session.login !== "none" ? h("span", { class: "name" }, session.name) : null,
            session.signed_in && session.login === "card" ? h("button", { type: "button", onclick: left }, "Sign out") : null,
        ]),
    );
}

function banner() {
    const { down } = live;
    const what = down?.console ? "The console does not answer" : "The cluster is unreachable";
    const text = down
        ? h(
              "div",
              { class: "banner" },
              h("strong", null, `${what} since ${moment(down.since)}.`),
              ` ${sentence(down.detail)} ${sentence(down.advice)} What you see is as of then; the page goes on by itself.`,
          )
        : null;
    morphChildren(document.getElementById("banner"), flat([text]));
}

listen((kind, data) => {
    if (kind === "unreachable" || kind === "reachable") {
        banner();
        if (kind === "reachable") announce("The cluster is reachable again.");
        shown?.draw(); // while it is away, without what the page said of it by itself
    }
    if (kind === "connected" || data?.console) api.loadSession().then(who, () => null); // of another console now, perhaps
    if (kind === "ended") {
        ended();
        return;
    }
    who();
    shown?.page.hears?.(kind, data, shown);
});
window.addEventListener("hashchange", visit);
/* A browser has six connections to one place: tabs that nobody looks at take none. */
document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
        quiet();
    } else {
        start();
        shown?.reload();
    }
});
window.addEventListener("pagehide", quiet);
window.addEventListener("pageshow", (event) => event.persisted && begin()); // back from the browser's own cache
document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    (document.getElementById("title") ?? document.getElementById("main")).focus();
});
window.addEventListener("signed-in", () => {
    if (words()[0] === "sign-in") window.history.replaceState(null, "", "#/");
    begin();
});

/* The console may not be there yet. */
async function first() {
    try {
        await api.loadSession();
        begin();
    } catch (error) {
        place.replaceChildren(head("RoQ console"), trouble(error));
        setTimeout(first, 2000);
    }
}

first();
