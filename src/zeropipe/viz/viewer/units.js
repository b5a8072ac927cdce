// Numbers for people: times, sizes, shares; and the ticks of a ruler.

const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"], [1, "B"]];

export function numberText(value, digits = 5) {
  if (!value) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  if (places > 12) return String(Number(value.toPrecision(digits)));
  const text = value.toFixed(places);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function timeText(value, unit, digits) {
  return unit === "s" ? scaledText(value, SECONDS, digits) : `${numberText(value, digits)} ${unit}`.trim();
}

export function sizeText(value, unit) {
  return unit === "B" ? scaledText(value, BYTES, 4) : `${numberText(value, 4)} ${unit}`.trim();
}

export function percentText(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** So many of something: `1 rank`, `4,096 microbatches`. */
export function countText(number, noun) {
  const plural = noun.endsWith("ch") ? `${noun}es` : `${noun}s`;
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

function scaledText(value, scales, digits) {
  if (!value) return `0 ${scales.find(([factor]) => factor === 1)[1]}`;
  const [factor, name] = scales.find(([f]) => Math.abs(value) >= f) ?? scales[scales.length - 1];
  return `${numberText(value / factor, digits)} ${name}`;
}

/** What one unit of a ruler up to `to` is, and its name: its numbers stay short. */
function rulerUnit(to, unit) {
  if (unit === "s" && to >= 1e-9 && to < 1e6) return SECONDS.find(([factor]) => to >= factor);
  if (to >= 1e-3 && to < 1e6) return [1, unit];
  const power = 3 * Math.floor(Math.log10(to) / 3);
  return [10 ** power, `×10^${power} ${unit}`.trim()];
}

/** Steps of 1, 2 or 5 times a power of ten, at most `most` of them between `from` and `to`. */
export function ruler(from, to, most, unit) {
  const span = to - from;
  const base = 10 ** Math.ceil(Math.log10(span / most) - 1);
  const step = [1, 2, 5, 10].map((factor) => base * factor).find((size) => span / size <= most * (1 + 1e-9)); // sums are rounded
  const [factor, name] = rulerUnit(to, unit);
  const places = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  const ticks = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to + span * 1e-9; n++) {
    ticks.push({ at: n * step, text: ((n * step) / factor).toFixed(places) });
  }
  return { ticks, step, unit: name };
}
