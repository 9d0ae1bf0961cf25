// Filters, order and the list itself, of which only what is near the screen exists as elements.

const INDEX = JSON.parse(document.getElementById("index").textContent);
const COLORS = [];
const AT_ONCE = 12; // cards in a sheet
const WISHES = { types: new Set(), sort: "worst", by: -1, verdict: "all", text: "", looks: false, seed: 1 };
const WORDS = INDEX.judged.by === "words";
const field = (id) => document.getElementById(id);

// Numbers from 0 to 1 that come again with the same seed (mulberry32).
function chance(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const chosen = () => (WISHES.by < 0 ? INDEX.systems.map((_, system) => system) : [WISHES.by]);
const meanScore = (pair) => chosen().reduce((sum, system) => sum + pair.c[system], 0) / chosen().length;
const rightShare = (pair) => chosen().reduce((sum, system) => sum + (pair.o[system] ?? 0.5), 0) / chosen().length;
const dispute = (pair) =>
  Math.max(...pair.c) - Math.min(...pair.c) + (WORDS && new Set(pair.o).size > 1 ? 10000 : 0);

function textOf(pair) {
  pair.text ??= [pair.id, ...[...pair.r, ...pair.s].map((text) => INDEX.texts[text])].join("\n").toLowerCase();
  return pair.text;
}

function isWanted(pair) {
  if (WISHES.types.size && !WISHES.types.has(pair.t)) return false;
  if (WISHES.looks && pair.l === undefined) return false;
  const verdicts = chosen().map((system) => pair.o[system]);
  if (WISHES.verdict === "right" && !verdicts.every((one) => one === 1)) return false;
  if (WISHES.verdict === "wrong" && !verdicts.some((one) => one === 0)) return false;
  if (WISHES.verdict === "differ" && new Set(pair.o).size < 2) return false;
  return WISHES.text.split(/\s+/).every((word) => textOf(pair).includes(word));
}

function ordered(numbers) {
  const random = chance(WISHES.seed);
  const keys = {
    worst: (pair) => 10000 * rightShare(pair) + meanScore(pair),
    best: (pair) => -10000 * rightShare(pair) - meanScore(pair),
    differ: (pair) => -dispute(pair),
    random: () => random(),
    unlike: (pair) => pair.v ?? 2,
    given: () => 0,
  };
  const key = new Map(numbers.map((number) => [number, keys[WISHES.sort](INDEX.pairs[number])]));
  return numbers.sort((a, b) => key.get(a) - key.get(b) || a - b);
}

// A sheet's cards come when it nears the screen and go when it is far; its height stays.
let typicalHeight = 0;
const near = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !target.firstChild) {
        target.append(...target.numbers.map(cardOf));
        target.style.minHeight = "";
        typicalHeight = target.offsetHeight || typicalHeight;
      } else if (!isIntersecting && target.firstChild && !target.contains(document.activeElement)) {
        target.style.minHeight = `${target.offsetHeight}px`;
        target.replaceChildren();
      }
    }
  },
  { rootMargin: "1200px 0px" },
);

function list() {
  near.disconnect();
  const numbers = ordered(INDEX.pairs.map((_, number) => number).filter((number) => isWanted(INDEX.pairs[number])));
  const sheets = [];
  for (let start = 0; start < numbers.length; start += AT_ONCE) {
    const sheet = make("div", { class: "sheet" });
    sheet.numbers = numbers.slice(start, start + AT_ONCE);
    sheet.style.minHeight = `${typicalHeight || 1600}px`;
    sheets.push(sheet);
  }
  field("list").replaceChildren(...sheets);
  sheets.forEach((sheet) => near.observe(sheet));
  const all = INDEX.pairs.length.toLocaleString("en");
  field("count").textContent = numbers.length ? `${numbers.length.toLocaleString("en")} of ${all} pairs` : "no pair is like that; take a filter away";
}

function choices(id, entries, key) {
  field(id).append(...entries.map(([value, text]) => make("option", { value }, text)));
  field(id).addEventListener("change", (event) => {
    WISHES[key] = key === "by" ? Number(event.target.value) : event.target.value;
    field("again").hidden = WISHES.sort !== "random";
    list();
  });
}

function chips() {
  const counts = INDEX.types.map((_, type) => INDEX.pairs.filter((pair) => pair.t === type).length);
  INDEX.types.forEach((name, type) => {
    const chip = make("button", { type: "button", class: "chip", "aria-pressed": "false" }, name, make("small", {}, counts[type].toLocaleString("en")));
    chip.addEventListener("click", () => {
      if (!WISHES.types.delete(type)) WISHES.types.add(type);
      chip.setAttribute("aria-pressed", String(WISHES.types.has(type)));
      list();
    });
    field("types-wanted").append(chip);
  });
  field("types-wanted").hidden = !INDEX.types.length;
}

function filters() {
  const several = INDEX.systems.length > 1;
  const sorts = [["worst", "worst first"], ["best", "best first"], ["random", "random"], ["given", "as in the dataset"]];
  if (several) sorts.splice(2, 0, ["differ", "largest disagreement"]);
  if (INDEX.pairs.some((pair) => pair.v !== undefined)) sorts.push(["unlike", "unlike viewpoints first"]);
  choices("sort", sorts, "sort");
  choices("by", [...(several ? [[-1, "all systems"]] : []), ...INDEX.systems.map(({ name }, system) => [system, name])], "by");
  WISHES.by = Number(field("by").value);
  const verdicts = WORDS ? [["right", "right"], ["wrong", "wrong"]] : [["right", "higher third"], ["wrong", "lower third"]];
  choices("verdict", [["all", "all"], ...verdicts, ...(several ? [["differ", "where systems differ"]] : [])], "verdict");
  chips();
  let waiting;
  field("search").addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => ((WISHES.text = event.target.value.trim().toLowerCase()), list()), 120);
  });
  field("with-looks").addEventListener("change", (event) => ((WISHES.looks = event.target.checked), list()));
  field("with-looks").closest("label").hidden = !INDEX.pairs.some((pair) => pair.l !== undefined);
  field("again").addEventListener("click", () => (WISHES.seed++, list()));
  field("filters").addEventListener("submit", (event) => event.preventDefault());
  field("filters").hidden = false;
  field("judged").textContent = WORDS
    ? "Right: the type of change and the words for the changed object (in the box); where it stands is not checked. Point at a word, or tap it, to see where it looked. The number is the CIDEr-D of the pair x 100."
    : `Coloured by the CIDEr-D of the pair x 100: the higher third of all captions from ${INDEX.judged.high}, the lower third up to ${INDEX.judged.low}. Point at a word, or tap it, to see where it looked.`;
}

// Tables of which one is shown.
function tabs() {
  for (const group of document.querySelectorAll(".tabs")) {
    const sections = [...group.querySelectorAll(":scope > .tab")];
    if (sections.length < 2) continue;
    const buttons = sections.map((section, place) => {
      const button = make("button", { type: "button", "aria-pressed": String(!place) }, section.dataset.tab);
      button.addEventListener("click", () => {
        sections.forEach((one) => (one.hidden = one !== section));
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
      });
      section.hidden = Boolean(place);
      return button;
    });
    group.prepend(make("div", { class: "choice", role: "group", "aria-label": "which table" }, ...buttons));
  }
}

function theme() {
  const dark = () => document.documentElement.dataset.theme === "dark";
  const remembered = () => { try { return localStorage.getItem("diffcap-theme"); } catch { return null; } };
  document.documentElement.dataset.theme =
    remembered() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  field("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("diffcap-theme", document.documentElement.dataset.theme); } catch { /* a page of its own */ }
  });
}

// The pair at the head of the page, with the longer word pinned that looked at the fewest places.
function feature() {
  if (INDEX.featured === null) return;
  const card = cardOf(INDEX.featured);
  field("featured").append(card);
  const rank = (word) => Number(word.style.getPropertyValue("--peak")) + (word.textContent.length > 3 ? 1 : 0);
  const words = [...card.querySelectorAll(".word")].sort((a, b) => rank(b) - rank(a));
  if (words.length) pin(card, words[0]);
}

theme();
tabs();
COLORS.push(...document.body.dataset.colors.split(" "));
feature();
filters();
list();
