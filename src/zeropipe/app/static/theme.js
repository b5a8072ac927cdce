// Before the first paint: the theme chosen last time, or the system's.
(function () {
  const saved = localStorage.getItem("zeropipe-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = saved === "dark" || saved === "light" ? saved : dark ? "dark" : "light";
})();
