// The answer: the word under the pointer, or the word selected by a click, shows its attention overlay. `element` is gradio's component.
const WORD_MILLISECONDS = 420; // duration of a word in the animation
let selected = -1; // number of the selected word; -1: none
let timer = null; // of the animation, which shows one word after the other

const all = (selector) => [...element.querySelectorAll(selector)];
const words = () => all(".dc-word");

// Show the overlays of a word.
function show(number) {
  const pictures = element.querySelector(".dc-pictures");
  if (!pictures) return;
  const hasOverlay = all(".dc-heat").some((overlay) => Number(overlay.dataset.word) === number);
  pictures.classList.toggle("dc-with-attention", hasOverlay);
  for (const node of all("[data-word]")) node.classList.toggle("dc-on", Number(node.dataset.word) === number);
  for (const word of words()) word.setAttribute("aria-pressed", String(Number(word.dataset.word) === selected));
}

function stop() {
  clearInterval(timer);
  timer = null;
  for (const word of words()) word.classList.remove("dc-coming");
}

function play() {
  stop();
  const sentence = words();
  const result = element.querySelector(".dc-result");
  if (!sentence.length || !result) return;
  selected = Number(result.dataset.best);
  if (prefersReducedMotion()) return show(selected);
  for (const word of sentence) word.classList.add("dc-coming");
  let next = 0; // number of the next word
  const showNext = () => {
    if (next === sentence.length) {
      stop();
      const hovered = element.querySelector(".dc-word:hover");
      return show(hovered ? Number(hovered.dataset.word) : selected);
    }
    sentence[next].classList.remove("dc-coming");
    show(next++);
  };
  showNext();
  timer = setInterval(showNext, WORD_MILLISECONDS);
}

// Screen readers read this paragraph, the sentence only. If the answer were a live region, they would read all its numbers.
const announcement = document.createElement("p");
announcement.className = "dc-unseen";
announcement.setAttribute("role", "status");
document.body.append(announcement);

const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
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
  const newIndex = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: words().length - 1 }[event.key];
  if (event.key === "Escape") {
    stop();
    selected = -1;
    show(selected);
  }
  if (newIndex === undefined) return;
  event.preventDefault();
  stop();
  words()[newIndex]?.focus();
});

watch("value", () => {
  selected = -1;
  play();
  const sentence = element.querySelector(".dc-sentence");
  announcement.textContent = sentence?.getAttribute("aria-label") ?? sentence?.textContent ?? "";
  const behavior = prefersReducedMotion() ? "auto" : "smooth";
  element.querySelector(".dc-result, .dc-message")?.scrollIntoView({ behavior, block: "nearest" });
});
