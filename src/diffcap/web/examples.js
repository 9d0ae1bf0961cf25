// A click on an example requests its images from the server.
element.addEventListener("click", (event) => {
  const card = event.target.closest(".dc-example");
  if (card) trigger("choose", { index: Number(card.dataset.index) });
});
