// What the page is doing, and what went wrong: lines that screen readers hear too.

import { element, setText } from "./elements.js";

export function tell(text, { value, max, busy = false } = {}) {
  setText("status-text", text);
  const bar = element("progress");
  bar.hidden = !busy;
  if (max) Object.assign(bar, { max, value });
  else bar.removeAttribute("value");
}

export function tellError(error) {
  element("error").hidden = false;
  setText("error-message", error.message);
  setText("error-hint", error.hint ?? "");
}

function ordinal(number) {
  const ending = { one: "st", two: "nd", few: "rd", other: "th" };
  return `${number}${ending[new Intl.PluralRules("en", { type: "ordinal" }).select(number)]}`;
}

export function tellProgress(job) {
  if (job.state === "waiting") {
    tell(`Waiting, ${ordinal(job.position)} in line.`, { busy: true });
  } else if (job.state === "running") {
    const what = job.making === "result" ? "the picture with the LoRA" : "the base’s picture";
    const step = job.step ? `: step ${job.step} of ${job.steps} done` : "";
    tell(job.making ? `Making ${what}${step}.` : "Starting.", { busy: true, value: job.step, max: job.step ? job.steps : 0 });
  }
}
