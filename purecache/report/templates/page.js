"use strict";
// Tooltips by pointer and by keyboard. Everything that they say stands in the page already: in tables and labels.
const tip = document.getElementById("tip");

function show(lines, x, y) {
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = y + 16 + height > innerHeight ? y - 16 - height : y + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function line(tag, ...texts) {
  const element = document.createElement(tag);
  element.append(...texts.map((text) => Object.assign(document.createElement("i"), { textContent: text })));
  return element;
}

// Charts over time: a cursor at the nearest row of the chart's table.
for (const plot of document.querySelectorAll(".plot[data-table]")) {
  const table = document.getElementById(plot.dataset.table);
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const rows = [...table.tBodies[0].rows];
  const cursor = Object.assign(document.createElement("div"), { className: "cursor", hidden: true });
  let at = rows.length - 1;
  plot.append(cursor);
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", "Values: move with the left and right arrow keys");

  const point = (number, y) => {
    at = Math.max(0, Math.min(rows.length - 1, number));
    const box = plot.getBoundingClientRect();
    const share = Number(rows[at].dataset.x) / 100;
    const values = [...rows[at].cells].map((cell) => cell.textContent);
    cursor.hidden = false;
    cursor.style.left = `${100 * share}%`;
    const rest = heads.slice(1).map((head, column) => line("span", head, values[column + 1])).reverse();
    show([line("b", `${heads[0]} ${values[0]}`), ...rest], box.left + share * box.width, y ?? box.top + 40);
  };
  const leave = () => { cursor.hidden = true; tip.hidden = true; };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const percent = (100 * (event.clientX - box.left)) / box.width;
    let best = 0;
    rows.forEach((row, number) => {
      if (Math.abs(row.dataset.x - percent) < Math.abs(rows[best].dataset.x - percent)) best = number;
    });
    point(best, event.clientY);
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) point(at); });
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Escape") leave();
    if (step === undefined) return;
    event.preventDefault();
    point(step);
  });
}

// Things with a label of their own: one of them can be reached by tab, the others by arrow keys.
for (const [group, selector] of [[".map", ".cell"], [".bars", "rect"]]) {
  for (const figure of document.querySelectorAll(group)) {
    const items = [...figure.querySelectorAll(selector)];
    const tell = (item, x, y) => show(item.getAttribute("aria-label").split(". ").map((text, number) => line(number ? "div" : "b", text)), x, y);
    items.forEach((item, number) => {
      item.tabIndex = number ? -1 : 0;
      item.addEventListener("pointermove", (event) => tell(item, event.clientX, event.clientY));
      item.addEventListener("pointerleave", () => { tip.hidden = true; });
      item.addEventListener("blur", () => { tip.hidden = true; });
      item.addEventListener("focus", () => {
        const box = item.getBoundingClientRect();
        if (item.matches(":focus-visible")) tell(item, box.left + Math.min(box.width / 2, 60), box.top + Math.min(box.height / 2, 30));
      });
      item.addEventListener("keydown", (event) => {
        const last = items.length - 1;
        const next = { ArrowLeft: number - 1, ArrowUp: number - 1, ArrowRight: number + 1, ArrowDown: number + 1, Home: 0, End: last }[event.key];
        if (event.key === "Escape") tip.hidden = true;
        if (next === undefined || next < 0 || next > last) return;
        event.preventDefault();
        item.tabIndex = -1;
        items[next].tabIndex = 0;
        items[next].focus();
      });
    });
  }
}
