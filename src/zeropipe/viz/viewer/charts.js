// What lies under the pointer in the charts of an article.

import { element } from "./shapes.js";

export function mountCharts(root = document) {
  for (const figure of root.querySelectorAll(".zp-chart")) listenTo(figure);
}

function listenTo(figure) {
  const { x: name, range: [low, high], lines } = JSON.parse(figure.dataset.chart);
  const plot = figure.querySelector(".zp-chart-plot");
  const rule = element("div", { className: "zp-chart-rule", hidden: true });
  const card = element("div", { className: "zp-chart-card", hidden: true });
  plot.append(rule, card);
  const all = [...new Set(lines.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const hide = () => (rule.hidden = card.hidden = true);

  plot.addEventListener("pointermove", (event) => {
    if (!all.length) return;
    const { left, width } = plot.getBoundingClientRect();
    const x = nearest(all, low + ((event.clientX - left) / width) * (high - low));
    const place = (x - low) / (high - low);
    const rows = lines.map(({ name, points }) => [name, points.find(([at]) => at === x)?.[2]]).filter(([, text]) => text);
    rule.hidden = card.hidden = false;
    rule.style.left = `${100 * place}%`;
    card.style[place > 0.5 ? "right" : "left"] = `calc(${100 * (place > 0.5 ? 1 - place : place)}% + 8px)`;
    card.style[place > 0.5 ? "left" : "right"] = "auto";
    card.replaceChildren(
      element("strong", {}, `${name} ${Math.round(x)}`),
      ...rows.map(([label, text]) => element("div", {}, element("span", {}, label), element("b", {}, text))),
    );
  });
  plot.addEventListener("pointerleave", hide);
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? sorted[low - 1] : sorted[low];
}
