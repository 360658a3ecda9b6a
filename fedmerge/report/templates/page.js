"use strict";
// Tables are sorted by a click on a heading; without this script they are as they were written.
const key = (row, column) => {
  const cell = row.cells[column];
  if (!cell) return ""; // one cell that says why there is no number
  const value = cell.dataset.sort ?? cell.textContent.trim();
  const number = Number(value);
  return value === "" || Number.isNaN(number) ? value : number;
};
const order = (a, b) =>
  typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), undefined, { numeric: true });
const sort = (heading) => {
  const table = heading.closest("table");
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const found = order(key(a, heading.cellIndex), key(b, heading.cellIndex));
    return descending ? -found : found;
  });
  table.tBodies[0].append(...rows);
};
for (const heading of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  button.addEventListener("click", () => sort(heading));
  heading.append(button);
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
