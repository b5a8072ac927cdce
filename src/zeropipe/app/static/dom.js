// Create elements, show messages, and delay calls.

export const $ = (id) => document.getElementById(id);

export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Show a message in `node` and mark its input as invalid; an empty message hides it. */
export function showMessage(node, message, input) {
  node.textContent = message;
  node.hidden = !message;
  if (!input) return;
  if (message) {
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", node.id);
  } else {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
}

export function closeOnOutsideClick(dialog) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

export function closeButton(dialog) {
  return h("button", { type: "button", className: "quiet", "aria-label": "Close", onclick: () => dialog.close() }, "×");
}

/** Return a function that calls `act` once, `delay` milliseconds after its last call. */
export function debounce(act, delay) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), delay);
  };
}
