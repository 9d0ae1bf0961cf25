// One pair: its pictures, what each system said of it, the references, and where a word looked.

const SIDES = [["b", "before"], ["a", "after"]];
const blocks = new Map();

// Entry `number` of the blocks called `kind`-0, `kind`-1, ...; a block is read when it is first asked for.
function entryOf(kind, number) {
  const size = INDEX[kind], id = `${kind}-${Math.floor(number / size)}`;
  if (!blocks.has(id)) {
    const element = document.getElementById(id);
    blocks.set(id, JSON.parse(element.textContent));
    element.remove();
  }
  return blocks.get(id)[number % size];
}

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

function frameOf(pair, [key, side]) {
  const picture = entryOf("pictures", pair[key]);
  const frame = make("div", { class: "frame" });
  if (picture) {
    frame.style.aspectRatio = `${picture[0]} / ${picture[1]}`;
    const source = `data:image/webp;base64,${picture[2]}`;
    frame.append(make("img", { src: source, alt: `${side} the change, pair ${pair.id}`, decoding: "async", draggable: "false" }));
  } else frame.append(make("p", { class: "lost" }, "this picture could not be read"));
  frame.append(make("canvas", { "aria-hidden": "true" }));
  const box = pair.x && pair.x[key];
  if (box) {
    const [left, top, width, height] = box.map((value) => `${100 * value}%`);
    frame.append(make("div", { class: "box", style: { left, top, width, height } }));
  }
  return make("figure", {}, frame, make("figcaption", {}, side));
}

function verdictOf(pair, system) {
  const verdict = pair.o[system];
  const [kind, mark, text] = verdict === 1 ? ["right", "✓", "right"] : verdict === 0 ? ["wrong", "✗", "wrong"] : ["open", "", ""];
  const said = INDEX.judged.by === "words" ? text : { right: "higher third", wrong: "lower third", open: "middle third" }[kind];
  return { kind, mark: INDEX.judged.by === "words" ? mark : { right: "▲", wrong: "▼", open: "•" }[kind], said };
}

function saidBy(card, pair, system, look) {
  const { name, number } = INDEX.systems[system];
  const { kind, mark, said } = verdictOf(pair, system);
  const by = make(
    "div", { class: "by" },
    make("span", { class: "system" }, make("i", { class: "dot", style: { "--c": COLORS[number] } }), name),
    make("span", { class: "verdict" }, `${mark} ${said}`.trim()),
    make("span", { class: "score", title: "CIDEr-D x 100 of this pair" }, pair.c[system].toFixed(1)),
  );
  const words = make("p", { class: "words" });
  const text = INDEX.texts[pair.s[system]];
  if (look) {
    words.setAttribute("role", "group");
    words.setAttribute("aria-label", `${name}: words, each shows where it looked`);
    words.append(...wordsOf(card, look).flatMap((word) => [word, " "]));
    if (look.w.length > 1) by.append(toolOf("▸", `play the words of ${name}`, (button) => play(card, words, button)));
    if (look.m && look.m.length) {
      const surely = look.m.filter((match) => match[5]).length;
      const told = `${look.m.length} places of the first image found again in the second; ${surely} moved as most did`;
      by.append(toolOf("⇄", `alignment by ${name}: ${told}`, (button) => align(card, look, button)));
    }
  } else words.append(text || "(nothing)");
  return make("li", { class: kind }, by, words);
}

function toolOf(sign, label, press) {
  const button = make("button", { type: "button", class: "tool", title: label, "aria-label": label, "aria-pressed": "false" }, sign);
  button.addEventListener("click", () => press(button));
  return button;
}

function wordsOf(card, look) {
  const maps = { b: bytesOf(look.b), a: bytesOf(look.a) };
  const [rows, columns] = look.g;
  return look.w.map((text, place) => {
    const at = SIDES.map(([side]) => maps[side].subarray(place * rows * columns, (place + 1) * rows * columns));
    const peak = Math.max(...at.map((map) => Math.max(...map))) / 255;
    const color = `rgb(${colormap(peak, INDEX.overlay.colors).map(Math.round)})`;
    const word = make("button", {
      type: "button", class: "word", tabindex: place ? "-1" : "0", "aria-pressed": "false", style: { "--heat": color, "--peak": peak.toFixed(2) },
    }, text);
    word.look = () => SIDES.forEach((_, side) => paint(card.querySelectorAll("canvas")[side], at[side], rows, columns, INDEX.overlay));
    word.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(card, word));
    word.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(card, card.pinned));
    word.addEventListener("focus", () => show(card, word));
    word.addEventListener("blur", () => show(card, card.pinned));
    word.addEventListener("click", () => pin(card, card.pinned === word ? null : word));
    word.addEventListener("keydown", (event) => step(event, card, word));
    return word;
  });
}

// Show where a word looked; null: the pictures as they are.
function show(card, word) {
  for (const one of card.querySelectorAll(".word.shown")) one.classList.remove("shown");
  card.classList.toggle("looking", Boolean(word));
  if (!word) return;
  word.classList.add("shown");
  word.look();
}

function pin(card, word) {
  if (card.pinned) card.pinned.setAttribute("aria-pressed", "false");
  card.pinned = word;
  if (word) word.setAttribute("aria-pressed", "true");
  show(card, word);
}

function step(event, card, word) {
  const words = [...word.parentElement.querySelectorAll(".word")];
  const place = words.indexOf(word);
  const goal = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: words.length - 1 }[event.key];
  if (event.key === "Escape") pin(card, null);
  if (goal === undefined || !words[goal]) return;
  event.preventDefault();
  word.tabIndex = -1;
  words[goal].tabIndex = 0;
  words[goal].focus();
}

// The words one after the other, until they are through or the button is pressed again.
function play(card, group, button) {
  const words = [...group.querySelectorAll(".word")];
  const running = button.getAttribute("aria-pressed") === "true";
  for (const one of card.querySelectorAll(".tool[aria-pressed=true]")) if (one.textContent === "■") one.stop();
  if (running) return;
  let place = 0;
  const turn = () => (place < words.length && card.isConnected ? pin(card, words[place++]) : button.stop());
  const clock = setInterval(turn, 550);
  button.stop = () => {
    clearInterval(clock);
    button.textContent = "▸";
    button.setAttribute("aria-pressed", "false");
  };
  button.textContent = "■";
  button.setAttribute("aria-pressed", "true");
  turn();
}

function align(card, look, button) {
  const on = button.getAttribute("aria-pressed") === "true";
  card.querySelector(".matches")?.remove();
  for (const one of card.querySelectorAll(".tool")) if (one.textContent === "⇄") one.setAttribute("aria-pressed", "false");
  if (on) return;
  const place = card.querySelector(".images"), origin = place.getBoundingClientRect();
  const frames = [...card.querySelectorAll(".frame")].map((frame) => {
    const { x, y, width, height } = frame.getBoundingClientRect();
    return { x: x - origin.x, y: y - origin.y, width, height };
  });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "matches");
  svg.setAttribute("viewBox", `0 0 ${origin.width} ${origin.height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", button.getAttribute("aria-label"));
  drawMatches(svg, look.m, frames, look.g[0]);
  place.append(svg);
  button.setAttribute("aria-pressed", "true");
}

// The card of pair `number`.
function cardOf(number) {
  const pair = INDEX.pairs[number], type = INDEX.types[pair.t];
  const card = make("article", { class: "card", "aria-label": `pair ${pair.id}` });
  const facts = [type && make("span", { class: "type" }, type), make("span", { class: "id" }, pair.id)];
  if (pair.v !== undefined) facts.push(make("span", { class: "iou", title: "viewpoint IoU" }, `IoU ${pair.v.toFixed(2)}`));
  card.append(make("header", {}, ...facts.filter(Boolean)));
  if ("b" in pair) card.append(make("div", { class: "images" }, ...SIDES.map((side) => frameOf(pair, side))));
  const looks = pair.l === undefined ? [] : entryOf("looks", pair.l);
  card.append(make("ul", { class: "said" }, ...INDEX.systems.map((_, system) => saidBy(card, pair, system, "b" in pair && looks[system]))));
  const [first, ...others] = pair.r.map((text) => INDEX.texts[text]);
  const references = make("div", { class: "references" }, make("p", {}, make("span", {}, "reference"), first));
  if (others.length) {
    references.append(make("details", {}, make("summary", {}, `${others.length} more`), ...others.map((text) => make("p", {}, text))));
  }
  card.append(references);
  return card;
}
