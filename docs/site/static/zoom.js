// Pictures open at full size with a click or the Enter key, and close with a click or Escape.

function openPicture(picture) {
  const dialog = document.createElement("dialog");
  dialog.className = "zoom";
  dialog.setAttribute("aria-label", picture.alt);
  const copy = new Image();
  copy.src = picture.src;
  copy.alt = picture.alt;
  dialog.tabIndex = -1;
  dialog.append(copy);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "Escape") dialog.close();
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

for (const picture of document.querySelectorAll("article img")) {
  picture.classList.add("zoomable");
  picture.tabIndex = 0;
  picture.setAttribute("role", "button");
  picture.addEventListener("click", () => openPicture(picture));
  picture.addEventListener("keydown", (event) => {
    if (event.key === "Enter") openPicture(picture);
  });
}
