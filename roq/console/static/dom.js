/* Making and changing the page. Text is always text: nothing that comes from a cluster is ever parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";
const LISTENERS = [
    "onclick",
    "oninput",
    "onchange",
    "onsubmit",
    "onkeydown",
    "onpointermove",
    "onpointerleave",
    "onfocus",
    "onblur",
];
const ONES_OWN = new Set(["DETAILS open", "DIALOG open"]); // attributes that a person changes

/* An element. props: attributes, listeners as on…; false, null: left out. key: who it is among its neighbours (see morph).
   children: nodes, texts, numbers, lists of these; null and false are left out. */
export function h(tag, props, ...children) {
    return filled(document.createElement(tag), props, children);
}

/* The same of SVG. */
export function svg(tag, props, ...children) {
    return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
    for (const [name, value] of Object.entries(props ?? {})) {
        if (value === false || value === null || value === undefined) continue;
        if (name.startsWith("on")) element[name] = value;
        else if (name === "key") element.dataset.key = value;
        else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...flat(children));
    return element;
}

/* Children as `append` takes them. */
export function flat(children) {
    return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/* Make `old` look like `next` with as few changes as can be, so that focus, selection and scrolling stay. Children with a key
   are found again by it. What has data-own looks after itself and is left as it is while its data-own stays the same. */
export function morph(old, next) {
    if (old === next) return;
    if (old.nodeName !== next.nodeName || keyOf(old) !== keyOf(next)) {
        old.replaceWith(next);
        return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
        if (old.data !== next.data) old.data = next.data;
        return;
    }
    if (old.dataset.own !== undefined && old.dataset.own === next.dataset.own) return;
    for (const { name } of [...old.attributes]) {
        if (!next.hasAttribute(name) && !ONES_OWN.has(`${old.nodeName} ${name}`)) old.removeAttribute(name);
    }
    for (const { name, value } of next.attributes) {
        if (old.getAttribute(name) !== value && !ONES_OWN.has(`${old.nodeName} ${name}`)) old.setAttribute(name, value);
    }
    for (const name of LISTENERS) old[name] = next[name];
    morphChildren(old, [...next.childNodes]);
}

/* Make these the children of `parent`, see morph. */
export function morphChildren(parent, wanted) {
    const known = new Map();
    const keys = new Set(wanted.map(keyOf));
    for (const child of [...parent.childNodes]) {
        const key = keyOf(child);
        if (key !== undefined && keys.has(key)) known.set(key, child);
        else if (key !== undefined) child.remove();
    }
    let place = parent.firstChild;
    for (const child of wanted) {
        const key = keyOf(child);
        while (place && key === undefined && keyOf(place) !== undefined) place = place.nextSibling;
        const have = key === undefined ? place : known.get(key);
        if (!have) {
            parent.insertBefore(child, place);
            continue;
        }
        if (have === place) place = place.nextSibling;
        else parent.insertBefore(have, place);
        morph(have, child);
    }
    while (place) {
        const rest = place.nextSibling;
        place.remove();
        place = rest;
    }
}

function keyOf(node) {
    return node.dataset?.key;
}
