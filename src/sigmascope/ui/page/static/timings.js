// The table of stages: what each took in the base's run and in the result's, and the memory at its highest.

import { element, make, setText } from "./elements.js";

const NAMES = {
  lora_application: "Setting the scale",
  latent_encoding: "Encoding",
  denoising: "Denoising",
  latent_decoding: "Decoding",
};
const STEPS_SHOWN = 12;

export function seconds(value) {
  if (value === undefined) return "–";
  if (value < 0.00005) return "< 0.1 ms";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(2)} s`;
}
const mib = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));

function row(name, cells, className = "") {
  const made = make("tr", undefined, { className });
  made.append(make("th", name, { scope: "row" }), ...cells);
  return made;
}

function timeCell(value, total) {
  const cell = make("td", seconds(value));
  if (value !== undefined && total > 0) {
    const track = make("span", undefined, { className: "share-track" });
    const bar = make("span", undefined, { className: "share" });
    bar.style.width = `${(100 * value) / total}%`;
    track.append(bar);
    cell.append(track);
  }
  return cell;
}

function stepRows(runs, stages, width) {
  const count = Math.max(...stages.map((stage) => stage?.steps.length ?? 0));
  const rows = [];
  for (let index = 0; index < Math.min(count, STEPS_SHOWN); index += 1) {
    const cells = stages.map((stage, run) => timeCell(stage?.steps[index], runs[run].timings.seconds));
    rows.push(row(`step ${index + 1}`, [...cells, ...Array.from({ length: width }, () => make("td"))], "step"));
  }
  if (count > STEPS_SHOWN) {
    const empty = Array.from({ length: runs.length + width }, () => make("td"));
    rows.push(row(`… ${count - STEPS_SHOWN} more, in the run’s JSON`, empty, "step"));
  }
  return rows;
}

// `runs`: [{title, timings, kept}], the last one is the newest and gives the memory.
export function showTimings(runs, device) {
  const newest = runs.at(-1).timings;
  const hasGpu = newest.peak_gpu_mib != null;
  const peaks = (one) => [make("td", mib(one?.peak_rss_mib)), ...(hasGpu ? [make("td", mib(one?.peak_gpu_mib))] : [])];
  const titles = ["Stage", ...runs.map((run) => run.title), "Peak memory, MiB", ...(hasGpu ? [`Peak on ${device}, MiB`] : [])];
  element("timings-head").replaceChildren(...titles.map((title) => make("th", title, { scope: "col" })));

  const rows = [];
  for (const stage of newest.stages) {
    const same = runs.map((run) => run.timings.stages.find((other) => other.name === stage.name));
    const cells = same.map((one, run) => timeCell(one?.seconds, runs[run].timings.seconds));
    rows.push(row(NAMES[stage.name] ?? stage.name, [...cells, ...peaks(stage)]));
    if (stage.steps.length > 1) rows.push(...stepRows(runs, same, hasGpu ? 2 : 1));
  }
  element("timings-body").replaceChildren(...rows);
  const totals = runs.map((run) => make("td", seconds(run.timings.seconds)));
  element("timings-foot").replaceChildren(row("In all", [...totals, ...peaks(newest)]));
  const kept = runs.filter((run) => run.kept).map((run) => run.title);
  setText(
    "timings-note",
    `${hasGpu ? "" : "No accelerator: memory is this process’s. "}${kept.length ? `Kept from before, not made again: ${kept.join(", ")}.` : ""}`,
  );
  element("timings").hidden = false;
}
