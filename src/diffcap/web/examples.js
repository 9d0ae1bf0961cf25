// Pressing an example asks the server for its pictures.
element.addEventListener("click", (event) => {
  const card = event.target.closest(".dc-example");
  if (card) trigger("choose", { index: Number(card.dataset.index) });
});
