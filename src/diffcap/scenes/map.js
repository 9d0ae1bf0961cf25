// The map: move, zoom, compare both dates, and find a change in the list or on the map.

const DATA = JSON.parse(document.getElementById("data").textContent);
const field = (id) => document.getElementById(id);
const view = field("view"), stage = field("stage"), slider = field("slider");
const MARGIN = 24, CLOSEST = 3; // pixels around the whole scene; pixels of the screen per pixel of the scene
const place = { x: 0, y: 0, scale: 1 }; // of the scene's upper left corner on the screen; pixels of the screen per pixel of the scene
let border = 0.5; // between before and after, as a fraction of the view
let mode = "slide";
let chosen = null;
const entries = []; // the path and the list item of each change

function draw() {
  stage.style.width = `${DATA.width * place.scale}px`;
  stage.style.height = `${DATA.height * place.scale}px`;
  stage.style.transform = `translate(${place.x}px, ${place.y}px)`;
  const shown = { before: 1, slide: border, after: 0 }[mode];
  const edge = shown * view.clientWidth - place.x; // of the image before, in pixels of the stage
  field("image-before").style.clipPath = `inset(0 ${DATA.width * place.scale - edge}px 0 0)`;
  slider.style.left = `${100 * border}%`;
  slider.setAttribute("aria-valuenow", String(Math.round(100 * border)));
  view.dataset.mode = mode;
  drawScale();
}

function drawScale() {
  if (!DATA.metres) return;
  const perMetre = place.scale / DATA.metres, longest = 150 / perMetre;
  const power = 10 ** Math.floor(Math.log10(longest));
  const length = [5, 2, 1].map((factor) => factor * power).find((metres) => metres <= longest);
  field("scale").hidden = false;
  field("scale").style.width = `${length * perMetre}px`;
  field("scale").firstElementChild.textContent = length >= 1000 ? `${length / 1000} km` : `${length} m`;
}

const smallest = () => Math.min((view.clientWidth - 2 * MARGIN) / DATA.width, (view.clientHeight - 2 * MARGIN) / DATA.height);

// Show a window of the scene in the middle of the view.
function show(x, y, width, height, part) {
  const wanted = part * Math.min(view.clientWidth / width, view.clientHeight / height);
  place.scale = Math.min(Math.max(wanted, smallest()), Math.max(CLOSEST, smallest()));
  place.x = centered(x + width / 2, DATA.width, view.clientWidth);
  place.y = centered(y + height / 2, DATA.height, view.clientHeight);
  draw();
}

// Where the scene begins if `middle` is in the middle of the view, but without empty space beside a scene that is larger than the view.
function centered(middle, length, space) {
  const start = space / 2 - middle * place.scale, last = space - length * place.scale - MARGIN;
  return last < MARGIN ? Math.min(MARGIN, Math.max(last, start)) : (space - length * place.scale) / 2;
}

function fit() {
  show(0, 0, DATA.width, DATA.height, 0);
}

// Zoom around a point of the view.
function zoom(factor, x = view.clientWidth / 2, y = view.clientHeight / 2) {
  const before = place.scale;
  place.scale = Math.min(Math.max(before * factor, smallest() / 2), Math.max(CLOSEST, smallest()));
  place.x = x - ((x - place.x) * place.scale) / before;
  place.y = y - ((y - place.y) * place.scale) / before;
  draw();
}

function choose(number, fromMap) {
  if (chosen !== null) {
    entries[chosen].path.classList.remove("chosen");
    entries[chosen].button.setAttribute("aria-pressed", "false");
  }
  chosen = number;
  const { path, button } = entries[number];
  path.classList.add("chosen");
  path.parentNode.append(path); // above the others
  button.setAttribute("aria-pressed", "true");
  if (fromMap) button.scrollIntoView({ block: "nearest" });
  else show(...DATA.changes[number].window, 0.4);
}

function itemOf(change, number) {
  const facts = [
    `${(100 * change.changed).toFixed(change.changed > 0.995 ? 1 : 0)} % changed`,
    change.tiles === 1 ? "1 tile" : `${change.tiles.toLocaleString("en")} tiles`,
    change.position ? `${change.position[1].toFixed(5)}, ${change.position[0].toFixed(5)}` : `x ${change.window[0]}, y ${change.window[1]}`,
  ];
  const pair = change.pictures && make("span", { class: "pair" }, ...change.pictures.map((data, after) =>
    make("img", { src: `data:image/jpeg;base64,${data}`, alt: after ? "after" : "before", loading: "lazy" })));
  const button = make("button", { type: "button", "aria-pressed": "false" }, pair || null,
    make("span", { class: "words" }, change.caption),
    make("span", { class: "facts" }, ...facts.map((fact) => make("span", {}, fact))));
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", change.path);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = change.caption;
  path.append(title);
  button.addEventListener("click", () => choose(number, false));
  for (const [event, near] of [["pointerenter", true], ["pointerleave", false], ["focus", true], ["blur", false]])
    button.addEventListener(event, () => path.classList.toggle("near", near));
  path.addEventListener("click", () => { if (!moved) choose(number, true); });
  const item = make("li", {}, button);
  entries.push({ path, button, item });
  return item;
}

function search() {
  const words = field("search").value.trim().toLowerCase().split(/\s+/);
  let count = 0;
  DATA.changes.forEach((change, number) => {
    const found = words.every((word) => change.caption.toLowerCase().includes(word));
    entries[number].item.hidden = !found;
    entries[number].path.classList.toggle("hidden", !found);
    count += found;
  });
  field("count").textContent = words[0] ? `${count.toLocaleString("en")} of ${DATA.changes.length.toLocaleString("en")} changes` : "";
}

// Drag an element; `move` gets the event and the steps since the last one.
let moved = false; // whether the press that ends with a click was a drag
function drag(element, move) {
  let last = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.stopPropagation();
    last = event;
    moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (last === null || last.pointerId !== event.pointerId) return;
    if (!moved && Math.hypot(event.clientX - last.clientX, event.clientY - last.clientY) < 4) return;
    moved = true;
    view.classList.add("dragged");
    move(event, event.clientX - last.clientX, event.clientY - last.clientY);
    last = event;
  });
  for (const end of ["pointerup", "pointercancel"])
    addEventListener(end, () => { last = null; view.classList.remove("dragged"); });
}

function setBorder(fraction) {
  border = Math.min(1, Math.max(0, fraction));
  draw();
}

drag(view, (_, x, y) => { place.x += x; place.y += y; draw(); });
drag(slider, (event) => setBorder((event.clientX - view.getBoundingClientRect().left) / view.clientWidth));
view.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { left, top } = view.getBoundingClientRect();
  zoom(1.0015 ** -event.deltaY, event.clientX - left, event.clientY - top);
}, { passive: false });
slider.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -0.05, ArrowRight: 0.05 }[event.key];
  if (step) { event.preventDefault(); event.stopPropagation(); setBorder(border + step); }
});
view.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
  if (steps) { event.preventDefault(); place.x += steps[0]; place.y += steps[1]; draw(); }
  if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 1.4 : 1 / 1.4);
});
for (const button of field("mode").children)
  button.addEventListener("click", () => {
    mode = button.dataset.mode;
    for (const other of field("mode").children) other.setAttribute("aria-pressed", String(other === button));
    draw();
  });
field("closer").addEventListener("click", () => zoom(1.4));
field("farther").addEventListener("click", () => zoom(1 / 1.4));
field("fit").addEventListener("click", fit);
field("outlines").addEventListener("change", (event) => view.classList.toggle("no-outlines", !event.target.checked));
field("search").addEventListener("input", search);
addEventListener("resize", draw);

theme();
field("changes").append(...DATA.changes.map(itemOf));
field("shapes").append(...entries.map(({ path }) => path));
fit();
