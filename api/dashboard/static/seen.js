// What a page asks for by itself waits until somebody sees the page.

/** Call back whenever the page comes into sight again. */
export function onSeen(call) {
  document.addEventListener("visibilitychange", () => document.hidden || call());
}

/** Return at once if the page is seen, else when it comes into sight. */
export async function whenSeen() {
  while (document.hidden) await new Promise((wake) => document.addEventListener("visibilitychange", wake, { once: true }));
}
