// Two panes, one in sight; arrow keys move between the tabs.

export function tabs(list) {
  const all = [...list.querySelectorAll('[role="tab"]')];
  const select = (tab, focus = false) => {
    for (const other of all) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (focus) tab.focus();
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest('[role="tab"]');
    if (tab) select(tab);
  });
  list.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const at = all.indexOf(document.activeElement);
    select(all[(at + by + all.length) % all.length], true);
  });
  return select;
}
