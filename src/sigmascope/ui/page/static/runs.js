// Says how many runs are ticked, and lets no third one be: the list works without this.

const list = document.getElementById("runs");
const boxes = [...(list?.querySelectorAll("input[type=checkbox]") ?? [])];

function count() {
  const ticked = boxes.filter((box) => box.checked).length;
  const words = [
    "Tick two runs to compare them, or one to compare it with the last like it.",
    "One run is ticked: it is compared with the last like it, or tick another.",
    "Two runs are ticked: the older one is the one before.",
  ];
  document.getElementById("ticked").textContent = words[ticked];
  list.querySelector("button").disabled = ticked === 0;
  for (const box of boxes) box.disabled = ticked >= 2 && !box.checked;
}

for (const box of boxes) box.addEventListener("change", count);
if (list) {
  count();
  window.addEventListener("pageshow", count); // ticks come back with the page
}
