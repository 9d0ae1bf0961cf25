// The map: move, zoom, compare both dates, and find a change in the list or on the map.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const view = byId("view"), stage = byId("stage"), slider = byId("slider"); // the visible part, the whole scene, the border
const MARGIN = 24; // pixels of the screen around the whole scene
const MAX_SCALE = 3; // pixels of the screen per pixel of the scene
const place = { x: 0, y: 0, scale: 1 }; // of the scene: its upper left corner in the view, pixels of the screen per pixel of the scene
let border = 0.5; // between the images before and after, as a fraction of the view's width
let mode = "slide"; // or "before" or "after"
let chosenNumber = null; // of the change that is highlighted
const entries = []; // of each change: its outline (path), its button in the list, and the list item around it

function draw() {
  stage.style.width = `${DATA.width * place.scale}px`;
  stage.style.height = `${DATA.height * place.scale}px`;
  stage.style.transform = `translate(${place.x}px, ${place.y}px)`;
  const beforeFraction = { before: 1, slide: border, after: 0 }[mode]; // fraction of the view's width that shows the image before
  const edge = beforeFraction * view.clientWidth - place.x; // right edge of the image before, in pixels of the stage
  byId("image-before").style.clipPath = `inset(0 ${DATA.width * place.scale - edge}px 0 0)`;
  slider.style.left = `${100 * border}%`;
  slider.setAttribute("aria-valuenow", String(Math.round(100 * border)));
  view.dataset.mode = mode;
  drawScale();
}

// Draw a scale bar of at most 150 pixels; `DATA.metres` is the width of a pixel of the scene.
function drawScale() {
  if (!DATA.metres) return;
  const pixelsPerMetre = place.scale / DATA.metres, maxLength = 150 / pixelsPerMetre;
  const power = 10 ** Math.floor(Math.log10(maxLength));
  const length = [5, 2, 1].map((factor) => factor * power).find((metres) => metres <= maxLength);
  byId("scale").hidden = false;
  byId("scale").style.width = `${length * pixelsPerMetre}px`;
  byId("scale").firstElementChild.textContent = length >= 1000 ? `${length / 1000} km` : `${length} m`;
}

const minScale = () => Math.min((view.clientWidth - 2 * MARGIN) / DATA.width, (view.clientHeight - 2 * MARGIN) / DATA.height);

// Show a window of the scene in the middle of the view, on a `fraction` of the view's width or height.
function show(x, y, width, height, fraction) {
  const scale = fraction * Math.min(view.clientWidth / width, view.clientHeight / height);
  place.scale = Math.min(Math.max(scale, minScale()), Math.max(MAX_SCALE, minScale()));
  place.x = centered(x + width / 2, DATA.width, view.clientWidth);
  place.y = centered(y + height / 2, DATA.height, view.clientHeight);
  draw();
}

// Return where the scene starts in the view if its pixel `middle` is in the middle. A scene that is larger than the view fills it; a
// smaller one is centered. One axis: `sceneLength` in pixels of the scene, `viewLength` in pixels of the screen.
function centered(middle, sceneLength, viewLength) {
  const start = viewLength / 2 - middle * place.scale, minStart = viewLength - sceneLength * place.scale - MARGIN;
  return minStart < MARGIN ? Math.min(MARGIN, Math.max(minStart, start)) : (viewLength - sceneLength * place.scale) / 2;
}

function fit() {
  show(0, 0, DATA.width, DATA.height, 0); // 0: `show` uses the smallest scale
}

// Zoom around a point of the view.
function zoom(factor, x = view.clientWidth / 2, y = view.clientHeight / 2) {
  const oldScale = place.scale;
  place.scale = Math.min(Math.max(oldScale * factor, minScale() / 2), Math.max(MAX_SCALE, minScale()));
  place.x = x - ((x - place.x) * place.scale) / oldScale;
  place.y = y - ((y - place.y) * place.scale) / oldScale;
  draw();
}

// Highlight a change, and show its button in the list if it was chosen on the map, else its window on the map.
function choose(number, fromMap) {
  if (chosenNumber !== null) {
    entries[chosenNumber].path.classList.remove("chosen");
    entries[chosenNumber].button.setAttribute("aria-pressed", "false");
  }
  chosenNumber = number;
  const { path, button } = entries[number];
  path.classList.add("chosen");
  path.parentNode.append(path); // the outline is drawn above the others
  button.setAttribute("aria-pressed", "true");
  if (fromMap) button.scrollIntoView({ block: "nearest" });
  else show(...DATA.changes[number].window, 0.4);
}

// Create the list item and the outline of a change.
function addChange(change, number) {
  const facts = [
    `${(100 * change.changed).toFixed(change.changed > 0.995 ? 1 : 0)} % changed`,
    change.tiles === 1 ? "1 tile" : `${change.tiles.toLocaleString("en")} tiles`,
    change.position ? `${change.position[1].toFixed(5)}, ${change.position[0].toFixed(5)}` : `x ${change.window[0]}, y ${change.window[1]}`,
  ];
  const pair = change.pictures && make("span", { class: "pair" }, ...change.pictures.map((data, index) =>
    make("img", { src: `data:image/jpeg;base64,${data}`, alt: index ? "after" : "before", loading: "lazy" })));
  const button = make("button", { type: "button", "aria-pressed": "false" }, pair || null,
    make("span", { class: "words" }, change.caption),
    make("span", { class: "facts" }, ...facts.map((fact) => make("span", {}, fact))));
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", change.path);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = change.caption;
  path.append(title);
  button.addEventListener("click", () => choose(number, false));
  for (const [event, isNear] of [["pointerenter", true], ["pointerleave", false], ["focus", true], ["blur", false]])
    button.addEventListener(event, () => path.classList.toggle("near", isNear));
  path.addEventListener("click", () => { if (!wasDragged) choose(number, true); });
  const item = make("li", {}, button);
  entries.push({ path, button, item });
  return item;
}

function search() {
  const words = byId("search").value.trim().toLowerCase().split(/\s+/);
  let count = 0;
  DATA.changes.forEach((change, number) => {
    const hasAllWords = words.every((word) => change.caption.toLowerCase().includes(word));
    entries[number].item.hidden = !hasAllWords;
    entries[number].path.classList.toggle("hidden", !hasAllWords);
    count += hasAllWords;
  });
  byId("count").textContent = words[0] ? `${count.toLocaleString("en")} of ${DATA.changes.length.toLocaleString("en")} changes` : "";
}

// Call `move(event, x, y)` while an element is dragged; x and y are the distances in pixels since the last event.
let wasDragged = false; // the pointer was moved between the last press and the click
function onDrag(element, move) {
  let lastEvent = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.stopPropagation();
    lastEvent = event;
    wasDragged = false;
  });
  addEventListener("pointermove", (event) => {
    if (lastEvent === null || lastEvent.pointerId !== event.pointerId) return;
    if (!wasDragged && Math.hypot(event.clientX - lastEvent.clientX, event.clientY - lastEvent.clientY) < 4) return;
    wasDragged = true;
    view.classList.add("dragged");
    move(event, event.clientX - lastEvent.clientX, event.clientY - lastEvent.clientY);
    lastEvent = event;
  });
  for (const end of ["pointerup", "pointercancel"])
    addEventListener(end, () => { lastEvent = null; view.classList.remove("dragged"); });
}

function setBorder(fraction) {
  border = Math.min(1, Math.max(0, fraction));
  draw();
}

onDrag(view, (_, x, y) => { place.x += x; place.y += y; draw(); });
onDrag(slider, (event) => setBorder((event.clientX - view.getBoundingClientRect().left) / view.clientWidth));
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
for (const button of byId("mode").children)
  button.addEventListener("click", () => {
    mode = button.dataset.mode;
    for (const other of byId("mode").children) other.setAttribute("aria-pressed", String(other === button));
    draw();
  });
byId("closer").addEventListener("click", () => zoom(1.4));
byId("farther").addEventListener("click", () => zoom(1 / 1.4));
byId("fit").addEventListener("click", fit);
byId("outlines").addEventListener("change", (event) => view.classList.toggle("no-outlines", !event.target.checked));
byId("search").addEventListener("input", search);
addEventListener("resize", draw);

theme();
byId("changes").append(...DATA.changes.map(addChange));
byId("shapes").append(...entries.map(({ path }) => path));
fit();
