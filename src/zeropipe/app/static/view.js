// The timelines' zoom and switches, kept in the address.

/** Apply what an address said, then write down what the user does. Returns what writes it down. */
export function watchView(viewer, place, kept, changed) {
  const [from, to] = (kept.zoom ?? "").split(":").map(Number);
  if (to > from) viewer.view.show(from, to - from);
  const note = () => {
    const { view, state } = viewer;
    const zoom = view.fitted ? "" : `${short(view.from)}:${short(view.to)}`;
    const now = { zoom, path: state.path ? "1" : "", memory: state.memory ? "" : "0" };
    if (Object.entries(now).every(([name, value]) => (kept[name] ?? "") === value)) return;
    Object.assign(kept, now);
    changed();
  };
  viewer.view.listeners.add(note);
  for (const kind of ["click", "keyup"]) place.addEventListener(kind, note);
  return note;
}

function short(time) {
  return String(Number(time.toPrecision(6)));
}
