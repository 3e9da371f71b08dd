/* Requests to the console, and who is signed in. */

/* What the console answered instead: title is RoQ's name of the error, advice what to do. */
export class Problem extends Error {
    constructor(problem) {
        super(problem.detail || problem.title || "The console refused, and did not say why.");
        this.title = problem.title ?? "";
        this.status = problem.status ?? 0;
        this.advice = problem.advice ?? "";
    }
}

/* As /v1/session gave it last. */
export let session = {
    signed_in: false,
    login: "none",
    name: "",
    writable: false,
    rights: [],
    csrf: "",
    cluster: "",
    version: "",
};

/* /v1/a%2Fb/c?x=y of ["a/b", "c"] and {x: "y"}, or [["x", "y"]]; empty values are left out. */
export function url(segments, query = {}) {
    const pairs = Array.isArray(query) ? query : Object.entries(query);
    const words = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
    const search = new URLSearchParams(words).toString();
    return `/v1/${segments.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

export function post(segments, body = {}) {
    return send("POST", url(segments), body);
}

export function put(segments, body) {
    return send("PUT", url(segments), body);
}

export async function loadSession() {
    session = await send("GET", url(["session"]));
    return session;
}

/* card: the text of a card file. */
export async function signIn(card) {
    session = await send("POST", url(["session"]), card);
    return session;
}

export async function signOut() {
    await send("DELETE", url(["session"]));
    await loadSession();
}

/* May this person change what is so named? The console decides again. In a cluster without security everybody may. */
export function may(right, name = "*") {
    if (!session.writable) return false;
    if (session.login === "none") return true;
    return session.rights.some((held) => held.right === right && covers(held.names, name));
}

/* Why not, for who asks; "" if they may. */
export function whyNot(right, name = "*") {
    if (may(right, name)) return "";
    if (!session.writable) return "This console is read-only: it was started without --writable.";
    return `Your card has no right ${right} to ${name}.`;
}

function covers(names, name) {
    return names === "*" || names === name || (names.endsWith("*") && name.startsWith(names.slice(0, -1)));
}

/* Why a stream is refused, which an EventSource does not tell; null: it is not, any more. */
export async function refusal(address) {
    const aborting = new AbortController();
    try {
        const answer = await asked(address, { signal: aborting.signal });
        return answer.ok ? null : new Problem({ status: answer.status, ...(await answer.json()) });
    } catch (error) {
        if (error instanceof Problem) return error;
        throw error;
    } finally {
        aborting.abort();
    }
}

async function asked(address, options) {
    try {
        return await fetch(address, options);
    } catch {
        throw new Problem({
            title: "ConsoleAway",
            detail: "The console does not answer.",
            advice: "Is `roq console` running?",
        });
    }
}

async function send(method, address, body) {
    const headers = method === "GET" ? {} : { "X-CSRF-Token": session.csrf };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const answer = await asked(address, { method, headers, body: typeof body === "string" ? body : JSON.stringify(body) });
    if (answer.status === 204) return null;
    const text = await answer.text();
    const found = text ? JSON.parse(text) : null;
    if (!answer.ok) throw new Problem({ status: answer.status, ...found });
    return found;
}
