"use strict";
// A one-time code comes in the fragment, which no server and no log sees. It leaves the address before it is sent.
function useCode() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  const form = document.getElementById("code-form");
  form.elements.code.value = code;
  form.submit();
}
// A link that is opened where the login is open already changes the fragment alone, and loads nothing.
addEventListener("hashchange", useCode);
useCode();
