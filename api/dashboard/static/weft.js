"use strict";
// Answers of this origin alone become HTML: the service escapes every value in them. Texts never become scripts or addresses.
if (window.trustedTypes && trustedTypes.createPolicy) {
  trustedTypes.createPolicy("default", { createHTML: (html) => html });
}

// A page that follows the service says so when it does not reach it, or is refused: the last content stays, and a line tells why.
// A stream that is opened anew at once is no such case. A session that has ended leads to the login.
const PATIENCE_MS = 2000;
const NO_ANSWER = "The service does not answer.";
let unreached = 0;
let line = NO_ANSWER;
const showLine = () => {
  const banner = document.getElementById("unreached");
  const place = banner.querySelector("span");
  if (place.textContent !== line) place.textContent = line;
  banner.hidden = false;
};
function tellUnreached(text) {
  line = text || NO_ANSWER;
  if (!unreached) unreached = setTimeout(showLine, PATIENCE_MS);
  else if (!document.getElementById("unreached").hidden) showLine();
}
function tellReached() {
  clearTimeout(unreached);
  unreached = 0;
  document.getElementById("unreached").hidden = true;
}
function tellRefused({ status, text }) {
  if (status === 401) {
    const isOperators = location.pathname.startsWith("/ops");
    location.assign(isOperators ? "/ops/login" : `/ui/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    return;
  }
  // The service's own words, without the code; an answer of something between has none.
  const notice = new DOMParser().parseFromString(text, "text/html").querySelector(".notice");
  tellUnreached(notice ? notice.firstChild.textContent.trim().replace(/[^.!?]$/, "$&.") : "");
}
addEventListener("weft:unreached", () => tellUnreached());
addEventListener("weft:reached", tellReached);
addEventListener("weft:refused", (event) => tellRefused(event.detail));
document.addEventListener("htmx:sendError", () => tellUnreached());
document.addEventListener("htmx:timeout", () => tellUnreached());
document.addEventListener("htmx:responseError", ({ detail: { xhr } }) => tellRefused({ status: xhr.status, text: xhr.responseText }));
document.addEventListener("htmx:afterOnLoad", (event) => event.detail.successful && tellReached());

// On narrow screens the navigation is a strip: the page that is open is in sight.
document.addEventListener("DOMContentLoaded", () => {
  const strip = document.querySelector(".side nav");
  const here = strip && strip.querySelector("[aria-current]");
  if (here) strip.scrollLeft = here.offsetLeft - strip.offsetLeft - (strip.clientWidth - here.offsetWidth) / 2;
});
