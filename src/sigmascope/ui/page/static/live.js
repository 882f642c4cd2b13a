// Renews the runs in progress with each event. Texts go in as text, never as markup.

const place = document.getElementById("runs");
const SVG = "http://www.w3.org/2000/svg";
const ROOM = 60;

function cardOf(id) {
  const known = [...place.children].find((card) => card.dataset.id === id);
  if (known) return known;
  const made = document.getElementById("empty").content.firstElementChild.cloneNode(true);
  made.dataset.id = id;
  const link = made.querySelector("[data-link] a");
  link.href = link.getAttribute("href") + encodeURIComponent(id);
  place.append(made);
  return made;
}

function show(card, run) {
  for (const shown of card.querySelectorAll("[data-of]")) shown.textContent = run[shown.dataset.of];
  card.querySelector("[data-if=left]").hidden = !run.left;
  const bar = card.querySelector("progress");
  bar.hidden = run.done === null;
  bar.value = run.done ?? 0;
  const svg = card.querySelector("[data-bars] svg");
  svg.replaceChildren(...run.bars.map((height, index) => {
    const rect = document.createElementNS(SVG, "rect");
    const place = { class: "step", x: ROOM - run.bars.length + index + 0.05, y: 100 - height, width: 0.9, height };
    for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
    return rect;
  }));
}

function end(card) {
  card.classList.add("over");
  card.querySelector("[data-link]").hidden = false;
}

const events = new EventSource("live/events");
events.addEventListener("message", (event) => {
  const runs = JSON.parse(event.data);
  document.getElementById("said").textContent = "";
  for (const run of runs) show(cardOf(run.id), run);
  const going = new Set(runs.map((run) => run.id));
  for (const card of place.children) if (!going.has(card.dataset.id)) end(card);
  document.getElementById("none").hidden = place.children.length > 0;
});
events.addEventListener("error", () => {
  document.getElementById("said").textContent = "The server does not answer; trying again.";
});
