// The page: what is asked for follows the controls, what is shown follows the newest answer.

import * as api from "./api.js";
import { makeCompare } from "./compare.js";
import { element, setBlob, setText } from "./elements.js";
import { tell, tellError, tellProgress } from "./status.js";
import { seconds, showTimings } from "./timings.js";
import { onPicture } from "./upload.js";

const about = JSON.parse(element("about").textContent);
const hasLora = about.lora !== null;
const titles = { source: "Source", base: "Base", ...(hasLora ? { result: "With LoRA" } : {}) };
const compare = makeCompare(titles);
const client = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const DEBOUNCE_MS = 80;

const page = { picture: null, upload: null, name: "picture", taken: 0, asked: 0, shown: 0, baseId: null, timer: 0 };

// --- the controls

function size() {
  const chosen = element("size").value;
  return chosen === "custom" ? `${element("width").value}x${element("height").value}` : chosen;
}

function wish() {
  return {
    picture: page.picture.id,
    client,
    scale: hasLora ? Number(element("scale-number").value) : 0,
    steps: Number(element("steps").value),
    seed: Number(element("seed").value),
    size: size(),
  };
}

function askSoon() {
  clearTimeout(page.timer);
  page.timer = setTimeout(ask, DEBOUNCE_MS);
}

// --- asking

async function take(upload, name, chosenSize) {
  element("error").hidden = true;
  tell("Reading the picture.", { busy: true });
  const turn = (page.taken += 1);
  try {
    const picture = await upload();
    const blob = await api.sourceBlob(picture.id);
    if (turn !== page.taken) return; // another picture was chosen meanwhile
    Object.assign(page, { picture, upload, name, baseId: null });
    element("size").value = chosenSize;
    sizeChanged();
    showSource(blob);
    ask();
  } catch (error) {
    if (turn !== page.taken) return;
    tell(page.picture ? "The picture before is still here." : "Choose a picture to begin.");
    tellError(error);
  }
}

async function ask(isSecondTry = false) {
  clearTimeout(page.timer);
  if (!page.picture) return;
  const invalid = element("controls").querySelector(":invalid");
  if (invalid) {
    tellError({ message: `${invalid.labels?.[0]?.textContent ?? "A value"}: ${invalid.validationMessage}` });
    return;
  }
  const turn = (page.asked += 1);
  const wished = wish();
  element("error").hidden = true;
  for (const name of ["base", "result"]) element(name)?.classList.add("older");
  try {
    let job = await api.addJob(wished);
    while (job.state === "waiting" || job.state === "running") {
      if (turn === page.asked) tellProgress(job);
      job = await api.jobAfter(job.id, job.version);
    }
    if (job.state === "failed") throw Object.assign(new Error(job.error.message), { hint: job.error.hint });
    if (job.state === "done") await show(turn, job.outcome, wished);
  } catch (error) {
    if (turn !== page.asked) return;
    if (error.status === 404 && !isSecondTry) return askAgain();
    tell("That did not work.");
    tellError(error);
  }
}

// The server has forgotten the picture or the result, or was started anew: we still have the file.
async function askAgain() {
  try {
    page.picture = await page.upload();
    page.baseId = null;
  } catch (error) {
    tell("That did not work.");
    tellError(error);
    return;
  }
  await ask(true);
}

// --- showing

function showSource(blob) {
  const { width, height } = page.picture;
  setBlob(element("source"), "src", blob);
  for (const name of ["base", "result"]) element(name)?.removeAttribute("src");
  for (const name of ["save-picture", "save-run", "timings"]) element(name).hidden = true;
  document.querySelector(".studio").style.setProperty("--aspect", width / height);
  setText("source-note", `${width}×${height}`);
  setText("chosen", `${page.name}, ${width}×${height}`);
  element("chosen").hidden = false;
  for (const note of ["base-note", "result-note"]) if (element(note)) setText(note, "");
  element("shown").hidden = false;
  document.body.classList.add("has-picture");
  compare.refresh();
}

async function show(turn, outcome, wished) {
  const { base, result } = outcome;
  const main = result ?? base;
  const fetchBase = base.id !== page.baseId;
  const [baseBlob, resultBlob, runBlob] = await Promise.all([
    fetchBase || !result ? api.resultBlob(base.id) : null,
    result ? api.resultBlob(result.id) : null,
    api.runBlob(main.id),
  ]);
  if (turn < page.shown || wished.picture !== page.picture.id) return; // something newer is there
  page.shown = turn;
  page.baseId = base.id;
  if (baseBlob) setBlob(element("base"), "src", baseBlob);
  setText("base-note", seconds(base.timings.seconds) + (base.kept ? ", kept" : ""));
  if (result) {
    setBlob(element("result"), "src", resultBlob);
    setText("result-note", `scale ${wished.scale.toFixed(2)}, ${seconds(result.timings.seconds)}${result.kept ? ", kept" : ""}`);
  }
  offer(resultBlob ?? baseBlob, runBlob, wished);
  const runs = [{ title: "Base", ...base }, ...(result ? [{ title: "With LoRA", ...result }] : [])];
  showTimings(runs, about.device);
  compare.refresh();
  if (turn !== page.asked) return; // a newer request is under way: its progress stays
  for (const name of ["base", "result"]) element(name)?.classList.remove("older");
  const asleep = outcome.dormant_modules;
  tell(`Done${asleep ? `; ${asleep} of the LoRA’s ${about.lora_modules} modules never ran and had no effect` : ""}.`);
}

function offer(picture, run, wished) {
  const stem = page.name.replace(/\.[^.]*$/, "") || "picture";
  const name = `${stem}_${hasLora ? `scale${wished.scale.toFixed(2)}_` : ""}steps${wished.steps}_seed${wished.seed}`;
  for (const [id, blob, ending] of [["save-picture", picture, "png"], ["save-run", run, "json"]]) {
    const link = element(id);
    setBlob(link, "href", blob);
    link.download = `${name}.${ending}`;
    link.hidden = false;
  }
}

function sizeChanged() {
  element("custom").hidden = element("size").value !== "custom";
  for (const side of ["width", "height"]) element(side).disabled = element("custom").hidden;
}

// --- wiring

onPicture((file) => {
  if (file.size > about.most_upload_bytes) {
    tellError({ message: `${file.name} is larger than ${about.most_upload_bytes / 2 ** 20} MiB.`, hint: "Scale it down first." });
    return;
  }
  const chosen = element("size").value === "keep" ? "bucket" : element("size").value;
  take(() => api.addPicture(file), file.name || "pasted.png", chosen);
});
element("scene")?.addEventListener("click", () => {
  const number = Math.floor(Math.random() * 1000);
  take(() => api.addScene(number), `scene ${number}`, "keep");
});
element("draw").addEventListener("click", () => {
  element("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
  ask();
});
element("scale")?.addEventListener("input", () => { element("scale-number").value = element("scale").value; askSoon(); });
element("scale-number")?.addEventListener("input", () => { element("scale").value = element("scale-number").value; askSoon(); });
for (const id of ["steps", "seed", "width", "height"]) element(id).addEventListener("input", askSoon);
element("size").addEventListener("change", () => { sizeChanged(); ask(); });
element("controls").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
for (const view of document.getElementsByName("view")) {
  view.addEventListener("change", () => {
    element("side").hidden = view.value !== "side";
    element("compare").hidden = view.value !== "compare";
  });
}
sizeChanged();
