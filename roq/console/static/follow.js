/* What the console answers at some addresses, now and whenever it is another answer: one stream for all of them. */

import { Problem, refusal, url } from "./api.js";

const AGAIN_MS = 5000; // until a stream that was refused is asked for again

/* Begin. Calls told(answers) once there is one for each address, in their order, each JSON or a Problem, and with every change;
   refused(problem) when the console takes no such stream now. every: s between two looks of the console, none: its own choice;
   partly: call it before, too, with undefined for those that are not there. Gives what ends it. */
export function follow(addresses, { every, partly = false }, told, refused) {
    const stream = url(["follow"], [...addresses.map((one) => ["of", one]), ...(every ? [["every", every]] : [])]);
    const answers = addresses.map(() => undefined);
    let source = null;
    let timer = 0;

    function open() {
        source = new EventSource(stream);
        source.addEventListener("answer", ({ data }) => {
            const { of, status, body } = JSON.parse(data);
            answers[addresses.indexOf(of)] = status < 400 ? body : new Problem({ status, ...body });
            if (partly || !answers.includes(undefined)) told([...answers]);
        });
        source.onerror = () => source.readyState === EventSource.CLOSED && ask(source); // else it comes back by itself
    }

    async function ask(closed) {
        const problem = await refusal(stream);
        if (closed !== source) return;
        if (problem) refused(problem);
        timer = setTimeout(open, problem ? AGAIN_MS : 0);
    }

    open();
    return () => {
        clearTimeout(timer);
        source.close();
        source = null;
    };
}
