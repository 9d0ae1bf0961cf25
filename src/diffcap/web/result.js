// Words and heat: a word that is pointed at, or held, shows where the captioner looked for it.
const STEP = 420; // milliseconds a word, when they come one by one
let held = -1;
let timer = null;

const all = (selector) => [...element.querySelectorAll(selector)];
const words = () => all(".dc-word");

function show(number) {
  const pictures = element.querySelector(".dc-pictures");
  if (!pictures) return;
  const has = all(".dc-heat").some((layer) => Number(layer.dataset.word) === number);
  pictures.classList.toggle("dc-looking", has);
  for (const one of all("[data-word]")) one.classList.toggle("dc-on", Number(one.dataset.word) === number);
  for (const word of words()) word.setAttribute("aria-pressed", String(Number(word.dataset.word) === held));
}

function stop() {
  clearInterval(timer);
  timer = null;
  for (const word of words()) word.classList.remove("dc-coming");
}

function play() {
  stop();
  const row = words();
  const result = element.querySelector(".dc-result");
  if (!row.length || !result) return;
  held = Number(result.dataset.best);
  if (calm()) return show(held);
  for (const word of row) word.classList.add("dc-coming");
  let next = 0;
  const step = () => {
    if (next === row.length) {
      stop();
      const under = element.querySelector(".dc-word:hover"); // pointed at meanwhile
      return show(under ? Number(under.dataset.word) : held);
    }
    row[next].classList.remove("dc-coming");
    show(next++);
  };
  step();
  timer = setInterval(step, STEP);
}

// What came is read out, where somebody listens; the answer itself would be, with every number in it.
const spoken = document.createElement("p");
spoken.className = "dc-unseen";
spoken.setAttribute("role", "status");
document.body.append(spoken);

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const wordOf = (event) => event.target.closest?.(".dc-word");

element.addEventListener("click", (event) => {
  if (event.target.closest(".dc-play")) return play();
  const word = wordOf(event);
  if (!word) return;
  stop();
  const number = Number(word.dataset.word);
  held = held === number ? -1 : number;
  show(held);
});
element.addEventListener("pointerover", (event) => {
  const word = wordOf(event);
  if (!word || event.pointerType === "touch" || timer) return;
  show(Number(word.dataset.word));
});
element.addEventListener("pointerout", (event) => {
  if (wordOf(event) && !timer) show(held);
});
element.addEventListener("focusin", (event) => {
  const word = wordOf(event);
  if (word && !timer && word.matches(":focus-visible")) show(Number(word.dataset.word));
});
element.addEventListener("focusout", (event) => {
  if (wordOf(event) && !timer) show(held);
});
element.addEventListener("keydown", (event) => {
  const word = wordOf(event);
  if (!word) return;
  const place = Number(word.dataset.word);
  const goal = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: words().length - 1 }[event.key];
  if (event.key === "Escape") {
    stop();
    held = -1;
    show(held);
  }
  if (goal === undefined) return;
  event.preventDefault();
  stop();
  words()[goal]?.focus();
});

watch("value", () => {
  held = -1;
  play();
  const said = element.querySelector(".dc-sentence");
  spoken.textContent = said?.getAttribute("aria-label") ?? said?.textContent ?? "";
  const behavior = calm() ? "auto" : "smooth";
  element.querySelector(".dc-result, .dc-message")?.scrollIntoView({ behavior, block: "nearest" });
});
