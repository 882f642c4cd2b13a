// Elements of a page. What a record says is only ever written as text.

/** An element with a class, a text, attributes and children. */
export function element(tag, { kind = "", text = null, children = [], ...attributes } = {}) {
  const made = document.createElement(tag);
  made.className = kind.split(" ").filter(Boolean).map((name) => `sigmascope-${name}`).join(" ");
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const SIGNS = { good: "✓", warning: "!", bad: "✗" };
const WORDS = { good: "good", warning: "look at this", bad: "bad" };

/** ✓, ! or ✗, with a name for those who do not see it. */
export function sign(mark) {
  return element("span", { kind: `sign ${mark}`, text: SIGNS[mark], role: "img", "aria-label": WORDS[mark] });
}

/** The style sheet beside the scripts. */
export function addStyle() {
  const href = new URL("./sigmascope.css", import.meta.url).href;
  document.head.append(element("link", { rel: "stylesheet", href }));
}
