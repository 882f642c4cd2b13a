// Pictures in: chosen, dropped anywhere on the page, or pasted.

import { element } from "./elements.js";

const firstPicture = (files) => [...(files ?? [])].find((file) => file.type.startsWith("image/")) ?? files?.[0];

export function onPicture(take) {
  const input = element("file");
  input.addEventListener("change", () => {
    const file = firstPicture(input.files);
    input.value = ""; // so that choosing the same file again is a change too
    if (file) take(file);
  });

  let depth = 0; // dragenter and dragleave come for every element on the way
  const dragging = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const mark = () => document.body.classList.toggle("dragging", depth > 0);
  document.addEventListener("dragenter", (event) => { if (dragging(event)) { depth += 1; mark(); } });
  document.addEventListener("dragleave", (event) => { if (dragging(event)) { depth = Math.max(0, depth - 1); mark(); } });
  document.addEventListener("dragover", (event) => { if (dragging(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!dragging(event)) return;
    event.preventDefault();
    depth = 0;
    mark();
    const file = firstPicture(event.dataTransfer.files);
    if (file) take(file);
  });

  document.addEventListener("paste", (event) => {
    const file = firstPicture(event.clipboardData?.files);
    if (!file) return; // text pasted into a field
    event.preventDefault();
    take(file);
  });
}
