// The page: state -> address and questions; answers -> table, chart and timelines.

import { mountViewer } from "/viewer/viewer.js";
import { Cards, colours } from "./cards.js";
import { Chart } from "./chart.js";
import { $, debounce, h, tell } from "./dom.js";
import { FORMATS, closeMenus, saveFile, sheet } from "./downloads.js";
import { packFiles, pasteDialog, takeDrops, unpackFiles, upload } from "./files.js";
import { Fold } from "./fold.js";
import { Form, perWords } from "./form.js";
import { headline } from "./headline.js";
import { Searching } from "./searching.js";
import { Stages } from "./stages.js";
import { choice, choiceRequest, fromAddress, sizeRequest, takeCosts, toAddress, value } from "./state.js";
import { Table } from "./table.js";
import { tabs } from "./tabs.js";
import { copyCosts, share, toggleTheme } from "./tools.js";
import { watchView } from "./view.js";
import { Line, Refused, get } from "./wire.js";

const PASTE = { title: "Paste a costs file", button: "Use these costs",
  about: ["TOML or JSON, as for ", h("code", {}, "zeropipe simulate --costs"), ". It takes the place of all costs."],
  placeholder: 'f = [1.0, 1.0, 1.2, 1.4]\ni = 1.1\nw = 0.9\np2p = 0.05\nmemory_limit = 6\n\nor the same as JSON: {"f": [1, 1, 1.2, 1.4]}' };
const QUIET = 90; // milliseconds without a change before asking
const state = fromAddress(location.search);
const simulateLine = new Line("/api/simulate");
const chartLine = new Line("/api/chart");
const page = { results: [], viewer: null, flying: 0, chartKey: "" };

async function start() {
  closeMenus();
  $("theme").addEventListener("click", () => toggleTheme(page.viewer));
  const [catalog, files] = await Promise.all([get("/api/schedules"), unpackFiles(location.hash)]);
  state.files = files;
  page.maxFile = catalog.max_file_bytes;
  document.head.append(h("style", {}, colours(catalog.palette)));
  const facts = new Map(catalog.schedules.map((one) => [one.name, one]));
  page.cards = new Cards($("cards"), $("about"), catalog.schedules, toggle);
  page.fold = new Fold($("panel"), $("fold"));
  page.stages = new Stages($("stages"), state, changed);
  const paste = pasteDialog($("paste"), PASTE, async (text) => {
    const { costs } = await upload(text.trim().startsWith("{") ? "costs.json" : "costs.toml", text);
    setCosts(() => takeCosts(state, costs));
  });
  page.form = new Form($("form"), $("costs"), state, changed, {
    perStage: () => page.stages.open(perRank()), paste, copy: () => copyCosts(state), reset: () => setCosts(() => takeCosts(state, {})),
  });
  page.table = new Table($("compare"), facts, { changed, choose, remove, another, alsoSimulate, useTimes, download, show: (n) => page.viewer?.goTo(n) });
  page.chart = new Chart($("chart"), toggle);
  page.select = tabs(document.querySelector('[role="tablist"]'));
  $("download-sheet").replaceWith(sheet((format) => {
    $("download").open = false;
    download(format, null);
  }, FORMATS));
  const searching = new Searching($("search"), () => sizeRequest(state), takeFound);
  $("open-search").addEventListener("click", () => searching.open());
  $("share").addEventListener("click", () => share(state, usedFiles()));
  $("choose-file").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => takeFiles([...$("file").files]).then(() => ($("file").value = "")));
  takeDrops($("dropping"), takeFiles);
  await Promise.all(Object.entries(files).map(([name, file]) => register(name, file).catch(() => null)));
  arrange();
  ask();
}

/** Something in the state is different: show it, put it in the address, ask for the result. */
function changed() {
  arrange();
  writeAddress();
  fly(true);
  simulateLine.drop();
  askSoon();
}

function arrange() {
  page.table.arrange(state.schedules);
  page.cards.mark(state.schedules.filter((one) => !one.file).map((one) => one.name));
  const set = page.form.numSet;
  $("costs-set").hidden = !set;
  $("costs-set").textContent = set;
  page.fold.tell(state.schedules.length, set);
  page.form.sync();
}

const askSoon = debounce(ask, QUIET);
const writeAddress = debounce(async () => history.replaceState(null, "", toAddress(state) + (await packFiles(usedFiles()))), 60);

function usedFiles() {
  return Object.fromEntries(Object.entries(state.files).filter(([name]) => state.schedules.some(({ file }) => file === name)));
}

/** Ask for the comparison and the chart; each shows up when it is there. */
async function ask() {
  fly(true);
  await Promise.all([askResults(), askChart()]);
}

async function askResults(again = true) {
  const asked = [...state.schedules];
  if (!asked.length) {
    simulateLine.drop();
    page.results = [];
    page.form.tell([]);
    fly(false);
    return showResults([], [], asked);
  }
  let turn = 0;
  try {
    const answer = await simulateLine.ask({ ...sizeRequest(state), schedules: asked.map((one) => choiceRequest(state, one)) });
    if (!answer) return;
    turn = simulateLine.turn;
    page.results = answer.results;
    page.stages.tell(answer.errors);
    $("per").textContent = `costs ${perWords(answer.costs_per)}`;
    showResults(answer.results, page.form.tell(answer.errors), asked);
    await showTimelines(answer.viewer);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (again && (await sendAgain(error.errors))) return askResults(false);
    refuse(error.errors, asked);
    turn = simulateLine.turn;
    if (error.again) setTimeout(() => turn === simulateLine.turn && ask(), 1000 * error.again);
  }
  if (turn === simulateLine.turn) fly(false); // unless there is a newer question by now
}

async function askChart() {
  const size = sizeRequest(state);
  const key = JSON.stringify(size);
  if (key === page.chartKey) return;
  page.chartKey = key;
  page.chart.wait();
  try {
    const answer = await chartLine.ask(size);
    if (!answer) return;
    page.chart.show(answer, answer.points.length ? limit() : null);
    markChart();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    page.chartKey = "";
    const own = error.errors.find(({ field }) => field === "chart");
    if (own) page.chart.fail(own.message);
    else page.chart.refuse(error.errors[0].message);
    if (!own && !state.schedules.length) refuse(error.errors, []); // no comparison was asked for that would tell
  }
}

function limit() {
  const given = value(state.costs.memory_limit);
  return typeof given === "number" && state.costs.memory_limit !== "" ? given : null;
}

function showResults(results, errors, asked) {
  $("results").classList.remove("stale");
  page.table.show(asked, results, errors);
  const rest = errors.filter(({ field }) => !field.startsWith("schedules."));
  tell($("error-page"), rest.map(({ message }) => message).join("\n"));
  const { title, line } = headline(results, limit());
  $("headline").textContent = title;
  $("status").textContent = line;
  $("status").classList.remove("wrong");
  $("viewer").hidden = !results.length;
  document.title = results.length ? `${results.map((one) => one.title).join(", ")} · zeropipe` : "zeropipe";
  markChart();
}

/** Chosen schedules in the chart: those of the registry are ringed, variants and files get points of their own. */
function markChart() {
  if (!page.chart.answer) return;
  const plain = state.schedules.filter((one) => !one.file && one.stages_per_rank === "" && !Object.values(one.options).some(Boolean));
  const { unit, memory_unit } = page.chart.answer;
  const fits = (one) => one.num_ranks === value(state.ranks) && one.num_microbatches === value(state.microbatches) && one.unit === unit && one.memory_unit === memory_unit;
  const extra = page.results
    .filter((one) => state.schedules[one.choice] && !plain.includes(state.schedules[one.choice]) && one.peak_memory !== null && fits(one))
    .map((one) => ({ name: one.title, bubble: one.bubble, peak_memory: one.peak_memory, makespan: one.makespan, stages_per_rank: one.num_stages / one.num_ranks, extra: true }));
  page.chart.mark(plain.map((one) => one.name), extra);
}

async function showTimelines(data) {
  if (!page.viewer) {
    page.viewer = mountViewer($("viewer"), data, { summary: false, path: state.view.path === "1", memory: state.view.memory !== "0" });
    await page.viewer.ready;
    page.noteView = watchView(page.viewer, $("viewer"), state.view, writeAddress);
  } else {
    await page.viewer.update(data);
    page.noteView(); // other times, other zoom
  }
}

/** The request as a whole was refused: the last results stay, dimmed, and each error goes beside its field. */
function refuse(errors, asked) {
  page.stages.tell(errors);
  const left = page.form.tell(errors);
  const rows = left.filter(({ field }) => field.startsWith("schedules."));
  $("results").classList.add("stale");
  if (rows.length) page.table.show(asked, [], rows);
  const rest = left.filter((one) => !rows.includes(one));
  tell($("error-page"), rest.map(({ message }) => message).join("\n"));
  $("status").textContent = `Not updated: ${errors[0].message.split("\n")[0]}`;
  $("status").classList.add("wrong");
  $("viewer").hidden = !page.viewer;
  page.fold.reveal($("panel").querySelector(".error:not([hidden])"));
  if (page.form.wrongCosts && !$("form").contains(document.activeElement)) page.select($("tab-costs"));
}

/** The server was started anew and has forgotten a file: send it once more. */
async function sendAgain(errors) {
  const gone = errors.filter(({ field }) => field.endsWith(".file"));
  const known = Object.entries(usedFiles());
  if (!gone.length || !known.length) return false;
  await Promise.all(known.map(([name, file]) => register(name, file)));
  return true;
}

function fly(on) {
  $("results").setAttribute("aria-busy", String(on));
}

function toggle(name) {
  const plain = state.schedules.filter((one) => one.name === name && !one.file);
  if (plain.length) state.schedules = state.schedules.filter((one) => !plain.includes(one));
  else state.schedules = [...state.schedules, choice(name)];
  changed();
}

function choose(names) {
  state.schedules = names.map((name) => choice(name));
  changed();
}

function remove(gone) {
  state.schedules = state.schedules.filter((one) => one !== gone);
  changed();
}

/** The same schedule once more, to give it other settings. */
function another(like) {
  const at = state.schedules.indexOf(like);
  state.schedules = state.schedules.toSpliced(at + 1, 0, choice(like.name, { stages_per_rank: like.stages_per_rank, options: { ...like.options } }));
  changed();
}

function alsoSimulate(recorded) {
  const at = state.schedules.indexOf(recorded);
  state.schedules = state.schedules.toSpliced(at + 1, 0, choice(recorded.name, { file: recorded.file, simulate: true }));
  changed();
}

/** The mean times of a recorded run as the costs of everything that is simulated. */
function useTimes(recorded) {
  const { costs } = state.files[recorded.file];
  state.per = "rank"; // so that schedules with fewer stages add up neighbours
  setCosts(() => takeCosts(state, costs));
}

async function register(name, file) {
  const { kind, costs, ...facts } = await upload(name, file.text);
  Object.assign(file, facts, { kind, costs, title: facts.name });
  return file;
}

async function takeFiles(list) {
  const wrong = [];
  for (const one of list) {
    try {
      if (one.size > page.maxFile) throw new Refused([{ message: `${one.name}: ${(one.size / 2 ** 20).toFixed(0)} MiB are more than the page takes (${page.maxFile / 2 ** 20}): use the command line` }]);
      await takeFile(one.name, await one.text());
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      wrong.push(error.message);
    }
  }
  page.select($("tab-schedules"));
  tell($("error-file"), wrong.join("\n"));
  if (wrong.length) $("error-file").scrollIntoView({ block: "nearest" });
}

async function takeFile(name, text) {
  const file = await register(name, { text });
  if (file.kind === "costs") return setCosts(() => takeCosts(state, file.costs));
  state.files[name] = file;
  state.schedules = [...state.schedules.filter((one) => one.file !== name), choice(file.title, { file: name })];
  // side by side means at the same size
  state.ranks = String(file.num_ranks);
  state.microbatches = String(file.num_microbatches);
  changed();
}

/** What a search found, beside what earlier ones did. */
function takeFound(name, text) {
  const used = usedFiles();
  const names = Array.from({ length: 1 + Object.keys(used).length }, (_, n) => (n ? name.replace(".", `-${n + 1}.`) : name));
  return takeFile(names.find((one) => !(one in used) || used[one].text === text), text);
}

function setCosts(change) {
  change();
  changed();
}

/** Pieces per rank that every shown schedule can share. */
function perRank() {
  const counts = page.results.map((one) => one.num_stages / one.num_ranks).filter(Number.isInteger);
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);
  return counts.reduce((a, b) => (a * b) / gcd(a, b), 1);
}

function download(format, only) {
  const chosen = only ? [only] : state.schedules;
  return saveFile(format, { ...sizeRequest(state), schedules: chosen.map((one) => choiceRequest(state, one)) });
}

start().catch((error) => {
  tell($("error-page"), `the page could not start: ${error.message}`);
  throw error;
});
