// What the comparison says, in one sentence.

import { percentText, sizeText, timeText } from "/viewer/units.js";

export function headline(results, limit) {
  if (!results.length) return { title: "Pipeline schedules, side by side", line: "Nothing is chosen." };
  return { title: sentence(results, limit), line: facts(results) };
}

function sentence(results, limit) {
  const [first] = results;
  if (results.length === 1) return `${first.title}: ${timeText(first.makespan, first.unit)}, bubble ${percentText(first.bubble)}`;
  if (new Set(results.map((one) => one.unit)).size > 1) return results.map((one) => `${one.title} ${timeText(one.makespan, one.unit)}`).join(", ");
  const fitting = limit === null ? results : results.filter((one) => !one.over_limit.length);
  if (!fitting.length) return `None fits the memory limit of ${sizeText(limit, first.memory_unit)}`;
  const sorted = [...fitting].sort((a, b) => a.makespan - b.makespan);
  const equal = sorted.filter((one) => one.makespan <= sorted[0].makespan * (1 + 1e-9));
  const within = limit === null ? "" : " within the limit";
  const names = equal.map((one) => one.title);
  if (equal.length === sorted.length && equal.length > 1) return `${listed(names)} are equally fast${within}`;
  if (equal.length > 1) return `${listed(names)} are fastest${within}`;
  const last = sorted.at(-1);
  if (last === sorted[0]) return `Only ${last.title} fits the memory limit`;
  const saved = 1 - sorted[0].makespan / last.makespan;
  return `${names[0]} is fastest${within}: ${percentText(saved)} less time than ${last.title}`;
}

function facts(results) {
  const sizes = [...new Set(results.map((one) => `${count(one.num_ranks, "rank")} · ${count(one.num_microbatches, "microbatch")}`))];
  const actions = results.reduce((sum, one) => sum + one.num_actions, 0);
  return [...(sizes.length === 1 ? sizes : ["different sizes"]), count(results.length, "schedule"), count(actions, "action")].join(" · ");
}

function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

function count(number, noun) {
  const plural = noun.endsWith("ch") ? `${noun}es` : `${noun}s`;
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}
