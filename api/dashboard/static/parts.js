// Parts of pages that are read anew every second or two: the elements that stay are kept, and a hidden page asks for nothing.
import { morphChildren } from "./morph.js";
import { onSeen } from "./seen.js";

const POLLED = '[hx-trigger^="every"]';

htmx.defineExtension("morph", {
  handleSwap(style, target, fragment) {
    if (style !== "morph") return false;
    const { activeElement: focused } = document;
    morphChildren(target, fragment);
    // Where an element can only be moved by taking it out, it has lost the focus.
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
    return true;
  },
});
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && event.detail.elt.matches(POLLED)) event.preventDefault();
});
onSeen(() => {
  for (const part of document.querySelectorAll(POLLED)) htmx.ajax("GET", part.getAttribute("hx-get"), { source: part });
});
