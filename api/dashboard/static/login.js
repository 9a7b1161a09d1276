"use strict";
// A one-time code comes in the fragment, which no server and no log sees. It leaves the address before it is sent.
const code = new URLSearchParams(location.hash.slice(1)).get("code");
if (code) {
  history.replaceState(null, "", location.pathname);
  const form = document.getElementById("code-form");
  form.elements.code.value = code;
  form.submit();
}
