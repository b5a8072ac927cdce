// The form, the results and the viewer. compare.py puts `mountViewer`, `GRID`, `WORKER` and python.js before this.

const FIELDS = ["ranks", "microbatches", "f", "i", "w", "p2p", "memory_limit"];
const FIRST = { ranks: "4", microbatches: "8", f: "1", i: "1", w: "1", p2p: "0", memory_limit: "" };
const PAUSE = 250; // milliseconds without a key before numbers are simulated
const results = new Map(); // key -> what a data file holds
const form = document.getElementById("form");
const about = document.getElementById("about");
const state = document.getElementById("python");
const picture = document.getElementById("viewer");
const chosen = new Set(GRID.selected);
let viewer = null;
let askPython = null; // a function, once Python is loaded
let isLoading = GRID.python !== null;
let number = 0; // of the newest update: older ones show nothing

/** Data files call this: a script element loads them without a server, which fetch() cannot. */
globalThis.receiveResults = (key, value) => results.set(key, value);

async function load(key) {
  if (!results.has(key)) await loadScript(`data/${key}.js`);
  return results.get(key);
}

/** The key of a size and costs that were simulated when the site was built; null for others. */
function gridKey(fields) {
  const [ranks, microbatches] = [Number(fields.ranks), Number(fields.microbatches)];
  const hasSize = GRID.ranks.includes(ranks) && GRID.microbatchesPerRank.includes(microbatches / ranks);
  const costs = findCosts(fields);
  return hasSize && costs && !fields.memory_limit ? `${ranks}x${microbatches}-${costs}` : null;
}

function findCosts(fields) {
  const isSame = (costs) => ["f", "i", "w", "p2p"].every((name) => fields[name] !== "" && Number(fields[name]) === costs[name]);
  return Object.keys(GRID.costs).find((name) => isSame(GRID.costs[name]));
}

function readForm() {
  return Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value.trim()]));
}

/** The results of the fields, or the line that says why there are none. */
async function findResults(fields) {
  const key = gridKey(fields);
  if (key) return load(key);
  if (askPython) return askPython({ ...fields, schedules: [...chosen] });
  if (isLoading) return { error: `These numbers are simulated as soon as Python is loaded (${GRID.python.megabytes} MB).` };
  const times = GRID.microbatchesPerRank.join(", ");
  return { error: `Without Python this page has ${GRID.ranks.join(", ")} ranks with ${times} microbatches per rank, and the costs of the list. For other numbers: zeropipe compare.` };
}

/** Timelines of the chosen schedules; the fastest of those that fit is the best, as zeropipe.core.ranking has it. */
function selectTimelines({ common, timelines }) {
  const shown = [...chosen].filter((name) => name in timelines).map((name) => timelines[name]);
  const fits = (timeline) => !timeline.overLimit.length;
  const competing = shown.some(fits) ? shown.filter(fits) : shown;
  const fastest = Math.min(...competing.map((timeline) => timeline.makespan));
  const ranked = shown.map((timeline) => ({
    ...timeline,
    standing: { fits: fits(timeline), best: fits(timeline) && timeline.makespan <= fastest * (1 + 1e-9), ofBest: fastest > 0 ? timeline.makespan / fastest : 1 },
  }));
  return { ...common, timelines: ranked.sort((a, b) => fits(b) - fits(a) || a.makespan - b.makespan) };
}

async function update() {
  const fields = readForm();
  const own = ++number;
  form.elements.costs.value = findCosts(fields) ?? "";
  location.replace(`#${new URLSearchParams({ ...fields, schedules: [...chosen].join(",") })}`);
  for (const button of document.querySelectorAll("#schedules button")) {
    button.setAttribute("aria-pressed", String(chosen.has(button.textContent)));
  }
  picture.setAttribute("aria-busy", "true");
  const found = chosen.size ? await findResults(fields).catch((error) => ({ error: error.message })) : { error: "Choose a schedule." };
  if (own !== number) return;
  picture.setAttribute("aria-busy", "false");
  const data = found.error ? null : selectTimelines(found);
  about.textContent = found.error ?? [...chosen].filter((name) => name in found.errors).map((name) => found.errors[name]).join("; ");
  picture.hidden = !data?.timelines.length;
  if (picture.hidden) return;
  if (viewer) await viewer.update(data);
  else viewer = mountViewer(picture, data, { summary: true, themeButton: false });
}

function toggle(name) {
  if (!chosen.delete(name)) chosen.add(name);
  update();
}

function fillForm() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of FIELDS) form.elements[name].value = given.get(name) ?? FIRST[name];
  const costs = Object.entries(GRID.costs).map(([name, { text }]) => new Option(text, name));
  form.elements.costs.replaceChildren(...costs, new Option("your own", ""));
  if (given.get("schedules") !== null) {
    chosen.clear();
    for (const name of given.get("schedules").split(",")) if (name in GRID.schedules) chosen.add(name);
  }
  const buttons = Object.entries(GRID.schedules).map(([name, summary]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name, title: summary });
    button.addEventListener("click", () => toggle(name));
    return button;
  });
  document.getElementById("schedules").replaceChildren(...buttons);
}

function listen() {
  let timer = 0;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(update, PAUSE);
  });
  form.elements.costs.addEventListener("input", () => {
    const { text, ...costs } = GRID.costs[form.elements.costs.value] ?? {};
    for (const [name, value] of Object.entries(costs)) form.elements[name].value = value;
  });
}

/** Load Python when the first picture is there, then simulate what the form has by now. */
async function loadPython() {
  if (!GRID.python) {
    state.textContent = "This copy of the page was built without Python: it has a grid of sizes and costs.";
    return;
  }
  state.textContent = `Python is loading (${GRID.python.megabytes} MB); until then this page has a grid of sizes and costs.`;
  try {
    askPython = await startPython(GRID.python.files);
    state.textContent = "Any numbers: zeropipe runs in this browser.";
  } catch (error) {
    state.textContent = `Python does not start in this browser (${error.message}): this page has a grid of sizes and costs.`;
  }
  isLoading = false;
  state.dataset.ready = String(askPython !== null);
  if (!gridKey(readForm())) await update();
}

fillForm();
listen();
update().then(loadPython);
