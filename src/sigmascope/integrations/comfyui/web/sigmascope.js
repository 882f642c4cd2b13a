// Sigmascope on ComfyUI's page: badges on nodes, and a tab in the sidebar. All figures come from the records of prompts.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { Badges, rootOf } from "./badges.js";
import { addStyle } from "./elements.js";
import { Tab } from "./tab.js";

const SETTING = "Sigmascope.Badges";
const PROMPTS = "/sigmascope/prompts";

let badges = null;
let prompts = [];
let wanted = null; // the name of the prompt that the tab is to show

const setting = {
  get: () => app.extensionManager.setting.get(SETTING) ?? true,
  set: (on) => app.extensionManager.setting.set(SETTING, on),
};
const tab = new Tab({
  addresses: (name, page) => api.apiURL(`${PROMPTS}/${encodeURIComponent(name)}/${page}`),
  choose,
  badges: setting,
  find,
});

async function ask(path) {
  const answer = await api.fetchApi(path, { cache: "no-store" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

/** Read the list, and show the newest prompt; in the badges, that of the workflow that is open. */
async function refresh() {
  try {
    const found = await ask(PROMPTS);
    prompts = found.prompts;
    tab.update({ prompts, off: found.off, error: found.records ? null : "Records are written nowhere." });
    if (prompts.length) await choose(prompts[0].name);
    await showBadges();
  } catch (error) {
    tab.update({ error: `The prompts could not be read: ${error.message}` });
  }
}

async function choose(name) {
  wanted = name;
  try {
    const chosen = await ask(`${PROMPTS}/${encodeURIComponent(name)}`);
    if (wanted === name) tab.update({ chosen, error: null });
  } catch (error) {
    if (wanted === name) tab.update({ error: `The prompt could not be read: ${error.message}` });
  }
}

/** The last prompt of the workflow that is open. */
function lastOfWorkflow() {
  const workflow = rootOf(app)?.id;
  return prompts.find((prompt) => prompt.workflow !== null && prompt.workflow === workflow) ?? null;
}

/** It has the badges. */
async function showBadges() {
  if (!badges) return;
  const last = lastOfWorkflow();
  if (last && last.name === badges.prompt?.name) return;
  try {
    const shown = last && (await ask(`${PROMPTS}/${encodeURIComponent(last.name)}`));
    if (lastOfWorkflow() === last) badges.show(shown);
  } catch {
    badges.show(null); // its record was removed meanwhile; the tab says so when it is chosen
  }
}

/** Bring the outermost node that a figure belongs to into view. */
function find(id) {
  const root = rootOf(app);
  const outermost = String(id).split(/[:.]/)[0];
  const node = root.getNodeById(outermost) ?? root.getNodeById(Number(outermost));
  if (!node) return;
  if (app.canvas.graph !== root) app.canvas.setGraph?.(root);
  app.canvas.centerOnNode(node);
  app.canvas.selectNode?.(node);
}

app.registerExtension({
  name: "sigmascope",
  settings: [
    {
      id: SETTING,
      category: ["Sigmascope", "Badges", "Show"],
      name: "Show time, peak and verdict of each node above it",
      type: "boolean",
      defaultValue: true,
      onChange: (on) => {
        badges?.enable(on);
        tab.update({});
      },
    },
  ],
  async setup() {
    addStyle();
    badges = new Badges(app);
    badges.enable(setting.get());
    api.addEventListener("sigmascope.prompt", async ({ detail }) => {
      const wasNewest = tab.state.chosen === null || tab.state.chosen.name === prompts[0]?.name;
      prompts = [detail, ...prompts.filter((prompt) => prompt.name !== detail.name)].slice(0, 50);
      tab.update({ prompts });
      if (wasNewest) await choose(detail.name);
      await showBadges();
    });
    // After the connection was lost, prompts may have ended unheard.
    api.addEventListener("reconnected", refresh);
    app.extensionManager.registerSidebarTab({
      id: "sigmascope",
      icon: "pi pi-chart-bar",
      title: "Sigmascope",
      tooltip: "Sigmascope: time, memory and verdicts of the last prompts",
      type: "custom",
      render: (root) => tab.open(root),
      destroy: () => tab.close(),
    });
    refresh(); // the page need not wait for it
  },
  afterConfigureGraph() {
    showBadges();
  },
});
