// Small helpers for the page's elements. Text goes in as text, never as markup.

export const element = (id) => document.getElementById(id);

export function make(tag, text, properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function setText(id, text) {
  element(id).textContent = text;
}

const urls = new Map();

// Show a blob at an image or link, and give back the memory of the one before.
export function setBlob(target, attribute, blob) {
  const before = urls.get(target);
  const url = URL.createObjectURL(blob);
  target[attribute] = url;
  urls.set(target, url);
  if (before) URL.revokeObjectURL(before);
  return url;
}
