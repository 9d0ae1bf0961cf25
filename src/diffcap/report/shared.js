// Functions that the pages of diffcap share.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Light or dark: as stored, else as the system prefers; the button #theme switches it.
function theme() {
  const dark = () => document.documentElement.dataset.theme === "dark";
  const stored = () => { try { return localStorage.getItem("diffcap-theme"); } catch { return null; } };
  document.documentElement.dataset.theme =
    stored() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("diffcap-theme", document.documentElement.dataset.theme); } catch { /* storage is off */ }
  });
}
