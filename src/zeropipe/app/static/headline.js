// The comparison in one sentence. Only results of one group do the same work and are compared.

import { countText, percentText, sizeText, timeText } from "/viewer/units.js";

export function headline(results, limit) {
  if (!results.length) return { title: "Pipeline schedules, side by side", line: "No schedule is chosen yet" };
  return { title: sentence(results, limit), line: facts(results) };
}

function sentence(results, limit) {
  const groups = groupResults(results);
  if (results.length === 1) return single(results[0]);
  if (groups.length === 1) return compareGroup(results, limit);
  const rivals = groups.filter((group) => group.length > 1);
  if (rivals.length === 1) return `${compareGroup(rivals[0], limit)}, with ${size(rivals[0][0])}`;
  return `Not the same work: ${results.map((result) => `${result.title} ${timeText(result.makespan, result.unit)}`).join(", ")}`;
}

function single(result) {
  const over = result.fits ? "" : ", over the memory limit";
  return `${result.title}: ${timeText(result.makespan, result.unit)}, idle ${percentText(result.idle_fraction)}${over}`;
}

/** The fastest results of a group that fit their memory limit. */
function compareGroup(results, limit) {
  const fitting = results.filter((result) => result.fits);
  const within = fitting.length < results.length || limit !== null ? " within the memory limit" : "";
  if (!fitting.length) return `None fits the memory limit${limit === null ? "" : ` of ${sizeText(limit, results[0].memory_unit)}`}`;
  if (fitting.length === 1) return `Only ${fitting[0].title} fits the memory limit`;
  const best = fitting.filter((result) => result.best_time);
  const names = joinNames(best.map((result) => result.title));
  if (best.length === fitting.length) return `${names} are equally fast${within}`;
  if (best.length > 1) return `${names} are fastest${within}`;
  const last = fitting.reduce((a, b) => (b.makespan > a.makespan ? b : a));
  return `${names} is fastest${within}: ${percentText(1 - best[0].makespan / last.makespan)} less time than ${last.title}`;
}

function groupResults(results) {
  const groups = new Map();
  for (const result of results) groups.set(result.group, [...(groups.get(result.group) ?? []), result]);
  return [...groups.values()];
}

function facts(results) {
  const sizes = [...new Set(results.map(size))];
  const actions = results.reduce((sum, result) => sum + result.num_actions, 0);
  return [...(sizes.length === 1 ? sizes : ["different sizes"]), countText(results.length, "schedule"), countText(actions, "action")].join(" · ");
}

function size(result) {
  return `${countText(result.num_ranks, "rank")} · ${countText(result.num_microbatches, "microbatch")}`;
}

function joinNames(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
