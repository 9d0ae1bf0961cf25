// The card of one pair: images, the caption of each system, references, and attention maps.
// Keys of a pair in INDEX.pairs: t type, v viewpoint IoU, b and a thumbnails, r references, s captions, c scores, o verdicts, x boxes,
// m outline of the mask, l attention maps; see `page_data` in page.py. Keys of maps: w words, g grid, b and a maps, m matches.

const SIDES = [["b", "before"], ["a", "after"]];
const blocks = new Map();
let colorTable; // RGBA values of the strengths 0 to 255

// Return item `number` of the blocks with the ids `kind`-0, `kind`-1, ... ("pictures" or "attention"). A block is parsed on first use.
function entryOf(kind, number) {
  const size = INDEX[kind], id = `${kind}-${Math.floor(number / size)}`;
  if (!blocks.has(id)) {
    const element = document.getElementById(id);
    blocks.set(id, JSON.parse(element.textContent));
    element.remove();
  }
  return blocks.get(id)[number % size];
}

function frameOf(pair, [key, side]) {
  const picture = entryOf("pictures", pair[key]);
  const frame = make("div", { class: "frame" });
  if (picture) {
    frame.style.aspectRatio = `${picture[0]} / ${picture[1]}`;
    const source = `data:image/webp;base64,${picture[2]}`;
    frame.append(make("img", { src: source, alt: `${side} the change, pair ${pair.id}`, decoding: "async", draggable: "false" }));
  } else frame.append(make("p", { class: "missing" }, "this image could not be read"));
  frame.append(make("canvas", { "aria-hidden": "true" }));
  if ("m" in pair) frame.append(make("img", { class: "outline", src: `data:image/webp;base64,${entryOf("pictures", pair.m)[2]}`, alt: "" }));
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
  if (INDEX.judged.by === "words") return { kind, mark, text };
  const third = { right: ["▲", "higher third"], wrong: ["▼", "lower third"], open: ["•", "middle third"] }[kind];
  return { kind, mark: third[0], text: third[1] };
}

function captionOf(card, pair, system, maps) {
  const { name, number } = INDEX.systems[system];
  const { kind, mark, text: verdict } = verdictOf(pair, system);
  const by = make(
    "div", { class: "by" },
    make("span", { class: "system" }, make("i", { class: "dot", style: { "--c": COLORS[number] } }), name),
    make("span", { class: "verdict" }, `${mark} ${verdict}`.trim()),
    make("span", { class: "score", title: "CIDEr-D x 100 of this pair" }, pair.c[system].toFixed(1)),
  );
  const words = make("p", { class: "words" });
  const text = INDEX.texts[pair.s[system]];
  if (maps) {
    words.setAttribute("role", "group");
    words.setAttribute("aria-label", `${name}: words, each shows its attention map`);
    words.append(...wordsOf(card, maps).flatMap((word) => [word, " "]));
    if (maps.w.length > 1) by.append(toolButton("▸", `play the words of ${name}`, (button) => play(card, words, button)));
    if (maps.m && maps.m.length) {
      const common = maps.m.filter((match) => match[5]).length;
      const summary = `${maps.m.length} positions matched between the images; ${common} shifted like most of them`;
      by.append(toolButton("⇄", `alignment by ${name}: ${summary}`, (button) => align(card, maps, button)));
    }
  } else words.append(text || "(empty caption)");
  return make("li", { class: kind }, by, words);
}

function toolButton(sign, label, press) {
  const button = make("button", { type: "button", class: "tool", title: label, "aria-label": label, "aria-pressed": "false" }, sign);
  button.addEventListener("click", () => press(button));
  return button;
}

function wordsOf(card, attention) {
  const maps = { b: bytesOf(attention.b), a: bytesOf(attention.a) };
  const [rows, columns] = attention.g;
  colorTable ??= bytesOf(INDEX.colors);
  return attention.w.map((text, index) => {
    const wordMaps = SIDES.map(([side]) => maps[side].subarray(index * rows * columns, (index + 1) * rows * columns));
    const peak = Math.max(...wordMaps.map((map) => Math.max(...map)));
    const color = `rgb(${colorTable.subarray(4 * peak, 4 * peak + 3)})`;
    const word = make("button", {
      type: "button", class: "word", tabindex: index ? "-1" : "0", "aria-pressed": "false", style: { "--heat": color, "--peak": (peak / 255).toFixed(2) },
    }, text);
    word.paint = () => SIDES.forEach((_, side) => paint(card.querySelectorAll("canvas")[side], wordMaps[side], rows, columns, colorTable));
    word.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(card, word));
    word.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(card, card.pinned));
    word.addEventListener("focus", () => show(card, word));
    word.addEventListener("blur", () => show(card, card.pinned));
    word.addEventListener("click", () => pin(card, card.pinned === word ? null : word));
    word.addEventListener("keydown", (event) => moveFocus(event, card, word));
    return word;
  });
}

// Show the attention map of a word; null: the images without a map.
function show(card, word) {
  for (const one of card.querySelectorAll(".word.shown")) one.classList.remove("shown");
  card.classList.toggle("with-attention", Boolean(word));
  if (!word) return;
  word.classList.add("shown");
  word.paint();
}

function pin(card, word) {
  if (card.pinned) card.pinned.setAttribute("aria-pressed", "false");
  card.pinned = word;
  if (word) word.setAttribute("aria-pressed", "true");
  show(card, word);
}

function moveFocus(event, card, word) {
  const words = [...word.parentElement.querySelectorAll(".word")];
  const index = words.indexOf(word);
  const goal = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: words.length - 1 }[event.key];
  if (event.key === "Escape") pin(card, null);
  if (goal === undefined || !words[goal]) return;
  event.preventDefault();
  word.tabIndex = -1;
  words[goal].tabIndex = 0;
  words[goal].focus();
}

// Show the words one after the other, until the last one or until the button is pressed again.
function play(card, group, button) {
  const words = [...group.querySelectorAll(".word")];
  const running = button.getAttribute("aria-pressed") === "true";
  for (const one of card.querySelectorAll(".tool[aria-pressed=true]")) if (one.textContent === "■") one.stop();
  if (running) return;
  let next = 0;
  const advance = () => (next < words.length && card.isConnected ? pin(card, words[next++]) : button.stop());
  const clock = setInterval(advance, 550);
  button.stop = () => {
    clearInterval(clock);
    button.textContent = "▸";
    button.setAttribute("aria-pressed", "false");
  };
  button.textContent = "■";
  button.setAttribute("aria-pressed", "true");
  advance();
}

// Show or hide the matches between the images.
function align(card, maps, button) {
  const isShown = button.getAttribute("aria-pressed") === "true";
  card.querySelector(".matches")?.remove();
  for (const one of card.querySelectorAll(".tool")) if (one.textContent === "⇄") one.setAttribute("aria-pressed", "false");
  if (isShown) return;
  const images = card.querySelector(".images"), origin = images.getBoundingClientRect();
  const frames = [...card.querySelectorAll(".frame")].map((frame) => {
    const { x, y, width, height } = frame.getBoundingClientRect();
    return { x: x - origin.x, y: y - origin.y, width, height };
  });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "matches");
  svg.setAttribute("viewBox", `0 0 ${origin.width} ${origin.height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", button.getAttribute("aria-label"));
  drawMatches(svg, maps.m, frames, maps.g[0]);
  images.append(svg);
  button.setAttribute("aria-pressed", "true");
}

// The card of pair `number`.
function cardOf(number) {
  const pair = INDEX.pairs[number], type = INDEX.types[pair.t];
  const card = make("article", { class: "card", "aria-label": `pair ${pair.id}` });
  const header = [type && make("span", { class: "type" }, type), make("span", { class: "id" }, pair.id)];
  if (pair.v !== undefined) header.push(make("span", { class: "iou", title: "viewpoint IoU" }, `IoU ${pair.v.toFixed(2)}`));
  card.append(make("header", {}, ...header.filter(Boolean)));
  if ("b" in pair) card.append(make("div", { class: "images" }, ...SIDES.map((side) => frameOf(pair, side))));
  const attention = pair.l === undefined ? [] : entryOf("attention", pair.l);
  card.append(make("ul", { class: "captions" }, ...INDEX.systems.map((_, system) => captionOf(card, pair, system, "b" in pair && attention[system]))));
  const [first, ...others] = pair.r.map((text) => INDEX.texts[text]);
  const references = make("div", { class: "references" }, make("p", {}, make("span", {}, "reference"), first));
  if (others.length) {
    references.append(make("details", {}, make("summary", {}, `${others.length} more`), ...others.map((text) => make("p", {}, text))));
  }
  card.append(references);
  return card;
}
