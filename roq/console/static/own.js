/* A part of a page that a person works in: made once, then left alone however often the page is drawn again. */

import { h } from "./dom.js";

/* id: of this part and what it is about, unique in the document. make: gives its children. */
export function own(id, make) {
    const here = [...document.querySelectorAll("[data-own]")].some((one) => one.dataset.own === id);
    return h("div", { class: "stack own", "data-own": id, key: `own ${id}` }, here ? null : make());
}
