// One picture over another, with a line to move between them.

import { element, make } from "./elements.js";

export function makeCompare(titles) {
  const [left, right, split, sheet] = ["left", "right", "split", "sheet"].map(element);
  const names = Object.keys(titles);
  for (const select of [left, right]) {
    select.replaceChildren(...names.map((name) => make("option", titles[name], { value: name })));
  }
  right.value = names.at(-1);
  left.value = names.at(-2);

  function refresh() {
    for (const [image, select] of [["over", left], ["under", right]]) {
      const shown = element(select.value);
      if (shown.src) element(image).src = shown.src;
      else element(image).removeAttribute("src");
      element(image).alt = shown.src ? shown.alt : "";
    }
  }
  function move() {
    sheet.style.setProperty("--split", `${split.value}%`);
    split.setAttribute("aria-valuetext", `${Math.round(split.value)} % ${titles[left.value]}, the rest ${titles[right.value]}`);
  }
  split.addEventListener("input", move);
  for (const select of [left, right]) select.addEventListener("change", () => { refresh(); move(); });
  move();
  return { refresh };
}
