// A badge above each node of the graph: its time, its peak, and a sign with the reason on hover.
//
// Badges are elements in a layer over the canvas, so that they are the same however the page draws its nodes. The layer
// moves with the canvas each time that it is drawn.

import { element, sign } from "./elements.js";

const GAP = 6;
const SMALLEST = 0.75; // of a badge's size on the page, however far away the nodes are
const LARGEST = 2; // times the nodes' own scale
const NO_ID = "00000000-0000-0000-0000-000000000000"; // of workflows that were made of a prompt in a file
const IDLE = {
  cached: "Its output was kept from before.",
  blocked: "A node before it kept it from running.",
};

export class Badges {
  /** `app` is ComfyUI's. */
  constructor(app) {
    this.app = app;
    this.prompt = null;
    this.enabled = true;
    this.layer = element("div", { kind: "badges" });
    this.tip = element("div", { kind: "tip", role: "tooltip", id: "sigmascope-tip", hidden: "" });
    this.shown = new Map();
    const canvas = app.canvas;
    canvas.canvas.parentElement.append(this.layer);
    document.body.append(this.tip);
    const drawn = canvas.onDrawForeground;
    canvas.onDrawForeground = (...given) => {
      const result = drawn?.apply(canvas, given);
      this.place();
      return result;
    };
  }

  /** Show the nodes of a prompt; null: none. */
  show(prompt) {
    this.prompt = prompt;
    this.layer.dataset.prompt = prompt?.name ?? "";
    this.redraw();
  }

  /** Switch them on or off. */
  enable(on) {
    this.enabled = on;
    this.redraw();
  }

  redraw() {
    for (const { badge } of this.shown.values()) badge.remove();
    this.shown.clear();
    this.hideTip();
    this.place();
  }

  /** Put each badge above its node. */
  place() {
    const { canvas } = this.app;
    const { scale, offset } = canvas.ds;
    this.layer.style.transform = `scale(${scale}) translate(${offset[0]}px, ${offset[1]}px)`;
    this.layer.style.setProperty("--scale", Math.min(LARGEST, Math.max(1, SMALLEST / scale)));
    const known = this.enabled && this.prompt ? this.figures() : new Map();
    const seen = new Set();
    for (const node of canvas.graph?._nodes ?? []) {
      const figure = known.get(node);
      if (!figure) continue;
      seen.add(node);
      const { badge, figure: before } = this.shown.get(node) ?? {};
      const now = before === figure ? badge : this.make(node, figure, badge);
      const title = globalThis.LiteGraph?.NODE_TITLE_HEIGHT ?? 30;
      now.style.left = `${node.pos[0]}px`;
      now.style.top = `${node.pos[1] - title - GAP}px`;
    }
    for (const [node, { badge }] of this.shown) {
      if (seen.has(node)) continue;
      badge.remove();
      this.shown.delete(node);
    }
  }

  /** What the prompt says of each node of the graph that is open, which may lie in another. */
  figures() {
    const figures = new Map();
    if (!this.isOfThisWorkflow()) return figures;
    const byId = new Map([...this.prompt.subgraphs, ...this.prompt.nodes].map((node) => [node.id, node]));
    const { graph } = this.app.canvas;
    for (const path of pathsTo(graph, rootOf(this.app))) {
      for (const node of graph._nodes ?? []) {
        const figure = byId.get([...path, node.id].join(":"));
        const same = figure?.class_type ? figure.class_type === classOf(node) : node.subgraph;
        if (figure && same && figure.state !== "not run" && !figures.has(node)) figures.set(node, figure);
      }
    }
    return figures;
  }

  /** Many workflows have no id of their own: such a one is known by the nodes that ran. */
  isOfThisWorkflow() {
    if (this.prompt.workflow !== NO_ID) return true;
    const root = rootOf(this.app);
    const own = this.prompt.nodes.filter((node) => /^\d+$/.test(node.id));
    return own.every((node) => classOf(root.getNodeById(Number(node.id))) === node.class_type);
  }

  make(node, figure, before) {
    before?.remove();
    const idle = figure.state in IDLE;
    const said = idle ? [figure.state] : [figure.time, figure.peak].filter(Boolean);
    const badge = element("button", {
      kind: `badge ${idle ? "cached" : figure.mark}`,
      type: "button",
      "data-node": figure.id,
      "aria-describedby": "sigmascope-tip",
      children: [sign(figure.mark), ...said.map((text) => element("span", { text }))],
      onmouseenter: () => this.showTip(badge, figure),
      onfocus: () => this.showTip(badge, figure),
      onmouseleave: () => this.hideTip(),
      onblur: () => this.hideTip(),
      // The wheel belongs to the canvas below.
      onwheel: (event) => this.app.canvas.canvas.dispatchEvent(new WheelEvent("wheel", event)),
    });
    this.layer.append(badge);
    this.shown.set(node, { badge, figure });
    return badge;
  }

  showTip(badge, figure) {
    const lines = figure.state in IDLE ? [IDLE[figure.state]] : figure.details;
    this.tip.replaceChildren(
      ...figure.reasons.map((text) => element("p", { kind: `reason ${figure.mark}`, text })),
      ...lines.map((text) => element("p", { text })),
    );
    this.tip.hidden = false;
    const at = badge.getBoundingClientRect();
    const { width, height } = this.tip.getBoundingClientRect();
    const left = Math.min(at.left, innerWidth - width - 8);
    const top = at.top - height - 6 > 0 ? at.top - height - 6 : at.bottom + 6;
    Object.assign(this.tip.style, { left: `${Math.max(8, left)}px`, top: `${top}px` });
  }

  hideTip() {
    this.tip.hidden = true;
  }
}

function classOf(node) {
  return node?.comfyClass ?? node?.type;
}

/** The workflow's outermost graph. */
export function rootOf(app) {
  return app.rootGraph ?? app.graph;
}

/** The ids of the nodes around a graph, outermost first: one list for each place in which the graph is used. */
function pathsTo(graph, root) {
  if (!graph || graph === root) return [[]];
  const found = [];
  const look = (from, path) => {
    for (const node of from._nodes ?? []) {
      if (!node.subgraph || path.length > 20) continue;
      const inside = [...path, node.id];
      if (node.subgraph === graph) found.push(inside);
      look(node.subgraph, inside);
    }
  };
  look(root, []);
  return found;
}
