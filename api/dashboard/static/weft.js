"use strict";
// Answers of this origin alone become HTML: the service escapes every value in them. Texts never become scripts or addresses.
if (window.trustedTypes && trustedTypes.createPolicy) {
  trustedTypes.createPolicy("default", { createHTML: (html) => html });
}

// A page that follows the service says so when it does not reach it. A stream that is opened anew at once is no such case.
const PATIENCE_MS = 2000;
let unreached = 0;
const hide = (isHidden) => (document.getElementById("unreached").hidden = isHidden);
addEventListener("weft:unreached", () => (unreached ||= setTimeout(hide, PATIENCE_MS, false)));
addEventListener("weft:reached", () => {
  clearTimeout(unreached);
  unreached = 0;
  hide(true);
});
const tell = (name) => dispatchEvent(new Event(name));
document.addEventListener("htmx:sendError", () => tell("weft:unreached"));
document.addEventListener("htmx:responseError", () => tell("weft:unreached"));
document.addEventListener("htmx:afterOnLoad", (event) => event.detail.successful && tell("weft:reached"));

// On narrow screens the navigation is a strip: the page that is open is in sight.
document.addEventListener("DOMContentLoaded", () => {
  const strip = document.querySelector(".side nav");
  const here = strip && strip.querySelector("[aria-current]");
  if (here) strip.scrollLeft = here.offsetLeft - strip.offsetLeft - (strip.clientWidth - here.offsetWidth) / 2;
});
