// What the comparison says, in one sentence. Only results of one group do the same work and are held against each other.

import { countText, percentText, sizeText, timeText } from "/viewer/units.js";

export function headline(results, limit) {
  if (!results.length) return { title: "Pipeline schedules, side by side", line: "Nothing is chosen yet" };
  return { title: sentence(results, limit), line: facts(results) };
}

function sentence(results, limit) {
  const groups = grouped(results);
  if (results.length === 1) return alone(results[0]);
  if (groups.length === 1) return winner(results, limit);
  const rivals = groups.filter((group) => group.length > 1);
  if (rivals.length === 1) return `${winner(rivals[0], limit)}, with ${size(rivals[0][0])}`;
  return `Not the same work: ${results.map((one) => `${one.title} ${timeText(one.makespan, one.unit)}`).join(", ")}`;
}

function alone(one) {
  const over = one.fits ? "" : ", over the memory limit";
  return `${one.title}: ${timeText(one.makespan, one.unit)}, bubble ${percentText(one.bubble)}${over}`;
}

/** Who is fastest of those that do the same work: what is over its memory limit cannot be. */
function winner(results, limit) {
  const fitting = results.filter((one) => one.fits);
  const within = fitting.length < results.length || limit !== null ? " within the memory limit" : "";
  if (!fitting.length) return `None fits the memory limit${limit === null ? "" : ` of ${sizeText(limit, results[0].memory_unit)}`}`;
  if (fitting.length === 1) return `Only ${fitting[0].title} fits the memory limit`;
  const best = fitting.filter((one) => one.best_time);
  const names = listed(best.map((one) => one.title));
  if (best.length === fitting.length) return `${names} are equally fast${within}`;
  if (best.length > 1) return `${names} are fastest${within}`;
  const last = fitting.reduce((a, b) => (b.makespan > a.makespan ? b : a));
  return `${names} is fastest${within}: ${percentText(1 - best[0].makespan / last.makespan)} less time than ${last.title}`;
}

function grouped(results) {
  const groups = new Map();
  for (const one of results) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return [...groups.values()];
}

function facts(results) {
  const sizes = [...new Set(results.map(size))];
  const actions = results.reduce((sum, one) => sum + one.num_actions, 0);
  return [...(sizes.length === 1 ? sizes : ["different sizes"]), countText(results.length, "schedule"), countText(actions, "action")].join(" · ");
}

function size(one) {
  return `${countText(one.num_ranks, "rank")} · ${countText(one.num_microbatches, "microbatch")}`;
}

function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
