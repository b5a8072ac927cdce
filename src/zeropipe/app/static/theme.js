// Before the first paint: the theme chosen last time, or the system's.
(function () {
  const kept = localStorage.getItem("zeropipe-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = kept === "dark" || kept === "light" ? kept : dark ? "dark" : "light";
})();
