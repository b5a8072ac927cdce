// The state of the Compare page, as the user typed it; as an address that reproduces it; and as requests.

import { COST_FIELDS, OLD_NAMES } from "./cost_fields.js"; // generated, see models.py

export const COSTS = Object.fromEntries(Object.entries(COST_FIELDS).map(([name, field]) => [name, field.default]));
/** The columns of the table of stages. */
export const PER_STAGE = Object.keys(COST_FIELDS).filter((name) => COST_FIELDS[name].perStage && !COST_FIELDS[name].sharded);
export const PER = ["rank", "stage"]; // the first is the default
const SIZES = { ranks: "4", microbatches: "8", stages_per_rank: "", weight_parts: "" };
const START_SCHEDULES = ["1f1b", "zbv", "dualpipev"];

export function startState() {
  return { ...SIZES, schedules: START_SCHEDULES.map((name) => createChoice(name)), per: PER[0], costs: { ...COSTS }, edges: {}, view: {}, files: {} };
}

/** One row of the comparison. `file` is the name of a file; `simulate`: simulate its schedule instead of showing its times. */
export function createChoice(name, settings = {}) {
  return { name, stages_per_rank: "", options: {}, file: null, simulate: false, ...settings };
}

/** The state of an address. Files are in the part after #, see files.js. */
export function parseAddress(search) {
  const state = startState();
  const given = new URLSearchParams(search);
  for (const name of Object.keys(SIZES)) if (given.has(name)) state[name] = given.get(name);
  if (given.has("schedules")) state.schedules = given.get("schedules").split(",").filter(Boolean).map(parseChoice);
  for (const [old, name] of Object.entries(OLD_NAMES)) if (given.has(old)) state.costs[name] = given.get(old);
  for (const name of Object.keys(COSTS)) {
    if (given.has(name)) state.costs[name] = typeof COSTS[name] === "boolean" ? given.get(name) === "1" : given.get(name);
  }
  if (given.has("per")) state.per = given.get("per");
  if (given.has("edges")) state.edges = parseEdges(given.get("edges"));
  for (const name of ["zoom", "path", "memory"]) if (given.has(name)) state.view[name] = given.get(name);
  return state;
}

/** `?ranks=4&...`: sizes and schedules, then all that differs from the defaults. */
export function toAddress(state) {
  const parts = [];
  const add = (name, value) => parts.push(`${name}=${encodeReadable(value)}`);
  for (const name of Object.keys(SIZES)) if (state[name] !== "") add(name, state[name]);
  add("schedules", state.schedules.map(choiceText).join(","));
  if (state.per !== PER[0]) add("per", state.per);
  for (const [name, value] of Object.entries(state.costs)) {
    if (value !== COSTS[name]) add(name, value === true ? "1" : value === false ? "0" : value);
  }
  const edges = Object.entries(state.edges).map(([edge, { p2p, bandwidth }]) => `${edge}:${p2p ?? ""}:${bandwidth ?? ""}`);
  if (edges.length) add("edges", edges.join(","));
  for (const [name, value] of Object.entries(state.view)) if (value !== "" && value !== undefined) add(name, value);
  return `?${parts.join("&")}`;
}

function choiceText({ name, file, simulate, stages_per_rank, options }) {
  const more = Object.entries(options).filter(([, value]) => value !== "").map(([key, value]) => `:${key}=${escapeName(value)}`);
  const stages = stages_per_rank === "" ? "" : `:v=${stages_per_rank}`;
  return (file ? `@${escapeName(file)}${simulate ? ":simulated" : ""}` : escapeName(name)) + stages + more.join("");
}

function parseChoice(text) {
  const [head, ...more] = text.split(":");
  const name = unescapeName(head);
  const made = name.startsWith("@") ? createChoice(name.slice(1), { file: name.slice(1) }) : createChoice(name);
  for (const part of more) {
    const [key, value] = part.split("=");
    if (key === "simulated") made.simulate = true;
    else if (key === "v") made.stages_per_rank = value ?? "";
    else made.options[key] = unescapeName(value ?? "");
  }
  return made;
}

/** Escape the separators of the list of schedules. */
function escapeName(name) {
  return name.replace(/[%,:=]/g, (sign) => `%${sign.charCodeAt(0).toString(16)}`);
}

function unescapeName(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a single %
  }
}

function parseEdges(text) {
  const edges = {};
  for (const part of text.split(",")) {
    const [edge, p2p, bandwidth] = part.split(":");
    edges[edge] = { p2p: p2p ? parseValue(p2p) : null, bandwidth: bandwidth ? parseValue(bandwidth) : null };
  }
  return edges;
}

/** Encode for an address, but keep it readable. */
function encodeReadable(value) {
  return encodeURIComponent(value).replace(/%2C/g, ",").replace(/%3A/g, ":").replace(/%40/g, "@").replace(/%3D/g, "=");
}

/** A number, a list of numbers, or a table of stages; any other text as it is, which the server will refuse. */
export function parseValue(text) {
  if (typeof text !== "string") return text;
  const parts = text.trim().split(",").map((part) => part.trim());
  const pairs = parts.map((part) => part.match(/^(\d+|default)\s*=\s*(\S+)$/));
  if (pairs.every((pair) => pair && Number.isFinite(Number(pair[2])))) return Object.fromEntries(pairs.map(([, stage, number]) => [stage, Number(number)]));
  const numbers = parts.map((part) => (part === "" ? NaN : Number(part)));
  if (numbers.some((number) => !Number.isFinite(number))) return text.trim();
  return numbers.length === 1 ? numbers[0] : numbers;
}

/** The sizes and costs of a request, without empty fields. */
export function sizeRequest(state) {
  const body = { costs: {} };
  if (state.per !== PER[0]) body.per = state.per;
  for (const name of Object.keys(SIZES)) if (String(state[name]).trim() !== "" || SIZES[name] !== "") body[name] = parseValue(state[name]);
  const { inter_p2p, inter_bandwidth, ...costs } = state.costs;
  for (const [name, text] of Object.entries(costs)) {
    if (text === "" || text === COSTS[name]) continue;
    body.costs[name] = name === "unit" || name === "memory_unit" ? text : parseValue(text);
  }
  const inter = {};
  if (inter_p2p !== "") inter.p2p = parseValue(inter_p2p);
  if (inter_bandwidth !== "") inter.bandwidth = parseValue(inter_bandwidth);
  if (Object.keys(inter).length) body.costs.inter_node = inter;
  if (Object.keys(state.edges).length) body.costs.edges = state.edges;
  return body;
}

export function choiceRequest(state, { name, file, simulate, stages_per_rank, options }) {
  if (file) return { file: state.files[file]?.id ?? file, simulate };
  const body = { name };
  if (stages_per_rank !== "") body.stages_per_rank = parseValue(stages_per_rank);
  const given = Object.entries(options).filter(([, text]) => text !== "");
  if (given.length) body.options = Object.fromEntries(given.map(([key, text]) => [key, parseOption(text)]));
  return body;
}

/** As on the command line: a number, true or false, or else the text. */
function parseOption(text) {
  const flag = { true: true, false: false }[text.toLowerCase()];
  const value = parseValue(text);
  return flag ?? (typeof value === "number" ? value : text);
}

/** Replace all costs by those of a file. */
export function replaceCosts(state, costs) {
  state.costs = { ...COSTS };
  state.edges = {};
  for (const [name, given] of Object.entries(costs)) {
    if (name === "edges") state.edges = given;
    else if (name === "inter_node") {
      state.costs.inter_p2p = String(given.p2p ?? "");
      state.costs.inter_bandwidth = given.bandwidth === undefined || given.bandwidth === null ? "" : String(given.bandwidth);
    } else if (typeof given === "boolean") state.costs[name] = given;
    else state.costs[name] = given === null ? "" : format(given);
  }
}

/** As the user types it: 1.5, a list as 1,1,2, a table of stages as 0=0.8,default=1. */
function format(given) {
  const isTable = typeof given === "object" && !Array.isArray(given);
  return isTable ? Object.entries(given).map(([stage, number]) => `${stage}=${number}`).join(",") : String(given);
}

function toToml(given) {
  if (typeof given !== "object" || Array.isArray(given)) return JSON.stringify(given);
  return `{ ${Object.entries(given).map(([name, number]) => `${name} = ${number}`).join(", ")} }`;
}

/** The costs as the text of a .toml file. */
export function costsToToml(state) {
  const { costs } = sizeRequest(state);
  const { inter_node, edges, ...flat } = costs;
  const lines = [state.per === PER[0] ? "# costs per rank, divided among its stages" : "# costs per stage: use them with --per stage"];
  lines.push(...Object.entries(flat).map(([name, given]) => `${name} = ${toToml(given)}`));
  if (inter_node) lines.push("[inter_node]", ...Object.entries(inter_node).map(([name, given]) => `${name} = ${given}`));
  for (const [edge, link] of Object.entries(edges ?? {})) {
    lines.push(`[edges.${edge}]`, ...Object.entries(link).filter(([, given]) => given !== null).map(([name, given]) => `${name} = ${given}`));
  }
  if (lines.length === 1) lines.push("f = 1"); // a file with no field would be refused
  return `${lines.join("\n")}\n`;
}
