// Small things around the page: its link, its costs as text, its theme.

import { $ } from "./dom.js";
import { packFiles } from "./files.js";
import { costsFile, toAddress } from "./state.js";

/** Copy the link that reproduces the view; `files` are those it shows. */
export async function share(state, files) {
  const address = location.origin + location.pathname + toAddress(state) + (await packFiles(files));
  history.replaceState(null, "", address);
  const left = Object.entries(files).filter(([, file]) => !file.inLink).map(([name]) => name);
  const note = left.length ? `; ${left.join(", ")} is too large for a link` : "";
  const copied = await copy(address);
  $("status").textContent = copied ? `Link copied${note}` : `The link is in the address bar${note}`;
}

/** Copy the costs as a file for the command line. */
export async function copyCosts(state) {
  $("status").textContent = (await copy(costsFile(state))) ? "Costs copied as TOML" : "This browser does not let the page copy";
}

/** Copy a text; whether that was allowed. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not allowed, or not over a safe connection
  }
}

export function toggleTheme(viewer) {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("zeropipe-theme", root.dataset.theme);
  viewer?.recolour();
}
