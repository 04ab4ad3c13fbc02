
"use strict";
// The list of sections shows which of them is being read.
(() => {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const list = document.querySelector("nav");
  const watch = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    const link = links.get(target.id);
    link.setAttribute("aria-current", isIntersecting);
    if (!isIntersecting) return;
    const before = { left: link.offsetLeft - list.clientWidth / 3, top: link.offsetTop - list.clientHeight / 2 };
    list.scrollTo(before);
  }), { rootMargin: "-15% 0px -84% 0px" });
  document.querySelectorAll("main > section").forEach((section) => watch.observe(section));
})();

// A legend shows and hides what is drawn of its lines.
document.querySelectorAll(".legend input").forEach((box) => {
  box.hidden = false;
  box.addEventListener("change", () => box.closest("figure").querySelectorAll("[data-series]").forEach((drawn) => {
    if (drawn.dataset.series === box.value) drawn.classList.toggle("off", !box.checked);
  }));
});

// Points of a chart say their values where the pointer is, where one taps, and one after another with the arrow keys. Of
// those that lie on each other all do. Without this script the browser's own tooltips do, slowly, and for a mouse alone.
(() => {
  const MOST = 6, AWAY = 14, EDGE = 4;
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.setAttribute("role", "status");
  const hide = () => { tip.hidden = true; };
  const line = (name, text) => Object.assign(tip.appendChild(document.createElement("p")), { className: name, textContent: text });
  const show = (points, x, y) => {
    tip.replaceChildren();
    points.slice(0, MOST).forEach(({ dataset: { told, source } }) => {
      const after = ` (${source})`, sourced = source && told.endsWith(after);
      line("", sourced ? told.slice(0, -after.length) : told);
      if (sourced) line("soft", source);
    });
    if (points.length > MOST) line("soft", `and ${points.length - MOST} more here`);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect(), room = document.documentElement.clientWidth - width - EDGE;
    tip.style.left = `${Math.max(EDGE, Math.min(x + AWAY, room))}px`;
    tip.style.top = `${y - height - AWAY > EDGE ? y - height - AWAY : y + AWAY}px`;
  };
  const point = ({ target, clientX: x, clientY: y }) => {
    const under = target.closest?.(".chart") ? document.elementsFromPoint(x, y) : [];
    const points = [...new Set(under.map((each) => each.closest("[data-told]")).filter(Boolean))];
    if (points.length) show(points, x, y); else hide();
  };
  hide();
  document.querySelectorAll(".chart title").forEach((title) => {
    title.parentNode.dataset.told = title.textContent;
    title.remove();
  });
  document.querySelectorAll(".chart").forEach((chart) => {
    let at = -1;
    chart.tabIndex = 0;
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const points = [...chart.querySelectorAll("[data-told]")].filter((each) => !each.closest(".off"));
      if (!step || !points.length) return;
      event.preventDefault();
      at = at < 0 && step < 0 ? points.length - 1 : (at + step + points.length) % points.length;
      const place = points[at].getBoundingClientRect();
      show([points[at]], place.x + place.width / 2, place.y + place.height / 2);
    });
  });
  ["pointermove", "pointerdown"].forEach((name) => addEventListener(name, point));
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", ({ key }) => { if (key === "Escape") hide(); });
})();

// The unit browser. Texts of the corpus reach the page through textContent only.
(() => {
  const root = document.getElementById("browser");
  if (!root) return;
  const PAGE = 20, LEVELS = 9;
  const { tokens, sets } = JSON.parse(document.getElementById("units-data").textContent);
  const form = root.querySelector("form"), list = root.querySelector(".units");
  const count = root.querySelector(".count"), more = root.querySelector(".more");
  const { set: choice, sort, query, only, numbers } = form.elements;
  let found = [], shown = 0;

  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const visible = (token) => token.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/\p{Cc}/gu, "·") || "∅";
  const percent = (rate) => rate === null ? "–" : rate === 0 ? "never" : `${Number((100 * rate).toPrecision(2))}%`;
  const plain = (value) => value === null ? "–" : String(Number(value.toPrecision(3)));

  // One entry for each listed unit: what it is sorted and searched by, made when its replacement is first shown.
  const entries = (one) => one.entries ??= one.listed.map((unit, i) => {
    const [intervals, adds] = one.units[unit] ?? [[], null];
    const probes = (one.probes[unit] ?? []).slice().sort((a, b) => b[1] - a[1]);
    const words = intervals.flatMap((interval) => interval[2].map((context) => context[2].map((t) => tokens[t]).join("")));
    const promoted = (adds?.promoted ?? []).map(([token]) => tokens[token]);
    const text = [...words, ...promoted, ...probes.map((probe) => probe[0])].join("\n").toLowerCase();
    const f1 = probes.length ? probes[0][1] : null;
    return { unit, rate: one.rates[i], max: one.maxima[i], intervals, adds, probes, text, f1, peak: adds?.peak ?? null };
  });

  const last = -Infinity;
  const orders = {
    max: (a, b) => (b.max ?? last) - (a.max ?? last),
    rate: (a, b) => (b.rate ?? last) - (a.rate ?? last),
    rare: (a, b) => (a.rate || Infinity) - (b.rate || Infinity),
    peak: (a, b) => (b.peak ?? last) - (a.peak ?? last),
    f1: (a, b) => (b.f1 ?? last) - (a.f1 ?? last),
    unit: (a, b) => a.unit - b.unit,
  };

  const level = (value, max) => value > 0 && max > 0 ? Math.min(LEVELS, Math.max(1, Math.ceil(LEVELS * value / max))) : 0;

  const context = ([at, value, words, values], max, from, to) => {
    const line = make("p", "context");
    words.slice(from, to).forEach((word, i) => {
      const place = i + (from ?? 0), here = values[place];
      const piece = make("span", here ? `h${level(here, max)}` : "", visible(tokens[word]));
      if (here) {
        piece.title = `activation ${plain(here)}`;
        piece.dataset.value = plain(here);
      }
      if (place === at) piece.classList.add("at");
      line.append(piece);
    });
    line.title = `activation ${plain(value)} at the underlined token`;
    return line;
  };

  // Where a unit is: its replacement's name and its number, so that a link holds for every page of the same run.
  const place = (entry, one) => `#unit=${encodeURIComponent(one.name)}/${entry.unit}`;

  const listing = (title, name, ends) => {
    const line = make("p", `tokens ${name}`);
    line.append(make("span", "soft", `${title} `));
    ends.forEach(([token, logit]) => {
      const piece = make("span", "token", visible(tokens[token]));
      piece.title = `logit ${logit > 0 ? "+" : ""}${plain(logit)} for each unit of activation`;
      line.append(piece, " ");
    });
    return line;
  };

  const histogram = ({ counts, high, active }) => {
    const [width, height, box] = [160, 36, make("div", "histogram")];
    const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const most = Math.max(...counts.map((count) => Math.log1p(count)), 1e-9);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `histogram of the activation: ${counts.join(", ")} tokens from 0 to ${plain(high)}`);
    counts.forEach((count, i) => {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const tall = height * Math.log1p(count) / most, wide = width / counts.length;
      const numbers_ = { x: i * wide, y: height - tall, width: wide - 1, height: tall };
      Object.entries(numbers_).forEach(([name, value]) => bar.setAttribute(name, value));
      const said = document.createElementNS("http://www.w3.org/2000/svg", "title");
      said.textContent = `${plain(high * i / counts.length)} to ${plain(high * (i + 1) / counts.length)}: ${count} tokens`;
      bar.append(said);
      drawing.append(bar);
    });
    const range = `activation 0 to ${plain(high)}, ${active.toLocaleString("en")} active tokens of the sample, log scale`;
    box.append(drawing, make("span", "soft", range));
    return box;
  };

  const added = (adds, one) => {
    const box = make("div", "adds");
    if (adds.promoted.length) {
      box.append(listing("promotes", "up", adds.promoted), listing("suppresses", "down", adds.suppressed));
      const cosine = adds.cosine === null ? "" : `; mean cosine of its directions ${plain(adds.cosine)}`;
      box.append(make("p", "soft", `peak ${plain(adds.peak)} (by chance ${plain(one.chance)})${cosine}`));
    }
    box.append(histogram(adds));
    return box;
  };

  const opened = (entry, one) => {
    const box = make("div", "intervals");
    if (entry.adds) box.append(added(entry.adds, one));
    entry.probes.forEach(([name, f1]) => box.append(make("p", "soft", `tells ${name}: F1 ${f1.toFixed(2)}`)));
    entry.intervals.filter((interval) => interval[2].length).forEach(([low, high, contexts]) => {
      box.append(make("h4", "", `activation ${plain(low)} to ${plain(high)}`));
      contexts.forEach((each) => box.append(context(each, entry.max)));
    });
    const foot = make("p", "soft", `${one.source}/units/${entry.unit} `), link = make("a", "", "link to this unit");
    link.href = place(entry, one);
    foot.append(link);
    box.append(foot);
    return box;
  };

  const row = (entry, one) => {
    const more = entry.intervals.length > 0 || entry.adds !== null;
    const item = make("li"), head = make(more ? "summary" : "div", more ? "" : "plain");
    item.id = place(entry, one).slice(1);
    head.append(make("span", "number", `#${entry.unit}`), make("span", "soft", `rate ${percent(entry.rate)}`));
    head.append(make("span", "soft", entry.max === null ? "" : `max ${plain(entry.max)}`));
    const top = entry.intervals.flatMap((interval) => interval[2]).sort((a, b) => (b[1] ?? 0) - (a[1] ?? 0))[0];
    const preview = make("span", "preview");
    if (top) preview.append(...context(top, entry.max, Math.max(0, top[0] - 6), top[0] + 4).childNodes);
    head.append(preview);
    if (entry.probes.length) {
      const [name, f1] = entry.probes[0];
      head.append(make("span", "probe soft", `tells ${name}, F1 ${f1.toFixed(2)}`));
    }
    if (entry.adds?.promoted.length) head.append(listing("promotes", "preview", entry.adds.promoted.slice(0, 5)));
    if (!more) {
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

  // Opens the unit that the address names; without one, or with one that is not here, the page stays as it is.
  const follow = () => {
    const [, name, unit] = /^#unit=(.+)\/(\d+)$/.exec(location.hash) ?? [];
    const i = name === undefined ? -1 : sets.findIndex((one) => encodeURIComponent(one.name) === name);
    if (i < 0) return;
    choice.value = i;
    query.value = `#${unit}`;
    update();
    const item = list.firstElementChild, details = item?.querySelector("details");
    if (details) details.open = true;
    item?.scrollIntoView();
  };

  sets.forEach((one, i) => choice.append(new Option(one.label, i)));
  if (!sets.some((one) => Object.keys(one.probes).length)) sort.querySelector("[value=f1]").remove();
  form.addEventListener("submit", (event) => event.preventDefault());
  if (!sets.some((one) => one.chance !== null)) sort.querySelector("[value=peak]").remove();
  form.addEventListener("input", (event) => event.target === numbers ? list.classList.toggle("numbers", numbers.checked) : update());
  more.addEventListener("click", extend);
  form.hidden = false;
  update();
  addEventListener("hashchange", follow);
  follow();
})();
