// Filters, sorting and the list of pairs. The page first shows PAIRS_PER_STEP pairs.

const INDEX = JSON.parse(document.getElementById("index").textContent);
const COLORS = []; // of the systems
const PAIRS_PER_STEP = 60; // pairs that are shown at first, and with each press of "show more"
// `by` is the number of a system; -1: all systems.
const FILTERS = { types: new Set(), sort: "worst", by: -1, verdict: "all", text: "", attention: false, seed: 1 };
const BY_WORDS = INDEX.judged.by === "words";
const field = (id) => document.getElementById(id);
let listed = []; // numbers of the pairs that pass the filters, sorted
let shown = 0;

// A generator of random numbers from 0 to 1 (mulberry32).
function randomGenerator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const systems = () => (FILTERS.by < 0 ? INDEX.systems.map((_, system) => system) : [FILTERS.by]);
const meanScore = (pair) => systems().reduce((sum, system) => sum + pair.c[system], 0) / systems().length;
const rightShare = (pair) => systems().reduce((sum, system) => sum + (pair.o[system] ?? 0.5), 0) / systems().length;
const disagreement = (pair) =>
  Math.max(...pair.c) - Math.min(...pair.c) + (BY_WORDS && new Set(pair.o).size > 1 ? 10000 : 0);

function textOf(pair) {
  pair.text ??= [pair.id, ...[...pair.r, ...pair.s].map((text) => INDEX.texts[text])].join("\n").toLowerCase();
  return pair.text;
}

function matchesFilters(pair) {
  if (FILTERS.types.size && !FILTERS.types.has(pair.t)) return false;
  if (FILTERS.attention && pair.l === undefined) return false;
  const verdicts = systems().map((system) => pair.o[system]);
  if (FILTERS.verdict === "right" && !verdicts.every((verdict) => verdict === 1)) return false;
  if (FILTERS.verdict === "wrong" && !verdicts.some((verdict) => verdict === 0)) return false;
  if (FILTERS.verdict === "differ" && new Set(pair.o).size < 2) return false;
  return FILTERS.text.split(/\s+/).every((word) => textOf(pair).includes(word));
}

function sorted(numbers) {
  const random = randomGenerator(FILTERS.seed);
  const keys = {
    worst: (pair) => 10000 * rightShare(pair) + meanScore(pair),
    best: (pair) => -10000 * rightShare(pair) - meanScore(pair),
    differ: (pair) => -disagreement(pair),
    random: () => random(),
    unlike: (pair) => pair.v ?? 2, // pairs without an IoU are last
    given: () => 0,
  };
  const key = new Map(numbers.map((number) => [number, keys[FILTERS.sort](INDEX.pairs[number])]));
  return numbers.sort((a, b) => key.get(a) - key.get(b) || a - b);
}

function list() {
  const all = INDEX.pairs.map((_, number) => number);
  listed = sorted(all.filter((number) => matchesFilters(INDEX.pairs[number])));
  shown = 0;
  field("list").replaceChildren();
  const count = listed.length.toLocaleString("en"), total = INDEX.pairs.length.toLocaleString("en");
  field("count").textContent = listed.length ? `${count} of ${total} pairs` : "no pair passes the filters; remove one";
  showMore();
}

function showMore() {
  const cards = listed.slice(shown, shown + PAIRS_PER_STEP).map(cardOf);
  field("list").append(...cards);
  shown += cards.length;
  const rest = listed.length - shown;
  field("more").hidden = !rest;
  field("more").textContent = `show ${Math.min(rest, PAIRS_PER_STEP)} more (${shown.toLocaleString("en")} of ${listed.length.toLocaleString("en")} shown)`;
}

function fillSelect(id, entries, key) {
  field(id).append(...entries.map(([value, text]) => make("option", { value }, text)));
  field(id).addEventListener("change", (event) => {
    FILTERS[key] = key === "by" ? Number(event.target.value) : event.target.value;
    field("again").hidden = FILTERS.sort !== "random";
    list();
  });
}

function fillTypes() {
  const counts = INDEX.types.map((_, type) => INDEX.pairs.filter((pair) => pair.t === type).length);
  INDEX.types.forEach((name, type) => {
    const chip = make("button", { type: "button", class: "chip", "aria-pressed": "false" }, name, make("small", {}, counts[type].toLocaleString("en")));
    chip.addEventListener("click", () => {
      if (!FILTERS.types.delete(type)) FILTERS.types.add(type);
      chip.setAttribute("aria-pressed", String(FILTERS.types.has(type)));
      list();
    });
    field("types-wanted").append(chip);
  });
  field("types-wanted").hidden = !INDEX.types.length;
}

function fillFilters() {
  const hasSeveralSystems = INDEX.systems.length > 1;
  const sorts = [["worst", "worst first"], ["best", "best first"], ["random", "random"], ["given", "as in the dataset"]];
  if (hasSeveralSystems) sorts.splice(2, 0, ["differ", "largest disagreement"]);
  if (INDEX.pairs.some((pair) => pair.v !== undefined)) sorts.push(["unlike", "unlike viewpoints first"]);
  fillSelect("sort", sorts, "sort");
  fillSelect("by", [...(hasSeveralSystems ? [[-1, "all systems"]] : []), ...INDEX.systems.map(({ name }, system) => [system, name])], "by");
  FILTERS.by = Number(field("by").value);
  const verdicts = BY_WORDS ? [["right", "right"], ["wrong", "wrong"]] : [["right", "higher third"], ["wrong", "lower third"]];
  fillSelect("verdict", [["all", "all"], ...verdicts, ...(hasSeveralSystems ? [["differ", "where systems differ"]] : [])], "verdict");
  fillTypes();
  let timer;
  field("search").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => ((FILTERS.text = event.target.value.trim().toLowerCase()), list()), 120);
  });
  field("with-attention").addEventListener("change", (event) => ((FILTERS.attention = event.target.checked), list()));
  field("with-attention").closest("label").hidden = !INDEX.pairs.some((pair) => pair.l !== undefined);
  field("again").addEventListener("click", () => (FILTERS.seed++, list()));
  field("more").addEventListener("click", showMore);
  field("filters").addEventListener("submit", (event) => event.preventDefault());
  field("filters").hidden = false;
}

// Groups of tables: each table gets a button that shows it and hides the others.
function tabs() {
  for (const group of document.querySelectorAll(".tabs")) {
    const sections = [...group.querySelectorAll(":scope > .tab")];
    if (sections.length < 2) continue;
    const buttons = sections.map((section, position) => {
      const button = make("button", { type: "button", "aria-pressed": String(!position) }, section.dataset.tab);
      button.addEventListener("click", () => {
        sections.forEach((other) => (other.hidden = other !== section));
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      });
      section.hidden = Boolean(position);
      return button;
    });
    group.prepend(make("div", { class: "choice", role: "group", "aria-label": "which table" }, ...buttons));
  }
}

// The pair at the top of the page. The word with the highest attention is selected; words of more than three letters first.
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
fillFilters();
list();
