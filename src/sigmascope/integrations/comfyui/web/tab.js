// The tab in the sidebar: the last prompts as bars over time, one of them in full, and what stood out.

import { element, sign } from "./elements.js";

export class Tab {
  /**
   * @param addresses gives the address of a record's `report.html` and `comparison.html`
   * @param choose shows another prompt, by its name
   * @param badges has `get()` and `set(on)` of the setting
   * @param find leads to a node on the canvas, by its id
   */
  constructor({ addresses, choose, badges, find }) {
    Object.assign(this, { addresses, choose, badges, find });
    this.state = { prompts: [], off: [], chosen: null, error: null };
    this.root = null;
  }

  /** Draw into an element of the page, until `close`. */
  open(root) {
    this.root = root;
    this.draw();
  }

  close() {
    this.root = null;
  }

  /** Draw what has changed of `prompts`, `off`, `chosen` (a prompt in full) and `error`. */
  update(changes) {
    Object.assign(this.state, changes);
    this.draw();
  }

  draw() {
    if (!this.root) return;
    const { prompts, chosen, off, error } = this.state;
    const list = this.root.querySelector(".sigmascope-list");
    const scrolled = [this.root.firstElementChild?.scrollTop ?? 0, list?.scrollTop ?? 0];
    const focused = document.activeElement?.getAttribute("data-focus");
    const parts = [this.head()];
    if (error) parts.push(element("p", { kind: "problem", text: error, role: "alert" }));
    if (!prompts.length) parts.push(this.empty());
    else parts.push(this.chart(prompts), ...(chosen ? this.prompt(chosen) : []), this.list(prompts));
    if (off.length) parts.push(this.missing(off));
    this.root.replaceChildren(element("div", { kind: "tab", children: parts }));
    this.root.firstElementChild.scrollTop = scrolled[0];
    if (focused) this.root.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }

  head() {
    const box = element("input", {
      type: "checkbox",
      role: "switch",
      "data-focus": "badges",
      onchange: (event) => this.badges.set(event.target.checked),
    });
    box.checked = this.badges.get();
    return element("header", {
      kind: "head",
      children: [
        element("h2", { text: "Sigmascope" }),
        element("label", { kind: "switch", children: [box, element("span", { text: "Badges on nodes" })] }),
      ],
    });
  }

  empty() {
    return element("div", {
      kind: "empty",
      children: [
        element("p", { kind: "empty-title", text: "No prompt yet" }),
        element("p", { text: "Run one, and its time, memory and verdicts appear here." }),
      ],
    });
  }

  /** The times of the last prompts, the newest at the right. */
  chart(prompts) {
    const shown = prompts.slice(0, 30).reverse();
    const longest = Math.max(...shown.map((prompt) => prompt.seconds), 1e-9);
    const slowest = shown.find((prompt) => prompt.seconds === longest);
    const bars = shown.map((prompt) => {
      const bar = element("button", {
        kind: `bar ${prompt.mark}`,
        type: "button",
        title: `${prompt.time}, ${when(prompt)}`,
        "aria-label": `Prompt of ${when(prompt)}: ${prompt.time}`,
        "aria-current": prompt.name === this.state.chosen?.name ? "true" : null,
        "data-focus": `bar ${prompt.name}`,
        onclick: () => this.choose(prompt.name),
        children: [element("span")],
      });
      bar.firstElementChild.style.height = `${Math.max(3, (100 * prompt.seconds) / longest)}%`;
      return bar;
    });
    return element("figure", {
      kind: "chart",
      children: [
        element("div", { kind: "bars", children: bars }),
        element("figcaption", {
          children: [
            element("span", { text: shown.length === 1 ? "The last prompt" : `The last ${shown.length} prompts` }),
            element("span", { text: `longest ${slowest?.time ?? ""}` }),
          ],
        }),
      ],
    });
  }

  /** One prompt in full. */
  prompt(prompt) {
    const ran = prompt.nodes.filter((node) => node.seconds !== null);
    const idle = prompt.nodes.filter((node) => node.seconds === null);
    const inside = (node) => node.parent !== null && node.parent !== undefined;
    const card = element("section", {
      kind: `card ${prompt.mark}`,
      "aria-label": "The chosen prompt",
      children: [
        element("div", {
          kind: "card-head",
          children: [
            sign(prompt.mark),
            element("strong", { text: prompt.time }),
            element("span", { kind: "faint", text: when(prompt) }),
          ],
        }),
        element("ul", { kind: "words", children: prompt.words.map((text) => element("li", { text, title: text })) }),
        element("div", { kind: "links", children: this.links(prompt) }),
      ],
    });
    const rows = ran.map((node) => this.node(node, prompt, inside(node)));
    const parts = [card];
    if (rows.length) parts.push(titled("Nodes", element("div", { kind: "nodes", children: rows })));
    if (idle.length) parts.push(this.idle(idle));
    if (prompt.changed.length) parts.push(titled("Changed since the one before", this.changes(prompt.changed)));
    return parts;
  }

  links(prompt) {
    const link = (text, page) =>
      element("a", {
        kind: "button",
        text,
        href: this.addresses(prompt.name, page),
        target: "_blank",
        rel: "noopener",
      });
    const links = [link("Open the report", "report.html")];
    if (prompt.before) links.push(link("Compare with the one before", "comparison.html"));
    return links;
  }

  /** A node with its bar, which lies where its time lay in the prompt's. */
  node(node, prompt, isInside) {
    const whole = Math.max(prompt.seconds, 1e-9);
    const left = Math.min(100, (100 * node.started_seconds) / whole);
    const fill = element("span", { kind: `fill ${node.mark}` });
    fill.style.left = `${Math.min(left, 99)}%`;
    fill.style.width = `${Math.max(1, Math.min(100 - left, (100 * node.seconds) / whole))}%`;
    return element("button", {
      kind: isInside ? "node inside" : "node",
      type: "button",
      title: [...node.reasons, ...node.details].join("\n"),
      "data-focus": `node ${node.id}`,
      onclick: () => this.find(node.id),
      children: [
        element("span", {
          kind: "node-head",
          children: [
            sign(node.mark),
            element("span", { kind: "name", text: node.title }),
            element("span", { kind: "figure", text: node.time }),
            element("span", { kind: "figure peak", text: node.peak ?? "" }),
          ],
        }),
        element("span", { kind: "track", children: [fill] }),
        ...(node.mark === "good"
          ? []
          : node.reasons.slice(0, 1).map((text) => element("span", { kind: `reason ${node.mark}`, text }))),
      ],
    });
  }

  idle(nodes) {
    const of = (state) => nodes.filter((node) => node.state === state).map((node) => node.title);
    const line = (names, words) =>
      names.length ? [element("p", { kind: "faint", text: `${words}: ${names.join(", ")}` })] : [];
    return element("div", {
      children: [...line(of("cached"), "Kept from before"), ...line(of("not run"), "Not run")],
    });
  }

  changes(changed) {
    return element("dl", {
      kind: "changes",
      children: changed.flatMap(({ where, input, was, now }) => [
        element("dt", { text: `${where}, ${input}` }),
        element("dd", { children: [element("del", { text: was }), " → ", element("ins", { text: now })] }),
      ]),
    });
  }

  /** All prompts that are kept, the newest first. */
  list(prompts) {
    const rows = prompts.map((prompt) =>
      element("button", {
        kind: "row",
        type: "button",
        title: when(prompt),
        "aria-current": prompt.name === this.state.chosen?.name ? "true" : null,
        "data-focus": `row ${prompt.name}`,
        onclick: () => this.choose(prompt.name),
        children: [
          sign(prompt.mark),
          element("span", { kind: "row-time", text: prompt.time }),
          element("span", { kind: "row-words", text: prompt.words.join(", ") }),
          element("span", { kind: "faint", text: when(prompt) }),
        ],
      }),
    );
    return titled("Prompts", element("div", { kind: "list", children: rows }));
  }

  missing(off) {
    const lines = off.map((one) => element("li", { text: `${one.name}: ${one.reason ?? "off"}; missing: ${one.gives}` }));
    return titled("Not measured", element("ul", { kind: "words", children: lines }));
  }
}

function titled(title, content) {
  return element("section", { children: [element("h3", { text: title }), content] });
}

/** The hour of a prompt, and its day if that is not today. */
function when(prompt) {
  const started = new Date(prompt.started_at);
  const isToday = started.toDateString() === new Date().toDateString();
  const time = started.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  return isToday ? time : `${started.toLocaleDateString()} ${time}`;
}
