// The Plan page: a model, GPUs, memory and a batch -> a ranking, a chart, and the timeline of the selected row.

import { countText, percentText, timeText } from "/viewer/units.js";
import { mountViewer } from "/viewer/viewer.js";
import { LatestCall, RequestError, get } from "./api.js";
import { $, h, showMessage } from "./dom.js";
import { FileFields, fileMark, isEditable } from "./file_fields.js";
import { OWN_FILE, OwnFile } from "./own_file.js";
import { PlanChart, gigabytes } from "./plan_chart.js";
import { createRunFile } from "./run_file.js";
import { toggleTheme } from "./tools.js";

const NUMBERS = {
  gpus: ["GPUs", "16"], gpus_per_node: ["GPUs per machine", "8"], memory: ["Memory per GPU, GB", ""],
  batch: ["Batch, sequences", "128"], sequence: ["Tokens per sequence", "4096"],
  reserve: ["Reserve per GPU, GB", "", "4"], lora: ["LoRA rank", "", "all weights"], pp: ["Pipeline ranks", "", "all"], tp: ["Tensor parallel", "", "all"],
};
const CHOICES = { ac: ["", "none", "selective:op", "full"], dtype: ["", "float16", "float32"] }; // "": the server's default
const MEMORY = ["weights", "gradients", "optimizer", "activations", "workspace"];
const PARTS = { work: "work", recompute: "recomputation", exchange: "exchanges of experts", parts: "exchanges of attention", imbalance: "idle: imbalance", schedule: "idle: schedule", data: "gathers, reduces", optimizer: "optimizer" };
const ROW_FIELDS = ["pp", "dp_shard", "tp", "ep", "cp", "shard_cp", "sequence_parallel", "schedule", "stages_per_rank", "microbatches", "microbatch_size", "ac", "cut", "shards", "gradients", "slices", "offload", "checkpointing", "layers"];
const NUM_VISIBLE_ROWS = 10;
const state = Object.fromEntries(new URLSearchParams(location.search));
const planCall = new LatestCall("/api/plan");
const rowCall = new LatestCall("/api/plan/row");
const page = { viewer: null, request: null, timer: 0, fileFields: new FileFields() };

async function start() {
  $("theme").addEventListener("click", () => toggleTheme(page.viewer));
  const known = await get("/api/known");
  page.counted = new Set(known.counted);
  page.own = new OwnFile(known.max_file, selectOwnFile);
  if (state.file) await page.own.restore(state.file);
  createForm(known);
  page.chart = new PlanChart($("chart"), selectRow);
  $("memory-legend").append(...MEMORY.map((name) => h("span", {}, h("i", { className: `fill-${name}` }), name)));
  if (location.search) requestPlan();
}

function createForm({ models, gpus }) {
  const model = createSelect("model", "Model", Object.entries(models).map(([name, count]) => [name, modelTitle(name, count), page.counted.has(name)]), "qwen3-8b");
  const gpu = createSelect("gpu", "GPU", Object.entries(gpus).map(([name, size]) => [name, `${name}, ${size} GB`]), "h100");
  page.syncForm = () => { // after another choice of model or GPU
    const costs = $("in-model").value === OWN_FILE ? page.own.costs : null;
    page.fileFields.show(costs);
    const memory = costs ? costs.memory && Math.round(costs.memory / 1e8) / 10 : gpus[$("in-gpu").value];
    $("in-memory").placeholder = String(memory ?? (costs ? "like 80" : ""));
    showMessage($("error-memory"), "", $("in-memory"));
  };
  const box = h("input", { type: "checkbox", id: "in-compile", checked: state.compile !== "0" });
  $("form").append(model, page.own.createField(), gpu, createFields("gpus", "gpus_per_node"), createFields("memory", "reserve"), createFields("batch", "sequence"), createFields("lora"), createFields("pp", "tp"),
    createSelect("ac", "Checkpointing", CHOICES.ac.map((value) => [value, value || "several"]), ""),
    createSelect("dtype", "Data type", CHOICES.dtype.map((value) => [value, value || "bfloat16"]), ""),
    h("label", { className: "tick" }, box, "compiled (torch.compile)", fileMark("compile")),
    h("button", { type: "submit", className: "strong" }, "Plan"),
    h("p", { className: "note" }, "Costs are estimated from the model's shapes. ", h("code", {}, "zeropipe profile"), " measures them: open its costs.json here. ",
      h("code", {}, "zeropipe plan"), " also searches for schedules."));
  if (state.file) addOwnOption(state.file);
  for (const name of ["model", "gpu"]) $(`in-${name}`).addEventListener("change", page.syncForm);
  page.syncForm();
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    history.pushState(null, "", location.href); // so that "back" leads to the previous plan
    requestPlan();
  });
  window.addEventListener("popstate", () => location.reload());
}

const roundTo3 = (number) => Number(number.toPrecision(3)); // not 1.03e+3
const parametersText = (count) => (count < 1e8 ? `${roundTo3(count / 1e6)}M` : `${roundTo3(count / 1e9)}B`);
const modelTitle = (name, count) => (count ? `${name} (${parametersText(count)})` : name);

/** Add the user's file to the models, and select it. */
function addOwnOption(text) {
  const input = $("in-model");
  input.querySelector(`[value="${OWN_FILE}"]`)?.remove();
  input.prepend(h("option", { value: OWN_FILE }, text));
  input.value = OWN_FILE;
  page.syncForm();
}

function selectOwnFile() {
  addOwnOption(page.own.name);
  $("status").classList.remove("wrong");
  $("status").textContent = `${page.own.name} is chosen: press Plan.`;
}

function createSelect(name, label, options, defaultValue) {
  const selected = state[name] ?? defaultValue;
  if (!options.some(([value]) => value === selected)) options.unshift([selected, selected]); // of a link: the server refuses it
  const createOptions = (is) => options.filter(([, , isCounted]) => Boolean(isCounted) === is).map(([value, text]) => h("option", { value }, text));
  const counted = createOptions(true);
  const input = h("select", { id: `in-${name}` }, ...createOptions(false), counted.length ? h("optgroup", { label: "Layers are counted first (slower)" }, ...counted) : null);
  input.value = selected;
  return createField(name, label, input);
}

function createFields(...names) {
  return h("div", { className: "pair" }, ...names.map((name) => {
    const [label, defaultValue, placeholder = ""] = NUMBERS[name];
    return createField(name, label, h("input", { type: "text", inputMode: "decimal", id: `in-${name}`, value: state[name] ?? defaultValue, placeholder }));
  }));
}

function createField(name, label, input) {
  const error = h("p", { className: "error", id: `error-${name}`, role: "alert", hidden: true });
  return h("div", { className: "field" }, h("label", { htmlFor: input.id }, label, fileMark(name)), input, error);
}

/** The form as a request. A text that is not a number is sent as it is: the server refuses it. */
function readForm() {
  const own = $("in-model").value === OWN_FILE && page.own.file;
  const request = { ...(own ? { model: page.own.name, file: own.text } : { model: $("in-model").value }) };
  if (isEditable("gpu")) request.gpu = $("in-gpu").value;
  if (isEditable("compile")) request.compile = $("in-compile").checked;
  for (const name of Object.keys(NUMBERS).filter(isEditable)) {
    const text = $(`in-${name}`).value.trim();
    if (text !== "") request[name] = Number.isFinite(Number(text)) ? Number(text) : text;
  }
  for (const name of Object.keys(CHOICES)) if ($(`in-${name}`).value) request[name] = $(`in-${name}`).value;
  return request;
}

async function requestPlan() {
  const request = readForm();
  if (request.model === OWN_FILE) return showErrors([{ field: "model", message: `this link does not carry ${state.file}: open it, drop it or paste it` }]);
  const { model, file, ...fields } = request;
  if ("compile" in fields) fields.compile = fields.compile ? "1" : "0";
  const query = new URLSearchParams({ ...(file === undefined ? { model } : { file: model }), ...fields });
  history.replaceState(null, "", `?${query}${file === undefined ? "" : page.own.hash}`);
  rowCall.cancel();
  setBusy(true);
  const first = file !== undefined ? "Reading the file, then trying" : page.counted.has(model) ? "Counting its layers, then trying" : "Trying";
  $("status").textContent = `${first} layouts, schedules, microbatches and checkpointing`;
  const number = planCall.number + 1;
  try {
    const answer = await planCall.send(request);
    if (!answer) return;
    page.request = request;
    showErrors([]);
    showPlan(answer);
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    showErrors(error.errors);
  }
  if (number === planCall.number) setBusy(false);
}

/** Show that a request is running, and after two seconds for how long. */
function setBusy(busy) {
  $("results").setAttribute("aria-busy", String(busy));
  clearInterval(page.timer);
  $("since").hidden = true;
  if (!busy) return;
  const start = performance.now();
  page.timer = setInterval(() => {
    const seconds = Math.floor((performance.now() - start) / 1000);
    $("since").textContent = `${seconds} s so far; large models on many GPUs take minutes`;
    $("since").hidden = seconds < 2;
  }, 500);
}

/** Show each error beside its field, and the others above the results. */
function showErrors(errors) {
  const names = ["model", "gpu", ...Object.keys(NUMBERS), ...Object.keys(CHOICES)];
  const byField = errors.map(({ field, message }) => ({ field: field === "file" ? "model" : field, message }));
  for (const name of names) showMessage($(`error-${name}`), byField.find(({ field }) => field === name)?.message ?? "", $(`in-${name}`));
  const others = byField.filter(({ field }) => !names.includes(field));
  showMessage($("error-page"), others.map(({ message }) => message).join("\n"));
  $("status").classList.toggle("wrong", errors.length > 0);
  if (errors.length) $("status").textContent = `Not planned: ${errors[0].message}`;
}

function showPlan(answer) {
  const [best] = answer.rows;
  const own = $("in-model").querySelector(`[value="${OWN_FILE}"]`);
  if (page.request.file !== undefined && page.request.file === page.own.file.text) own.textContent = modelTitle(page.request.model, answer.parameters);
  $("planned").hidden = !best;
  const leftOut = answer.num_left_out ? ` (${answer.num_left_out.toLocaleString("en")} with more work left out)` : "";
  $("tried").textContent = `${answer.num_tried.toLocaleString("en")} tried${leftOut}, ${answer.num_fitting.toLocaleString("en")} fit into ${gigabytes(answer.memory_limit)} (${gigabytes(answer.memory_limit + answer.reserve)} − ${gigabytes(answer.reserve)} reserve)`;
  showUntried(answer);
  $("closest").hidden = Boolean(best) || !answer.closest;
  if (!best) {
    $("headline").textContent = `Nothing fits into ${gigabytes(answer.memory_limit)}`;
    $("status").textContent = answer.problem;
    if (answer.closest) showClosest(answer.closest);
    return;
  }
  $("headline").textContent = `${title(best)}: ${timeText(best.step_seconds, "s", 3)} a step`;
  const [misfit] = answer.misfits;
  $("misfit").textContent = misfit ? `Closest to fitting: ${misfit.text}, ${gigabytes(misfit.over, 2)} over.` : "";
  $("status").textContent = `${answer.source === "profile" ? "measured" : "estimated"} · ${Math.round(best.tokens_per_second_per_gpu).toLocaleString("en")} tokens/s per GPU · idle ${percentText(best.idle_fraction)} · ${gigabytes(best.peak_memory)}`;
  document.title = `${page.request.model} on ${page.request.gpus} · zeropipe`;
  const isPartial = answer.dots.length < answer.num_fitting;
  $("drawn").textContent = isPartial ? `the fastest ${answer.dots.length} that fit, and the front` : "all that fit";
  showTable(answer);
  page.chart.show(answer);
  selectRow(best);
}

/** Show what the plan did not try; each item says on its title how to have it. */
function showUntried({ not_tried: items, read_on: page }) {
  $("untried").hidden = !items.length;
  $("untried").replaceChildren("Not tried: ", ...items.flatMap(({ name, how }, n) => [n ? ", " : "", h("span", { title: how }, name)]), `: ${page}`);
}

/** Show the memory of the candidate that comes closest to fitting, and links to plans that fit. */
function showClosest({ row, ways_out: ways }) {
  $("closest-of").textContent = row.text;
  const links = ways.map(({ change, text, peak_memory: peak }) => {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(change)) query.set(name, value);
    const words = Object.entries(change).map(([name, value]) => `${(NUMBERS[name]?.[0] ?? name).toLowerCase()} ${value}`).join(", ");
    return h("li", {}, h("a", { href: `?${query}${location.hash}` }, words), `: ${text}, ${gigabytes(peak)}`);
  });
  $("about-closest").replaceChildren(list(Object.fromEntries(MEMORY.map((name) => [name, name])), row.memory, gigabytes, (name) => `fill-${name}`),
    links.length ? h("p", {}, "It fits with") : h("p", {}, "No change that was tried fits: more GPUs, shorter sequences."), h("ul", {}, ...links));
}

/** What a row has beside its mesh: parts of sequences, experts, slices, copies to the host. */
const extras = (row) => [row.sequence_parallel && "sp", row.cp > 1 && `cp${row.cp}`, row.cp_exchange && row.cp_exchange !== "heads" && row.cp_exchange,
  row.ep > 1 && `ep${row.ep}`, row.slices > 1 && `${row.slices} slices`, row.offload && "offload"].filter(Boolean);
const layout = (row) => [`${row.pp} × ${row.dp_shard} × ${row.tp}`, ...extras(row)].join(" ");
const checkpointing = (row) => (row.checkpointing ? `${Math.round(100 * row.checkpointed)}% of F` : row.ac);
const words = { sp: "sequence parallelism", offload: "copies to the host" };
const title = (row) => {
  const more = extras(row).map((text) => words[text] ?? text.replace(/^(cp|ep)/, "$1 "));
  return `${row.schedule}, pp ${row.pp} × dp ${row.dp_shard} × tp ${row.tp}${more.length ? ` with ${more.join(", ")}` : ""}`;
};

function showTable(answer) {
  const heads = [["", "text"], ["Schedule", "text"], ["pp × dp × tp", "text rare"], ["Microbatches", "rare"], ["Checkpointing", "text rare"], ["Step", ""],
    ["Tokens/s per GPU", "rare"], ["MFU", "rare"], ["Idle", "rare"], ["Memory", ""], ["", ""]];
  page.rows = new Map();
  const body = answer.rows.map((row, n) => {
    const cells = [
      h("td", { className: row.front ? "text front" : "text", title: row.front ? "No other is both faster and smaller" : "" }, row.front ? `${n + 1}•` : String(n + 1)),
      h("td", { className: "text" }, h("button", { type: "button" }, row.schedule), row.stages_per_rank > 1 ? h("small", {}, ` ×${row.stages_per_rank}`) : null,
        h("small", { className: "narrow" }, `${layout(row)}, ${checkpointing(row)}`)),
      h("td", { className: "text rare" }, layout(row)), h("td", { className: "rare" }, `${row.microbatches} × ${row.microbatch_size}`),
      h("td", { className: "text rare" }, checkpointing(row)), h("td", {}, timeText(row.step_seconds, "s", 3)), h("td", { className: "rare" }, Math.round(row.tokens_per_second_per_gpu).toLocaleString("en")),
      h("td", { className: "rare" }, row.mfu === null ? "–" : percentText(row.mfu)), h("td", { className: "rare", title: `bubble rate ${percentText(row.bubble)}` }, percentText(row.idle_fraction)),
      h("td", {}, gigabytes(row.peak_memory)), h("td", {}, memoryBar(row, answer.memory_limit)),
    ];
    const node = h("tr", { hidden: n >= NUM_VISIBLE_ROWS, onclick: () => selectRow(row) }, ...cells);
    page.rows.set(row, node);
    return node;
  });
  $("rows").replaceChildren(h("table", {}, h("caption", { className: "unseen" }, "Plans that fit, the fastest first"),
    h("thead", {}, h("tr", {}, ...heads.map(([text, kind]) => h("th", { scope: "col", className: kind }, text)))), h("tbody", {}, ...body)));
  showRows(false);
}

/** Show the first rows, or all of them. */
function showRows(all) {
  const nodes = [...page.rows.values()];
  nodes.forEach((node, n) => (node.hidden = !all && n >= NUM_VISIBLE_ROWS));
  $("more").hidden = nodes.length <= NUM_VISIBLE_ROWS;
  $("more").textContent = all ? "Show fewer" : `Show all ${nodes.length}`;
  $("more").onclick = () => showRows(!all);
}

/** A bar of the memory by use, as long as its share of the limit. */
function memoryBar(row, limit) {
  const text = MEMORY.map((name) => `${name} ${gigabytes(row.memory[name])}`).join(", ");
  return h("div", { className: "filling", role: "img", "aria-label": text, title: text },
    ...MEMORY.map((name) => h("i", { className: `fill-${name}`, style: `width:${((100 * row.memory[name]) / limit).toFixed(2)}%` })));
}

async function selectRow(row) {
  for (const [other, node] of page.rows) node.setAttribute("aria-selected", String(other === row));
  if (page.rows.get(row).hidden) showRows(true);
  page.chart.mark(row);
  showDetails(row);
  $("timeline-of").textContent = `${title(row)}, ${countText(row.microbatches, "microbatch")}; layers ${row.layers.join(", ")}`;
  try {
    const answer = await rowCall.send({ plan: page.request, ...Object.fromEntries(ROW_FIELDS.map((name) => [name, row[name]])) });
    if (!answer) return;
    showMessage($("error-page"), "");
    page.runFile.show(answer.run, answer.schedule, page.request.file === undefined ? "" : page.request.model);
    if (page.viewer) await page.viewer.update(answer.viewer);
    else page.viewer = mountViewer($("viewer"), answer.viewer, { summary: false });
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    showMessage($("error-page"), error.message);
  }
}

/** A list of values, each with a bar. */
function list(labels, values, text, classes) {
  const max = Math.max(...Object.keys(labels).map((name) => values[name])) || 1;
  return h("dl", {}, ...Object.entries(labels).filter(([name]) => values[name] > 0).flatMap(([name, label]) => [
    h("dt", {}, label), h("dd", {}, text(values[name])), h("div", { className: `line ${classes(name)}`, style: `width:${(100 * values[name]) / max}%` }),
  ]));
}

/** Show what the seconds of a step and the bytes of the fullest GPU are used for. */
function showDetails(row) {
  $("row-of").textContent = title(row);
  page.runFile = createRunFile();
  $("about-row").replaceChildren(
    h("p", {}, row.why || "The fastest plan that fits."),
    list(PARTS, row.seconds, (value) => timeText(value, "s", 3), () => "part-busy"),
    list(Object.fromEntries(MEMORY.map((name) => [name, name])), row.memory, gigabytes, (name) => `fill-${name}`),
    page.runFile.node);
}

start().catch((error) => {
  showMessage($("error-page"), `the page could not start: ${error.message}`);
  throw error;
});
