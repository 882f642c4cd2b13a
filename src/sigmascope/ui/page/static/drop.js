// Files dropped anywhere on the page go into its form: choosing them there works without this.

const form = document.querySelector("form[data-drop]");
const input = form.querySelector("input[type=file]");
const said = document.getElementById("chosen");
const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
let depth = 0;

function mark(change) {
  depth = Math.max(0, depth + change);
  document.body.classList.toggle("dragging", depth > 0);
}

document.addEventListener("dragenter", (event) => { if (hasFiles(event)) mark(1); });
document.addEventListener("dragleave", (event) => { if (hasFiles(event)) mark(-1); });
document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
document.addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  mark(-depth);
  if (!event.dataTransfer.files.length) return;
  input.files = event.dataTransfer.files;
  input.dispatchEvent(new Event("change"));
  form.requestSubmit();
});
input.addEventListener("change", () => {
  said.textContent = [...input.files].map((file) => file.name).join(", ");
});
form.addEventListener("submit", () => { said.textContent = "Reading the file …"; });
