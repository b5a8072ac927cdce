// Zoom and switches of the timelines, as a part of the page's address.

/** Apply the saved view, then save every change the user makes. Returns the function that saves. */
export function syncView(viewer, root, saved, onChange) {
  const [from, to] = (saved.zoom ?? "").split(":").map(Number);
  if (to > from) viewer.view.show(from, to - from);
  const save = () => {
    const { view, state } = viewer;
    const zoom = view.fitted ? "" : `${format(view.from)}:${format(view.to)}`;
    const now = { zoom, path: state.path ? "1" : "", memory: state.memory ? "" : "0" };
    if (Object.entries(now).every(([name, value]) => (saved[name] ?? "") === value)) return;
    Object.assign(saved, now);
    onChange();
  };
  viewer.view.listeners.add(save);
  for (const kind of ["click", "keyup"]) root.addEventListener(kind, save);
  return save;
}

function format(time) {
  return String(Number(time.toPrecision(6)));
}
