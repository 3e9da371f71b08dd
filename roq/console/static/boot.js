/* Begins; anew if a file of the pages could not be had: the console was just ending, or the network changed. */

const AGAIN_MS = 2000;

import("./app.js").catch((error) => {
    console.info(error);
    document.getElementById("page").textContent = "The console's pages can't be loaded. They are tried again.";
    setTimeout(() => window.location.reload(), AGAIN_MS);
});
