/* Who are you: a card file, which the console checks and does not keep; or the link that it printed on its terminal. */

import { session, signIn as present } from "../api.js";
import { flat, h, morphChildren } from "../dom.js";
import { head, note, panel, trouble } from "../parts.js";
import { own } from "../own.js";

export const signIn = {
    title: () => "Sign in",
    of: () => [],
    async opened(page) {
        const { ticket } = page.query;
        if (!ticket) return;
        window.history.replaceState(null, "", "#/sign-in"); // it is good for once, and nobody shall find it
        try {
            await present(JSON.stringify({ ticket }));
            window.dispatchEvent(new Event("signed-in"));
        } catch (error) {
            page.state.refused = error;
            page.draw();
        }
    },
    view: (_, page) => [
        head("Sign in", { about: session.cluster }),
        page.state.refused ? trouble(page.state.refused) : null,
        session.login === "proxy"
            ? note("", "The proxy in front of this console says who you are, and has not. Come through it, or ask who runs it.")
            : own("sign-in", form),
    ],
};

function form() {
    const answer = h("div");
    const file = h("input", { type: "file", id: "card", accept: ".card,application/json", required: true });
    const submit = async (event) => {
        event.preventDefault();
        try {
            await present(await file.files[0].text());
            window.dispatchEvent(new Event("signed-in"));
        } catch (error) {
            morphChildren(answer, flat([trouble(error)]));
        }
    };
    return panel(
        "With your card",
        { key: "card" },
        h(
            "form",
            { class: "body stack sign-in", onsubmit: submit },
            h(
                "p",
                null,
                "You see and may do what your card allows. The console keeps it in memory only, until you sign out or it ends.",
            ),
            h(
                "div",
                { class: "field" },
                h("label", { for: "card" }, "Card file"),
                file,
                h("span", { class: "hint" }, "as roq access grant wrote it, NAME.card"),
            ),
            h("div", { class: "row" }, h("button", { class: "first" }, "Sign in")),
            answer,
        ),
    );
}
