// Brings elements to new content while keeping those that stay: what a person does with them is kept, too. That is the focus, the
// scroll, a selection of text, what was typed, and details that were opened.

// A person sets these states; the service's content does not take them back.
const PERSONS = new Set(["open", "checked", "selected"]);

/** The name under which an element is found again among its siblings; empty for one that is known by its place alone. */
function keyOf(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return "";
  return node.id || node.dataset.key || node.getAttribute("aria-labelledby") || "";
}

/** The names under which nodes are found again: the nth of those with equal keys is the nth's. */
function namesOf(nodes) {
  const seen = new Map();
  const names = new Map();
  for (const node of nodes) {
    const key = keyOf(node);
    const nth = (seen.get(key) || 0) + 1;
    seen.set(key, nth);
    names.set(node, key && `${nth} ${key}`);
  }
  return names;
}

function isBlank(node) {
  return node.nodeType === Node.TEXT_NODE && !node.data.trim();
}

/** Bring a node to what another of its name is. */
function morph(old, next) {
  if (old.isEqualNode(next)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !PERSONS.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value && !PERSONS.has(name)) old.setAttribute(name, value);
  }
  morphChildren(old, next);
}

/** Put a child before another. ``moveBefore`` keeps the states that a removal ends; not every browser has it. */
function place(parent, child, before) {
  if (parent.moveBefore) parent.moveBefore(child, before);
  else parent.insertBefore(child, before);
}

/** Bring the children of an element to those of another, whose nodes are used up. */
export function morphChildren(parent, next) {
  const names = namesOf(parent.childNodes);
  const wanted = namesOf([...next.childNodes]);
  const keyed = new Map([...names].map(([child, name]) => [name, child]));
  const stay = new Set(wanted.values());
  const isGone = (child) => names.get(child) && !stay.has(names.get(child));
  let at = parent.firstChild;
  const drop = () => {
    const gone = at;
    at = gone.nextSibling;
    gone.remove();
  };
  for (const [node, name] of wanted) {
    while (at && (isGone(at) || (isBlank(at) && !isBlank(node)))) drop();
    const found = name ? keyed.get(name) : at && !names.get(at) && at;
    if (!found || found.nodeName !== node.nodeName) {
      parent.insertBefore(node, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else place(parent, found, at);
    morph(found, node);
  }
  while (at) drop();
}
