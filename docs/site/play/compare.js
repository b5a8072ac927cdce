// The form, the data files and the viewer. compare.py puts `mountViewer` and `GRID` before this.

const results = new Map(); // key -> what a data file holds
const form = document.getElementById("form");
const about = document.getElementById("about");
const chosen = new Set(GRID.selected);
let viewer = null;

/** Data files call this: a script element loads them without a server, which fetch() cannot. */
globalThis.receiveResults = (key, value) => results.set(key, value);

function load(key) {
  if (results.has(key)) return Promise.resolve(results.get(key));
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${key}.js`;
    script.onload = () => resolve(results.get(key));
    script.onerror = () => reject(new Error(`data/${key}.js is missing: build the site again`));
    document.head.append(script);
  });
}

function fillSelect(name, options, value) {
  const select = form.elements[name];
  select.replaceChildren(...options.map(([key, text]) => new Option(text, key, false, String(key) === String(value))));
}

function fillMicrobatches(multiple) {
  const ranks = Number(form.elements.ranks.value);
  const options = GRID.microbatchesPerRank.map((times) => [ranks * times, ranks * times]);
  fillSelect("microbatches", options, ranks * multiple);
}

/** Timelines of the chosen schedules; the fastest of them is the best, as zeropipe.core.ranking has it. */
function selectTimelines({ common, timelines }) {
  const shown = [...chosen].filter((name) => name in timelines).map((name) => timelines[name]);
  const fastest = Math.min(...shown.map((timeline) => timeline.makespan));
  const ranked = shown.map((timeline) => ({
    ...timeline,
    standing: { fits: true, best: timeline.makespan <= fastest * (1 + 1e-9), ofBest: timeline.makespan / fastest },
  }));
  return { ...common, timelines: ranked.sort((a, b) => a.makespan - b.makespan) };
}

async function update() {
  const { ranks, microbatches, costs } = form.elements;
  const key = `${ranks.value}x${microbatches.value}-${costs.value}`;
  location.replace(`#${key},${[...chosen].join(",")}`);
  const found = await load(key);
  for (const button of document.querySelectorAll("#schedules button")) {
    button.setAttribute("aria-pressed", String(chosen.has(button.textContent)));
    const error = found.errors[button.textContent];
    button.disabled = Boolean(error);
    button.title = error ?? GRID.schedules[button.textContent] ?? "";
  }
  const data = selectTimelines(found);
  if (!data.timelines.length) {
    about.textContent = "Choose a schedule.";
    document.getElementById("viewer").hidden = true;
    return;
  }
  document.getElementById("viewer").hidden = false;
  if (viewer) await viewer.update(data);
  else viewer = mountViewer(document.getElementById("viewer"), data, { summary: true, themeButton: false });
}

function toggle(name) {
  if (!chosen.delete(name)) chosen.add(name);
  about.textContent = `${name}: ${GRID.schedules[name]}`;
  update();
}

function start() {
  const [, ranks, microbatches, costs, names] = /^#(\d+)x(\d+)-(\w+),?(.*)$/.exec(location.hash) ?? [];
  fillSelect("ranks", GRID.ranks.map((n) => [n, n]), ranks ?? 4);
  fillMicrobatches(microbatches ? microbatches / ranks : 2);
  fillSelect("costs", Object.entries(GRID.costs), costs ?? "equal");
  if (names) {
    chosen.clear();
    for (const name of names.split(",")) if (name in GRID.schedules) chosen.add(name);
  }
  const buttons = Object.keys(GRID.schedules).map((name) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
    button.addEventListener("click", () => toggle(name));
    return button;
  });
  document.getElementById("schedules").replaceChildren(...buttons);
  form.elements.ranks.addEventListener("change", () => fillMicrobatches(2));
  form.addEventListener("change", update);
  update().catch((error) => (about.textContent = error.message));
}

start();
