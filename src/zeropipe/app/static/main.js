// The Compare page: state -> address and requests; answers -> table, chart and timelines.

import { mountViewer } from "/viewer/viewer.js";
import { LatestCall, RequestError, get } from "./api.js";
import { Cards, paletteRules } from "./cards.js";
import { Chart } from "./chart.js";
import { $, debounce, h, showMessage } from "./dom.js";
import { createFormatButtons, closeMenusOutside, downloadFile } from "./downloads.js";
import { acceptDrops, createPasteDialog, packFiles, unpackFiles, upload } from "./files.js";
import { FoldedPanel } from "./fold.js";
import { Form, perText } from "./form.js";
import { headline } from "./headline.js";
import { SearchDialog } from "./search.js";
import { StagesDialog } from "./stages.js";
import { choiceRequest, createChoice, parseAddress, parseValue, replaceCosts, sizeRequest, toAddress } from "./state.js";
import { Table } from "./table.js";
import { createTabs } from "./tabs.js";
import { copyCosts, copyLink, toggleTheme } from "./tools.js";
import { syncView } from "./view.js";

const PASTE = { title: "Paste a costs file", button: "Use these costs",
  about: ["TOML or JSON, as for ", h("code", {}, "zeropipe simulate --costs"), ". It replaces all costs."],
  placeholder: 'f = [1.0, 1.0, 1.2, 1.4]\ni = 1.1\nw = 0.9\np2p = 0.05\nmemory_limit = 6\n\nor the same as JSON: {"f": [1, 1, 1.2, 1.4]}' };
const REQUEST_DELAY_MS = 90; // after the last change
const ADDRESS_DELAY_MS = 60;
const state = parseAddress(location.search);
const simulateCall = new LatestCall("/api/simulate");
const chartCall = new LatestCall("/api/chart");
const page = { results: [], viewer: null, chartKey: "" };

async function start() {
  closeMenusOutside();
  $("theme").addEventListener("click", () => toggleTheme(page.viewer));
  const [catalog, files] = await Promise.all([get("/api/schedules"), unpackFiles(location.hash)]);
  state.files = files;
  page.maxFileBytes = catalog.max_file_bytes;
  document.head.append(h("style", {}, paletteRules(catalog.palette)));
  const schedules = new Map(catalog.schedules.map((schedule) => [schedule.name, schedule]));
  page.cards = new Cards($("cards"), $("about"), catalog.schedules, toggleSchedule);
  page.panel = new FoldedPanel($("panel"), $("fold"));
  page.stages = new StagesDialog($("stages"), state, update);
  const paste = createPasteDialog($("paste"), PASTE, async (text) => {
    const { costs } = await upload(text.trim().startsWith("{") ? "costs.json" : "costs.toml", text);
    setCosts(costs);
  });
  page.form = new Form($("form"), $("costs"), state, update, {
    perStage: () => page.stages.open(commonStagesPerRank()), paste, copy: () => copyCosts(state), reset: () => setCosts({}),
  });
  page.table = new Table($("compare"), schedules, { update, selectSchedules, removeChoice, addVariant, addSimulation, useTimes, download, showTimeline: (n) => page.viewer?.goTo(n) });
  page.chart = new Chart($("chart"), toggleSchedule);
  page.selectTab = createTabs(document.querySelector('[role="tablist"]'));
  $("download-sheet").replaceWith(createFormatButtons((format) => {
    $("download").open = false;
    download(format, null);
  }));
  const search = new SearchDialog($("search"), () => sizeRequest(state), addFound);
  $("open-search").addEventListener("click", () => search.open());
  $("share").addEventListener("click", () => copyLink(state, usedFiles()));
  $("choose-file").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => openFiles([...$("file").files]).then(() => ($("file").value = "")));
  acceptDrops($("dropping"), openFiles);
  await Promise.all(Object.entries(files).map(([name, file]) => uploadFile(name, file).catch(() => null)));
  showState();
  requestAll();
}

/** The state has changed: show it, write it to the address, and request new results. */
function update() {
  showState();
  writeAddress();
  setBusy(true);
  simulateCall.cancel();
  requestSoon();
}

function showState() {
  page.table.arrange(state.schedules);
  page.cards.mark(state.schedules.filter((choice) => !choice.file).map((choice) => choice.name));
  const { numChanged } = page.form;
  $("costs-set").hidden = !numChanged;
  $("costs-set").textContent = numChanged;
  page.panel.showCounts(state.schedules.length, numChanged);
  page.form.sync();
}

const requestSoon = debounce(requestAll, REQUEST_DELAY_MS);
const writeAddress = debounce(async () => history.replaceState(null, "", toAddress(state) + (await packFiles(usedFiles()))), ADDRESS_DELAY_MS);

function usedFiles() {
  return Object.fromEntries(Object.entries(state.files).filter(([name]) => state.schedules.some(({ file }) => file === name)));
}

/** Request the comparison and the chart; each is shown when its answer arrives. */
async function requestAll() {
  setBusy(true);
  await Promise.all([requestResults(), requestChart()]);
}

async function requestResults(mayResend = true) {
  const choices = [...state.schedules];
  if (!choices.length) {
    simulateCall.cancel();
    page.results = [];
    page.form.showErrors([]);
    setBusy(false);
    return showResults([], [], choices);
  }
  let number = 0;
  try {
    const answer = await simulateCall.send({ ...sizeRequest(state), schedules: choices.map((choice) => choiceRequest(state, choice)) });
    if (!answer) return;
    ({ number } = simulateCall);
    page.results = answer.results;
    page.stages.showErrors(answer.errors);
    $("per").textContent = `costs ${perText(answer.costs_per)}`;
    showResults(answer.results, page.form.showErrors(answer.errors), choices);
    await showTimelines(answer.viewer);
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    if (mayResend && (await resendFiles(error.errors))) return requestResults(false);
    showErrors(error.errors, choices);
    ({ number } = simulateCall);
    if (error.retryAfter) setTimeout(() => number === simulateCall.number && requestAll(), 1000 * error.retryAfter);
  }
  if (number === simulateCall.number) setBusy(false); // unless a newer request is running
}

async function requestChart() {
  const size = sizeRequest(state);
  const key = JSON.stringify(size);
  if (key === page.chartKey) return;
  page.chartKey = key;
  page.chart.wait();
  try {
    const answer = await chartCall.send(size);
    if (!answer) return;
    page.chart.show(answer, answer.points.length ? memoryLimit() : null);
    markChart();
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    page.chartKey = "";
    const chartError = error.errors.find(({ field }) => field === "chart");
    if (chartError) page.chart.fail(chartError.message);
    else page.chart.showStale(error.errors[0].message);
    const { number } = chartCall;
    if (error.retryAfter) setTimeout(() => number === chartCall.number && requestChart(), 1000 * error.retryAfter);
    if (!chartError && !state.schedules.length) showErrors(error.errors, []); // no comparison was requested that would show them
  }
}

function memoryLimit() {
  const value = parseValue(state.costs.memory_limit);
  return typeof value === "number" && state.costs.memory_limit !== "" ? value : null;
}

function showResults(results, errors, choices) {
  $("results").classList.remove("stale");
  page.table.show(choices, results, errors);
  const others = errors.filter(({ field }) => !field.startsWith("schedules."));
  showMessage($("error-page"), others.map(({ message }) => message).join("\n"));
  const { title, line } = headline(results, memoryLimit());
  $("headline").textContent = title;
  $("status").textContent = line;
  $("status").classList.remove("wrong");
  $("viewer").hidden = !results.length;
  document.title = results.length ? `${results.map((result) => result.title).join(", ")} · zeropipe` : "zeropipe";
  markChart();
}

/** Mark the chosen schedules in the chart; variants and files get points of their own. */
function markChart() {
  if (!page.chart.answer) return;
  const plain = state.schedules.filter((choice) => !choice.file && choice.stages_per_rank === "" && !Object.values(choice.options).some(Boolean));
  const { unit, memory_unit } = page.chart.answer;
  const isComparable = (result) => result.num_ranks === parseValue(state.ranks) && result.num_microbatches === parseValue(state.microbatches)
    && result.unit === unit && result.memory_unit === memory_unit;
  const extra = page.results
    .filter((result) => state.schedules[result.choice] && !plain.includes(state.schedules[result.choice]) && result.peak_memory !== null && isComparable(result))
    .map((result) => ({ name: result.title, idle_fraction: result.idle_fraction, bubble: result.bubble, peak_memory: result.peak_memory, makespan: result.makespan,
      stages_per_rank: result.num_stages / result.num_ranks, extra: true }));
  page.chart.mark(plain.map((choice) => choice.name), extra);
}

async function showTimelines(data) {
  if (!page.viewer) {
    page.viewer = mountViewer($("viewer"), data, { summary: false, path: state.view.path === "1", memory: state.view.memory !== "0" });
    await page.viewer.ready;
    page.saveView = syncView(page.viewer, $("viewer"), state.view, writeAddress);
  } else {
    await page.viewer.update(data);
    page.saveView(); // new times may change the zoom
  }
}

/** The request was refused: show each error beside its field; the last results stay, dimmed. */
function showErrors(errors, choices) {
  page.stages.showErrors(errors);
  const left = page.form.showErrors(errors);
  const rows = left.filter(({ field }) => field.startsWith("schedules."));
  $("results").classList.add("stale");
  if (rows.length) page.table.show(choices, [], rows);
  const others = left.filter((error) => !rows.includes(error));
  showMessage($("error-page"), others.map(({ message }) => message).join("\n"));
  $("status").textContent = `Not updated: ${errors[0].message.split("\n")[0]}`;
  $("status").classList.add("wrong");
  $("viewer").hidden = !page.viewer;
  page.panel.reveal($("panel").querySelector(".error:not([hidden])"));
  if (page.form.hasCostErrors && !$("form").contains(document.activeElement)) page.selectTab($("tab-costs"));
}

/** Upload files again that a restarted server does not have; returns whether there were any. */
async function resendFiles(errors) {
  const isMissing = errors.some(({ field }) => field.endsWith(".file"));
  const files = Object.entries(usedFiles());
  if (!isMissing || !files.length) return false;
  await Promise.all(files.map(([name, file]) => uploadFile(name, file)));
  return true;
}

function setBusy(busy) {
  $("results").setAttribute("aria-busy", String(busy));
}

function toggleSchedule(name) {
  const chosen = state.schedules.filter((choice) => choice.name === name && !choice.file);
  if (chosen.length) state.schedules = state.schedules.filter((choice) => !chosen.includes(choice));
  else state.schedules = [...state.schedules, createChoice(name)];
  update();
}

function selectSchedules(names) {
  state.schedules = names.map((name) => createChoice(name));
  update();
}

function removeChoice(removed) {
  state.schedules = state.schedules.filter((choice) => choice !== removed);
  update();
}

function insertAfter(choice, added) {
  state.schedules = state.schedules.toSpliced(state.schedules.indexOf(choice) + 1, 0, added);
  update();
}

/** Add the same schedule again, to give it other settings. */
function addVariant(choice) {
  insertAfter(choice, createChoice(choice.name, { stages_per_rank: choice.stages_per_rank, options: { ...choice.options } }));
}

/** Add a simulation of a recorded schedule. */
function addSimulation(recorded) {
  insertAfter(recorded, createChoice(recorded.name, { file: recorded.file, simulate: true }));
}

/** Use the mean times of a recorded run as the costs. */
function useTimes(recorded) {
  state.per = "rank"; // so that schedules with fewer stages add up neighbours
  setCosts(state.files[recorded.file].costs);
}

async function uploadFile(name, file) {
  const { kind, costs, ...info } = await upload(name, file.text);
  Object.assign(file, info, { kind, costs, title: info.name });
  return file;
}

async function openFiles(files) {
  const messages = [];
  for (const file of files) {
    try {
      if (file.size > page.maxFileBytes) throw new RequestError([{ message: `${file.name}: ${(file.size / 2 ** 20).toFixed(0)} MiB are more than the page takes (${page.maxFileBytes / 2 ** 20}): use the command line` }]);
      await openFile(file.name, await file.text());
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      messages.push(error.message);
    }
  }
  page.selectTab($("tab-schedules"));
  showMessage($("error-file"), messages.join("\n"));
  if (messages.length) $("error-file").scrollIntoView({ block: "nearest" });
}

async function openFile(name, text) {
  const file = await uploadFile(name, { text });
  if (file.kind === "costs") return setCosts(file.costs);
  state.files[name] = file;
  state.schedules = [...state.schedules.filter((choice) => choice.file !== name), createChoice(file.title, { file: name })];
  // schedules are compared at the same size
  state.ranks = String(file.num_ranks);
  state.microbatches = String(file.num_microbatches);
  update();
}

/** Add a schedule that a search found, under a name that no other file has. */
function addFound(name, text) {
  const used = usedFiles();
  const names = Array.from({ length: 1 + Object.keys(used).length }, (_, n) => (n ? name.replace(".", `-${n + 1}.`) : name));
  return openFile(names.find((free) => !(free in used) || used[free].text === text), text);
}

function setCosts(costs) {
  replaceCosts(state, costs);
  update();
}

/** The least common multiple of the shown schedules' stages per rank. */
function commonStagesPerRank() {
  const counts = page.results.map((result) => result.num_stages / result.num_ranks).filter(Number.isInteger);
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);
  return counts.reduce((a, b) => (a * b) / gcd(a, b), 1);
}

/** Download one choice, or with null all of them. */
function download(format, only) {
  const choices = only ? [only] : state.schedules;
  return downloadFile(format, { ...sizeRequest(state), schedules: choices.map((choice) => choiceRequest(state, choice)) });
}

start().catch((error) => {
  showMessage($("error-page"), `the page could not start: ${error.message}`);
  throw error;
});
