// Copy the page's link or costs, and change its theme.

import { $ } from "./dom.js";
import { packFiles } from "./files.js";
import { costsToToml, toAddress } from "./state.js";

/** Copy the link that reproduces the page with its `files`. */
export async function copyLink(state, files) {
  const address = location.origin + location.pathname + toAddress(state) + (await packFiles(files));
  history.replaceState(null, "", address);
  const tooLarge = Object.entries(files).filter(([, file]) => !file.inLink).map(([name]) => name);
  const note = tooLarge.length ? `; ${tooLarge.join(", ")} is too large for a link` : "";
  const copied = await copyText(address);
  $("status").textContent = copied ? `Link copied${note}` : `The link is in the address bar${note}`;
}

/** Copy the costs as a costs file for the command line. */
export async function copyCosts(state) {
  $("status").textContent = (await copyText(costsToToml(state))) ? "Costs copied as TOML" : "The browser does not allow copying";
}

/** Copy a text; returns whether the browser allowed it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not allowed, or the connection is not secure
  }
}

export function toggleTheme(viewer) {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("zeropipe-theme", root.dataset.theme);
  viewer?.recolour();
}
