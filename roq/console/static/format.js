/* Numbers, sizes and times as people read them. "–" is a number that nobody knows. */

const NOTHING = "–";
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("en", { month: "short", day: "numeric" });

function known(number) {
    return typeof number === "number" && Number.isFinite(number);
}

/* 12,345 */
export function count(number) {
    return known(number) ? COUNT.format(number) : NOTHING;
}

/* 950, 1.2 k, 3.4 M */
export function short(number) {
    if (!known(number)) return NOTHING;
    let unit = 0;
    let value = number;
    while (Math.abs(value) >= 999.5 && unit < 4) {
        value /= 1000;
        unit += 1;
    }
    const digits = unit === 0 ? (value < 10 && value % 1 !== 0 ? 1 : 0) : value < 99.95 ? 1 : 0;
    return value.toFixed(digits) + ["", " k", " M", " G", " T"][unit];
}

/* 1.2 k/s */
export function rate(number) {
    return known(number) ? `${short(number)}/s` : NOTHING;
}

/* 1.5 MiB */
export function bytes(number) {
    if (!known(number)) return NOTHING;
    let unit = 0;
    let value = number;
    while (value >= 1023.5 && unit < SIZES.length - 1) {
        value /= 1024;
        unit += 1;
    }
    return `${value.toFixed(unit > 0 && value < 99.95 ? 1 : 0)} ${SIZES[unit]}`;
}

/* 1.5 MiB/s */
export function byteRate(number) {
    return known(number) ? `${bytes(number)}/s` : NOTHING;
}

/* 12 % */
export function percent(fraction) {
    return known(fraction) ? `${(100 * fraction).toFixed(0)} %` : NOTHING;
}

/* 350 µs, 12 ms, 3.4 s, 5 min, 2 h, 3 d */
export function duration(seconds) {
    if (!known(seconds)) return NOTHING;
    if (seconds <= 0) return "0 s";
    if (seconds < 0.001) return `${(1e6 * seconds).toFixed(0)} µs`;
    if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
    if (seconds < 172_800) return `${(seconds / 3600).toFixed(0)} h`;
    return `${(seconds / 86_400).toFixed(0)} d`;
}

/* 14:03:59 of today, else Nov 26 14:03:59. seconds: since 1970. */
export function moment(seconds) {
    if (!known(seconds) || seconds <= 0) return NOTHING;
    const then = new Date(1000 * seconds);
    const clock = CLOCK.format(then);
    return then.toDateString() === new Date().toDateString() ? clock : `${DAY.format(then)} ${clock}`;
}

/* Nov 26 */
export function day(seconds) {
    return DAY.format(new Date(1000 * seconds));
}

/* What RoQ says, as a sentence: "no host" becomes "No host." */
export function sentence(text) {
    if (!text) return "";
    return text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");
}

/* 1 queue, 2 queues */
export function counted(number, one, many = `${one}s`) {
    return `${count(number)} ${number === 1 ? one : many}`;
}
