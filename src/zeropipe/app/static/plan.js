// The Plan page: a model, GPUs, memory and a batch -> a ranking, a chart, and the timeline of the chosen row.

import { countText, percentText, timeText } from "/viewer/units.js";
import { mountViewer } from "/viewer/viewer.js";
import { $, h, tell } from "./dom.js";
import { OWN, OwnFile } from "./own.js";
import { PlanChart, gigabytes } from "./planchart.js";
import { runFile } from "./runfile.js";
import { Said, isAsked, saidMark } from "./said.js";
import { toggleTheme } from "./tools.js";
import { Line, Refused, get } from "./wire.js";

const NUMBERS = {
  gpus: ["GPUs", "16"], gpus_per_node: ["GPUs of a machine", "8"], memory: ["Memory of a GPU, GB", ""],
  batch: ["Batch, sequences", "128"], sequence: ["Tokens of a sequence", "4096"],
};
const MEMORY = ["weights", "gradients", "optimizer", "activations", "workspace"];
const PARTS = { work: "work", recompute: "computing again", imbalance: "unequal ranks", bubble: "bubble", data: "gathers, reduces", optimizer: "optimizer" };
const ROW = ["pp", "dp_shard", "tp", "schedule", "stages_per_rank", "microbatches", "microbatch_size", "ac", "cut", "layers"];
const FIRST = 10; // rows in sight
const state = Object.fromEntries(new URLSearchParams(location.search));
const planLine = new Line("/api/plan");
const rowLine = new Line("/api/plan/row");
const page = { viewer: null, asked: null, clock: 0, said: new Said() };

async function start() {
  $("theme").addEventListener("click", () => toggleTheme(page.viewer));
  const known = await get("/api/known");
  page.counted = new Set(known.counted);
  page.own = new OwnFile(known.max_file, chooseOwn);
  if (state.file) await page.own.restore(state.file);
  makeForm(known);
  page.chart = new PlanChart($("chart"), choose);
  $("memory-legend").append(...MEMORY.map((name) => h("span", {}, h("i", { className: `fill-${name}` }), name)));
  if (location.search) ask();
}

function makeForm({ models, gpus }) {
  const model = select("model", "Model", Object.entries(models).map(([name, count]) => [name, titled(name, count), page.counted.has(name)]), "qwen3-8b");
  const gpu = select("gpu", "GPU", Object.entries(gpus).map(([name, size]) => [name, `${name}, ${size} GB`]), "h100");
  page.follow = () => { // the form, after another choice of model or GPU
    const costs = $("in-model").value === OWN ? page.own.costs : null;
    page.said.show(costs);
    const own = costs ? costs.memory && Math.round(costs.memory / 1e8) / 10 : gpus[$("in-gpu").value];
    $("in-memory").placeholder = String(own ?? (costs ? "like 80" : ""));
    tell($("error-memory"), "", $("in-memory"));
  };
  const box = h("input", { type: "checkbox", id: "in-compile", checked: state.compile !== "0" });
  $("form").append(model, page.own.field(), gpu, pair("gpus", "gpus_per_node"), pair("memory", "batch"), pair("sequence"),
    h("label", { className: "tick" }, box, "compiled (torch.compile)", saidMark("compile")),
    h("button", { type: "submit", className: "strong" }, "Plan"),
    h("p", { className: "note" }, "A model's costs are estimated from its shapes. ", h("code", {}, "zeropipe profile"), " measures them: open its costs.json here. ",
      h("code", {}, "zeropipe plan"), " searches for schedules too."));
  if (state.file) ownOption(state.file);
  for (const name of ["model", "gpu"]) $(`in-${name}`).addEventListener("change", page.follow);
  page.follow();
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    history.pushState(null, "", location.href); // so that "back" leads to the plan before
    ask();
  });
  window.addEventListener("popstate", () => location.reload());
}

const digits = (number) => Number(number.toPrecision(3)); // no 1.03e+3
const sized = (count) => (count < 1e8 ? `${digits(count / 1e6)}M` : `${digits(count / 1e9)}B`);
const titled = (name, count) => (count ? `${name} (${sized(count)})` : name);

/** The user's own among the models, and chosen. */
function ownOption(text) {
  const input = $("in-model");
  input.querySelector(`[value="${OWN}"]`)?.remove();
  input.prepend(h("option", { value: OWN }, text));
  input.value = OWN;
  page.follow();
}

function chooseOwn() {
  ownOption(page.own.name);
  $("status").classList.remove("wrong");
  $("status").textContent = `${page.own.name} is chosen: press Plan.`;
}

function select(name, label, options, normal) {
  const chosen = state[name] ?? normal;
  if (!options.some(([value]) => value === chosen)) options.unshift([chosen, chosen]); // of a link: the server says what is wrong
  const some = (is) => options.filter(([, , isCounted]) => Boolean(isCounted) === is).map(([value, text]) => h("option", { value }, text));
  const counted = some(true);
  const input = h("select", { id: `in-${name}` }, ...some(false), counted.length ? h("optgroup", { label: "Layers are counted first" }, ...counted) : null);
  input.value = chosen;
  return field(name, label, input);
}

function pair(...names) {
  return h("div", { className: "pair" }, ...names.map((name) => {
    const [label, normal] = NUMBERS[name];
    return field(name, label, h("input", { type: "text", inputMode: "decimal", id: `in-${name}`, value: state[name] ?? normal }));
  }));
}

function field(name, label, input) {
  const error = h("p", { className: "error", id: `error-${name}`, role: "alert", hidden: true });
  return h("div", { className: "field" }, h("label", { htmlFor: input.id }, label, saidMark(name)), input, error);
}

/** What the form says; a number that is none goes to the server as it is, which says what is wrong with it. */
function request() {
  const own = $("in-model").value === OWN && page.own.file;
  const asked = { ...(own ? { model: page.own.name, file: own.text } : { model: $("in-model").value }) };
  if (isAsked("gpu")) asked.gpu = $("in-gpu").value;
  if (isAsked("compile")) asked.compile = $("in-compile").checked;
  for (const name of Object.keys(NUMBERS).filter(isAsked)) {
    const text = $(`in-${name}`).value.trim();
    if (text !== "") asked[name] = Number.isFinite(Number(text)) ? Number(text) : text;
  }
  return asked;
}

async function ask() {
  const asked = request();
  if (asked.model === OWN) return refuse([{ field: "model", message: `this link does not carry ${state.file}: open it, drop it or paste it` }]);
  const { model, file, ...rest } = asked;
  if ("compile" in rest) rest.compile = rest.compile ? "1" : "0";
  const said = new URLSearchParams({ ...(file === undefined ? { model } : { file: model }), ...rest });
  history.replaceState(null, "", `?${said}${file === undefined ? "" : page.own.hash}`);
  rowLine.drop();
  busy(true);
  const first = file !== undefined ? "Reading the file, then trying" : page.counted.has(model) ? "Counting its layers, then trying" : "Trying";
  $("status").textContent = `${first} layouts, schedules, microbatches and checkpointing`;
  const turn = planLine.turn + 1;
  try {
    const answer = await planLine.ask(asked);
    if (!answer) return;
    page.asked = asked;
    refuse([]);
    show(answer);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    refuse(error.errors);
  }
  if (turn === planLine.turn) busy(false);
}

/** While an answer is on its way, and takes its time: for how long already. */
function busy(on) {
  $("results").setAttribute("aria-busy", String(on));
  clearInterval(page.clock);
  $("since").hidden = true;
  if (!on) return;
  const begun = performance.now();
  page.clock = setInterval(() => {
    const seconds = Math.floor((performance.now() - begun) / 1000);
    $("since").textContent = `${seconds} s so far; large models on many GPUs take minutes`;
    $("since").hidden = seconds < 2;
  }, 500);
}

/** Each error beside its field, the rest above the results, which stay as they were. */
function refuse(errors) {
  const names = ["model", "gpu", ...Object.keys(NUMBERS)];
  const placed = errors.map(({ field, message }) => ({ field: field === "file" ? "model" : field, message })); // told beside the model
  for (const name of names) tell($(`error-${name}`), placed.find((one) => one.field === name)?.message ?? "", $(`in-${name}`));
  const rest = placed.filter((one) => !names.includes(one.field));
  tell($("error-page"), rest.map((one) => one.message).join("\n"));
  $("status").classList.toggle("wrong", errors.length > 0);
  if (errors.length) $("status").textContent = `Not planned: ${errors[0].message}`;
}

function show(answer) {
  const [best] = answer.rows;
  const own = $("in-model").querySelector(`[value="${OWN}"]`);
  if (page.asked.file !== undefined && page.asked.file === page.own.file.text) own.textContent = titled(page.asked.model, answer.parameters);
  $("planned").hidden = !best;
  const left = answer.num_left_out ? ` (${answer.num_left_out.toLocaleString("en")} with more work left out)` : "";
  $("tried").textContent = `${answer.num_tried.toLocaleString("en")} tried${left}, ${answer.num_fitting.toLocaleString("en")} fit into ${gigabytes(answer.limit)}`;
  if (!best) {
    $("headline").textContent = "Nothing fits";
    $("status").textContent = answer.closest;
    return;
  }
  $("headline").textContent = `${title(best)}: ${timeText(best.step, "s", 3)} a step`;
  const [misfit] = answer.misfits;
  $("misfit").textContent = misfit ? `Closest to fitting: ${misfit.text}, ${gigabytes(misfit.over, 2)} over.` : "";
  $("status").textContent = `${answer.source === "profile" ? "measured" : "estimated"} · ${Math.round(best.speed).toLocaleString("en")} tokens/s per GPU · bubble ${percentText(best.bubble)} · ${gigabytes(best.peak)}`;
  document.title = `${page.asked.model} on ${page.asked.gpus} · zeropipe`;
  const some = answer.dots.length < answer.num_fitting;
  $("drawn").textContent = some ? `the fastest ${answer.dots.length} that fit, and the front` : "all that fit";
  table(answer);
  page.chart.show(answer);
  choose(best);
}

const layout = (row) => `${row.pp} × ${row.dp_shard} × ${row.tp}`;
const title = (row) => `${row.schedule}, pp ${row.pp} × dp ${row.dp_shard} × tp ${row.tp}`;

function table(answer) {
  const heads = [["", "text"], ["Schedule", "text"], ["pp × dp × tp", "text rare"], ["Microbatches", "rare"], ["Checkpointing", "text rare"], ["Step", ""],
    ["Tokens/s per GPU", "rare"], ["MFU", "rare"], ["Bubble", "rare"], ["Memory", ""], ["", ""]];
  page.rows = new Map();
  const body = answer.rows.map((row, n) => {
    const cells = [
      h("td", { className: row.front ? "text front" : "text", title: row.front ? "No other is both faster and smaller" : "" }, row.front ? `${n + 1}•` : String(n + 1)),
      h("td", { className: "text" }, h("button", { type: "button" }, row.schedule), row.stages_per_rank > 1 ? h("small", {}, ` ×${row.stages_per_rank}`) : null,
        h("small", { className: "narrow" }, `${layout(row)}, ${row.ac}`)),
      h("td", { className: "text rare" }, layout(row)), h("td", { className: "rare" }, `${row.microbatches} × ${row.microbatch_size}`),
      h("td", { className: "text rare" }, row.ac), h("td", {}, timeText(row.step, "s", 3)), h("td", { className: "rare" }, Math.round(row.speed).toLocaleString("en")),
      h("td", { className: "rare" }, row.mfu === null ? "–" : percentText(row.mfu)), h("td", { className: "rare" }, percentText(row.bubble)),
      h("td", {}, gigabytes(row.peak)), h("td", {}, filling(row, answer.limit)),
    ];
    const node = h("tr", { hidden: n >= FIRST, onclick: () => choose(row) }, ...cells);
    page.rows.set(row, node);
    return node;
  });
  $("rows").replaceChildren(h("table", {}, h("caption", { className: "unseen" }, "What fits, the fastest first"),
    h("thead", {}, h("tr", {}, ...heads.map(([text, kind]) => h("th", { scope: "col", className: kind }, text)))), h("tbody", {}, ...body)));
  showAll(false);
}

/** The first rows, or all of them. */
function showAll(all) {
  const nodes = [...page.rows.values()];
  nodes.forEach((node, n) => (node.hidden = !all && n >= FIRST));
  $("more").hidden = nodes.length <= FIRST;
  $("more").textContent = all ? "Show fewer" : `Show all ${nodes.length}`;
  $("more").onclick = () => showAll(!all);
}

/** What fills the memory, as long as its share of the limit. */
function filling(row, limit) {
  const said = MEMORY.map((name) => `${name} ${gigabytes(row.memory[name])}`).join(", ");
  return h("div", { className: "filling", role: "img", "aria-label": said, title: said },
    ...MEMORY.map((name) => h("i", { className: `fill-${name}`, style: `width:${((100 * row.memory[name]) / limit).toFixed(2)}%` })));
}

async function choose(row) {
  for (const [other, node] of page.rows) node.setAttribute("aria-selected", String(other === row));
  if (page.rows.get(row).hidden) showAll(true);
  page.chart.mark(row);
  about(row);
  $("timeline-of").textContent = `${title(row)}, ${countText(row.microbatches, "microbatch")}; layers ${row.layers.join(", ")}`;
  try {
    const answer = await rowLine.ask({ plan: page.asked, ...Object.fromEntries(ROW.map((name) => [name, row[name]])) });
    if (!answer) return;
    tell($("error-page"), "");
    page.run.give(answer.run, page.asked.file === undefined ? "" : page.asked.model);
    if (page.viewer) await page.viewer.update(answer.viewer);
    else page.viewer = mountViewer($("viewer"), answer.viewer, { summary: false });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    tell($("error-page"), error.message);
  }
}

/** Where the seconds of a step and the bytes of the fullest GPU go. */
function about(row) {
  const list = (names, values, text, classes) => {
    const most = Math.max(...Object.keys(names).map((name) => values[name])) || 1;
    return h("dl", {}, ...Object.entries(names).filter(([name]) => values[name] > 0).flatMap(([name, word]) => [
      h("dt", {}, word), h("dd", {}, text(values[name])), h("div", { className: `line ${classes(name)}`, style: `width:${(100 * values[name]) / most}%` }),
    ]));
  };
  $("row-of").textContent = title(row);
  page.run = runFile();
  $("about-row").replaceChildren(
    h("p", {}, row.why || "The fastest that fits."),
    list(PARTS, row.parts, (value) => timeText(value, "s", 3), () => "part-busy"),
    list(Object.fromEntries(MEMORY.map((name) => [name, name])), row.memory, gigabytes, (name) => `fill-${name}`),
    page.run.node);
}

start().catch((error) => {
  tell($("error-page"), `the page could not start: ${error.message}`);
  throw error;
});
