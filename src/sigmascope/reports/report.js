// The timeline's zoom, and the record as a file. A report holds this script in itself; the app serves it.
"use strict";
function zoom(box, factor) {
  const wide = box.querySelector(".wide");
  const now = Number(wide.dataset.zoom || 1);
  const next = Math.min(64, Math.max(1, now * factor));
  const middle = (box.scrollLeft + box.clientWidth / 2) / wide.clientWidth;
  wide.dataset.zoom = next;
  wide.style.width = 100 * next + "%";
  box.scrollLeft = middle * wide.clientWidth - box.clientWidth / 2;
}
for (const button of document.querySelectorAll("button[data-zoom]")) {
  button.addEventListener("click", () => zoom(document.getElementById(button.dataset.for), Number(button.dataset.zoom)));
}
for (const box of document.querySelectorAll(".zoom[tabindex]")) {
  box.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") zoom(box, 2);
    if (event.key === "-") zoom(box, 0.5);
  });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(box, event.deltaY < 0 ? 1.25 : 0.8);
  }, { passive: false });
}
for (const button of document.querySelectorAll("button[data-save]")) {
  button.addEventListener("click", () => {
    const text = document.getElementById(button.dataset.save).textContent;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = button.dataset.name.replace(/[^\w.-]+/g, "_") + ".json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
