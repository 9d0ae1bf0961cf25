// A word that is pointed at, or selected by a click, shows its attention overlay.
const STEP = 420; // milliseconds per word in the animation
let selected = -1;
let timer = null;

const all = (selector) => [...element.querySelectorAll(selector)];
const words = () => all(".dc-word");

function show(number) {
  const pictures = element.querySelector(".dc-pictures");
  if (!pictures) return;
  const has = all(".dc-heat").some((layer) => Number(layer.dataset.word) === number);
  pictures.classList.toggle("dc-with-attention", has);
  for (const one of all("[data-word]")) one.classList.toggle("dc-on", Number(one.dataset.word) === number);
  for (const word of words()) word.setAttribute("aria-pressed", String(Number(word.dataset.word) === selected));
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
  selected = Number(result.dataset.best);
  if (reducedMotion()) return show(selected);
  for (const word of row) word.classList.add("dc-coming");
  let next = 0;
  const step = () => {
    if (next === row.length) {
      stop();
      const under = element.querySelector(".dc-word:hover"); // pointed at meanwhile
      return show(under ? Number(under.dataset.word) : selected);
    }
    row[next].classList.remove("dc-coming");
    show(next++);
  };
  step();
  timer = setInterval(step, STEP);
}

// Screen readers read the sentence only; the whole answer as a live region would be read with all its numbers.
const announcement = document.createElement("p");
announcement.className = "dc-unseen";
announcement.setAttribute("role", "status");
document.body.append(announcement);

const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const wordOf = (event) => event.target.closest?.(".dc-word");

element.addEventListener("click", (event) => {
  if (event.target.closest(".dc-play")) return play();
  const word = wordOf(event);
  if (!word) return;
  stop();
  const number = Number(word.dataset.word);
  selected = selected === number ? -1 : number;
  show(selected);
});
element.addEventListener("pointerover", (event) => {
  const word = wordOf(event);
  if (!word || event.pointerType === "touch" || timer) return;
  show(Number(word.dataset.word));
});
element.addEventListener("pointerout", (event) => {
  if (wordOf(event) && !timer) show(selected);
});
element.addEventListener("focusin", (event) => {
  const word = wordOf(event);
  if (word && !timer && word.matches(":focus-visible")) show(Number(word.dataset.word));
});
element.addEventListener("focusout", (event) => {
  if (wordOf(event) && !timer) show(selected);
});
element.addEventListener("keydown", (event) => {
  const word = wordOf(event);
  if (!word) return;
  const index = Number(word.dataset.word);
  const goal = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: words().length - 1 }[event.key];
  if (event.key === "Escape") {
    stop();
    selected = -1;
    show(selected);
  }
  if (goal === undefined) return;
  event.preventDefault();
  stop();
  words()[goal]?.focus();
});

watch("value", () => {
  selected = -1;
  play();
  const sentence = element.querySelector(".dc-sentence");
  announcement.textContent = sentence?.getAttribute("aria-label") ?? sentence?.textContent ?? "";
  const behavior = reducedMotion() ? "auto" : "smooth";
  element.querySelector(".dc-result, .dc-message")?.scrollIntoView({ behavior, block: "nearest" });
});
