
"use strict";
// The unit browser. Texts of the corpus reach the page through textContent only.
(() => {
  const root = document.getElementById("browser");
  if (!root) return;
  const PAGE = 20;
  const { tokens, sets } = JSON.parse(document.getElementById("units-data").textContent);
  const form = root.querySelector("form"), list = root.querySelector(".units");
  const count = root.querySelector(".count"), more = root.querySelector(".more");
  const { set: choice, sort, query, only } = form.elements;
  let found = [], shown = 0;

  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const visible = (token) => token.replace(/\n/g, "↵").replace(/\t/g, "→") || "∅";
  const percent = (rate) => rate === null ? "–" : rate === 0 ? "never" : `${Number((100 * rate).toPrecision(2))}%`;
  const plain = (value) => value === null ? "–" : String(Number(value.toPrecision(3)));

  // One entry for each listed unit: what it is sorted and searched by, made when its replacement is first shown.
  const entries = (one) => one.entries ??= one.listed.map((unit, i) => {
    const intervals = one.units[unit] ?? [];
    const probes = (one.probes[unit] ?? []).slice().sort((a, b) => b[1] - a[1]);
    const words = intervals.flatMap((interval) => interval[2].map((context) => context[2].map((t) => tokens[t]).join("")));
    const text = [...words, ...probes.map((probe) => probe[0])].join("\n").toLowerCase();
    return { unit, rate: one.rates[i], max: one.maxima[i], intervals, probes, text, f1: probes.length ? probes[0][1] : null };
  });

  const last = -Infinity;
  const orders = {
    max: (a, b) => (b.max ?? last) - (a.max ?? last),
    rate: (a, b) => (b.rate ?? last) - (a.rate ?? last),
    rare: (a, b) => (a.rate || Infinity) - (b.rate || Infinity),
    f1: (a, b) => (b.f1 ?? last) - (a.f1 ?? last),
    unit: (a, b) => a.unit - b.unit,
  };

  const context = ([at, value, words, levels], from, to) => {
    const line = make("p");
    words.slice(from, to).forEach((word, i) => {
      const place = i + (from ?? 0);
      const piece = make("span", levels[place] ? `h${levels[place]}` : "", visible(tokens[word]));
      if (place === at) piece.classList.add("at");
      line.append(piece);
    });
    line.title = `activation ${plain(value)} at the underlined token`;
    return line;
  };

  const opened = (entry, one) => {
    const box = make("div", "intervals");
    entry.probes.forEach(([name, f1]) => box.append(make("p", "soft", `tells ${name}: F1 ${f1.toFixed(2)}`)));
    entry.intervals.filter((interval) => interval[2].length).forEach(([low, high, contexts]) => {
      box.append(make("h4", "", `activation ${plain(low)} to ${plain(high)}`));
      contexts.forEach((each) => box.append(context(each)));
    });
    box.append(make("p", "soft", `${one.source}/units/${entry.unit}`));
    return box;
  };

  const row = (entry, one) => {
    const item = make("li"), head = make(entry.intervals.length ? "summary" : "div", entry.intervals.length ? "" : "plain");
    head.append(make("span", "number", `#${entry.unit}`), make("span", "soft", `rate ${percent(entry.rate)}`));
    head.append(make("span", "soft", entry.max === null ? "" : `max ${plain(entry.max)}`));
    const top = entry.intervals.flatMap((interval) => interval[2]).sort((a, b) => (b[1] ?? 0) - (a[1] ?? 0))[0];
    const preview = make("span", "preview");
    if (top) preview.append(...context(top, Math.max(0, top[0] - 6), top[0] + 4).childNodes);
    head.append(preview);
    if (entry.probes.length) {
      const [name, f1] = entry.probes[0];
      head.append(make("span", "probe soft", `tells ${name}, F1 ${f1.toFixed(2)}`));
    }
    if (!entry.intervals.length) {
      item.append(head);
      return item;
    }
    const details = make("details");
    details.append(head);
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(opened(entry, one));
    });
    item.append(details);
    return item;
  };

  const extend = () => {
    const one = sets[choice.value];
    list.append(...found.slice(shown, shown + PAGE).map((entry) => row(entry, one)));
    shown = Math.min(found.length, shown + PAGE);
    more.hidden = shown === found.length;
    const left = one.count - one.listed.length;
    const cut = one.given - Object.keys(one.units).length;
    count.textContent = `${found.length.toLocaleString("en")} of ${one.count.toLocaleString("en")} units, ${shown.toLocaleString("en")} shown`
      + (left ? `; the ${left.toLocaleString("en")} rarest are not in this page` : "")
      + (cut ? `; contexts of ${cut.toLocaleString("en")} more units are in units.json` : "");
  };

  const update = () => {
    const wanted = query.value.trim().toLowerCase();
    const number = /^#?\d+$/.test(wanted) ? Number(wanted.replace("#", "")) : null;
    found = entries(sets[choice.value])
      .filter((entry) => entry.unit === number
        || ((!only.checked || entry.intervals.length) && (!wanted || entry.text.includes(wanted))))
      .sort(orders[sort.value]);
    if (number !== null) found.sort((a, b) => (b.unit === number) - (a.unit === number));
    list.replaceChildren();
    shown = 0;
    extend();
  };

  sets.forEach((one, i) => choice.append(new Option(one.label, i)));
  if (!sets.some((one) => Object.keys(one.probes).length)) sort.querySelector("[value=f1]").remove();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", update);
  more.addEventListener("click", extend);
  form.hidden = false;
  update();
})();
