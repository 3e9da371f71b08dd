/* Access cards: names and rights, never keys. */

import { url } from "../api.js";
import { h } from "../dom.js";
import * as show from "../format.js";
import { head, note, panel, state, table } from "../parts.js";

export const access = {
    title: () => "Access cards",
    of: () => [url(["access"])],
    every: 15,
    view: ([{ security, cards, note: about }]) => [
        head("Access cards"),
        about ? note(security ? "" : "warn", show.sentence(about)) : null,
        panel(
            "Cards",
            { about: show.count(cards.length) },
            table("Cards", COLUMNS, cards, { key: (card) => card.id, empty: "None is known here." }),
        ),
    ],
};

function cardState(card) {
    if (card.state === "revoked") return state("revoked", "bad");
    if (card.expires && card.expires < Date.now() / 1000) return state("ended", "quiet");
    return state(card.state || "valid", "good");
}

const COLUMNS = [
    { name: "Name", head: true, cell: (card) => h("div", { class: "name" }, card.name) },
    { name: "Role", cell: (card) => card.role },
    { name: "State", cell: cardState },
    {
        name: "Rights",
        wide: true,
        cell: (card) => card.rights.map(({ right, names }) => h("span", { class: "chip" }, `${right} ${names}`)),
    },
    { name: "Ends", number: true, cell: (card) => show.moment(card.expires) },
    { name: "Id", cell: (card) => h("code", null, String(card.id).slice(0, 12)) },
];
