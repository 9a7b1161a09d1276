// Text that people carry elsewhere has a button that copies it: an id, a checkpoint's path, a secret that is shown once.
// Without scripts, or over plain http to another machine, there is no clipboard and no button.

const TOLD_MS = 2000;

function copyButton(source) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  const say = (word) => {
    button.textContent = word;
    button.setAttribute("aria-label", `${word} ${source.dataset.copy}`);
  };
  say("Copy");
  const told = document.createElement("span");
  told.className = "sr";
  told.setAttribute("role", "status");
  let reset = 0;
  button.addEventListener("click", async () => {
    clearTimeout(reset);
    const said = await navigator.clipboard.writeText(source.textContent).then(
      () => "Copied",
      () => "Not copied",
    );
    say(said);
    told.textContent = `${said} ${source.dataset.copy}`;
    reset = setTimeout(() => {
      say("Copy");
      told.textContent = "";
    }, TOLD_MS);
  });
  return [button, told];
}

if (navigator.clipboard) {
  for (const source of document.querySelectorAll("[data-copy]")) source.after(...copyButton(source));
}
