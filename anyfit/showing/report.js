"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg", COLOURS = 8, NARROW = innerWidth < 640;
const $ = (tag, attributes = {}, ...inside) => {
  const svg = ["svg", "g", "path", "rect", "line", "circle", "text", "polyline"].includes(tag);
  const made = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
};
const colour = (index) => `var(--c${index % COLOURS})`;
const bytes = (size) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.abs(size) >= 1024 && at < 4; at++) size /= 1024;
  return `${at ? size.toPrecision(size >= 999.5 ? 4 : 3) : size} ${units[at]}`;
};
const seconds = (time) =>
  Math.abs(time) < 1e-12 ? "0" : time >= 172800 ? `${(time / 86400).toFixed(1)} days` : time >= 7200 ? `${(time / 3600).toFixed(1)} h` : time >= 120 ? `${(time / 60).toFixed(1)} min`
  : time >= 1 ? `${time.toPrecision(3)} s` : time >= 1e-3 ? `${(time * 1e3).toPrecision(3)} ms` : `${(time * 1e6).toPrecision(3)} µs`;
const count = (number) => {
  const units = ["", " k", " M", " B", " T"];
  let at = 0;
  for (; Math.abs(number) >= 999.5 && at < 4; at++) number /= 1000;
  return `${Number(number.toPrecision(3))}${units[at]}`;
};
const money = (amount) => `$${amount.toLocaleString("en", { maximumFractionDigits: amount < 100 ? 2 : 0 })}`;

/* What is pointed at, or has the focus, says what it is. */
const tip = document.getElementById("tip");
const told = (element, text) => {
  element.setAttribute("tabindex", "0");
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", text);
  element.classList.add("hit");
  const show = (x, y) => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${y + 20 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
  };
  element.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    show(box.left + box.width / 2, box.bottom - 12);
  });
  for (const over of ["pointerleave", "blur"]) element.addEventListener(over, () => (tip.style.display = "none"));
  return element;
};
addEventListener("keydown", (event) => event.key === "Escape" && (tip.style.display = "none"));

const legend = (names) => $("div", { class: "legend" }, ...names.map(([name, fill]) => $("span", {}, $("i", { style: `background:${fill}` }), name)));
const note = (text) => $("p", { class: "note" }, text);
const lacking = (what, command) => $("p", { class: "note" }, `${what} `, command ? $("code", {}, command) : null);
const heading = (text) => $("h2", {}, text);
const text = (x, y, said, attributes = {}) => $("text", { x, y, ...attributes }, said);
const table = (names, rows, figures = []) =>
  $("div", { class: "wide" }, $("table", {},
    $("thead", {}, $("tr", {}, ...names.map((name, at) => $("th", { class: figures.includes(at) ? "n" : null, scope: "col" }, name)))),
    $("tbody", {}, ...rows.map((row) => $("tr", {}, ...row.map((cell, at) => $("td", { class: figures.includes(at) ? "n" : at === names.length - 1 ? "why" : null }, cell)))))));

/* A frame with ticks of round numbers; `wide` and `high` are of its inside. */
const W = NARROW ? 420 : 1060, LEFT = 66, RIGHT = 16, TOP = 16, BOTTOM = 40;
const ticks = (from, to, most, powers) => {
  if (powers) {
    const unit = 2 ** Math.ceil(Math.log2((to - from) / most || 1));
    return Array.from({ length: Math.floor(to / unit) - Math.ceil(from / unit) + 1 }, (_, at) => (Math.ceil(from / unit) + at) * unit);
  }
  const rough = (to - from) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  return Array.from({ length: Math.floor(to / unit + 1e-9) - Math.ceil(from / unit - 1e-9) + 1 }, (_, at) => (Math.ceil(from / unit - 1e-9) + at) * unit);
};
const frame = ({ high, x, y, xs, ys, label, xlabel, powers }) => {
  const svg = $("svg", { viewBox: `0 0 ${W} ${high + TOP + BOTTOM}`, role: "group", "aria-label": label });
  const wide = W - LEFT - RIGHT;
  const px = (value) => LEFT + ((value - x[0]) / (x[1] - x[0] || 1)) * wide;
  const py = (value) => TOP + high - ((value - y[0]) / (y[1] - y[0] || 1)) * high;
  for (const at of ticks(y[0], y[1], 5, powers)) {
    svg.append($("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: py(at), y2: py(at) }), text(LEFT - 8, py(at) + 4, ys(at), { "text-anchor": "end", class: "soft" }));
  }
  for (const at of xs ? ticks(x[0], x[1], NARROW ? 3 : 8, false) : []) svg.append(text(px(at), TOP + high + 18, xs(at), { "text-anchor": "middle", class: "soft" }));
  if (xlabel) svg.append(text(W - RIGHT, TOP + high + 35, xlabel, { "text-anchor": "end", class: "soft" }));
  return { svg, px, py, wide };
};
const limitLine = (chart, at, said) => chart.svg.append($("line", { class: "limit", x1: LEFT, x2: W - RIGHT, y1: chart.py(at), y2: chart.py(at) }), text(W - RIGHT, chart.py(at) - 5, said, { "text-anchor": "end" }));

const overview = () => {
  const inside = [heading("Memory")];
  for (const tier of D.tiers) {
    const share = tier.bytes / tier.limit, error = tier.error * share;
    inside.push($("p", {}, `${tier.name}: ${bytes(tier.bytes)} ± ${Math.round(tier.error * 100)}% of ${bytes(tier.limit)}${tier.assumed ? ", which the preset assumes" : ""}`));
    inside.push(told($("div", { class: "bar" }, $("i", { style: `width:${Math.min(share * 100, 100)}%;background:${share + error > 1 ? "var(--bad)" : share > 0.9 ? "var(--c3)" : "var(--c2)"}` })), `${Math.round(share * 100)}% of ${tier.name}`));
  }
  inside.push(heading("A step"));
  const parts = D.split.filter(([, time]) => time > 0);
  inside.push($("div", { class: "bar", style: "height:26px" }, ...parts.map(([name, time], at) => told($("i", { style: `width:${(time / D.step) * 100}%;background:${colour(at)}` }), `${name}: ${seconds(time)}, ${Math.round((time / D.step) * 100)}% of the step`))));
  inside.push(legend(parts.map(([name, time], at) => [`${name} ${seconds(time)}`, colour(at)])));
  inside.push(heading("What was decided, and why"), table(["", "decision", "why"], D.decisions.map((each) => [each.name, each.choice, each.why])));
  return inside;
};

const memory = () => {
  const inside = [heading("Memory of one GPU over one micro-batch")];
  if (D.device === "cpu") inside[0].textContent = "Memory over one micro-batch";
  if (!D.memory) return [...inside, D.lanes ? $("p", {}, D.lacks.memory) : lacking(D.lacks.picture, D.lacks.again)];
  const { moments, seconds: took, bytes: kinds } = D.memory, names = Object.keys(kinds), total = moments.map((_, at) => names.reduce((sum, name) => sum + kinds[name][at], 0));
  const starts = [0];
  took.forEach((time) => starts.push(starts.at(-1) + Math.max(time, 0)));
  const most = Math.max(...total, D.limit * (D.limit < 1.6 * Math.max(...total) ? 1.02 : 0)), peak = total.indexOf(Math.max(...total));
  const chart = frame({ high: NARROW ? 260 : 360, x: [0, starts.at(-1)], y: [0, most * 1.03], xs: seconds, ys: bytes, label: "memory over time, stacked by kind", xlabel: "time", powers: true });
  let below = moments.map(() => 0);
  names.forEach((name, index) => {
    const above = below.map((size, at) => size + kinds[name][at]);
    const edge = (sizes) => moments.flatMap((_, at) => [`${chart.px(starts[at])},${chart.py(sizes[at])}`, `${chart.px(starts[at + 1])},${chart.py(sizes[at])}`]);
    const largest = Math.max(...kinds[name]);
    chart.svg.append(told($("path", { d: `M${edge(above).join("L")}L${edge(below).reverse().join("L")}Z`, fill: colour(index) }), `${name}: at most ${bytes(largest)}`));
    below = above;
  });
  if (D.limit < 1.6 * Math.max(...total)) limitLine(chart, D.limit, `limit ${bytes(D.limit)}`);
  const x = chart.px((starts[peak] + starts[peak + 1]) / 2), y = chart.py(total[peak]);
  chart.svg.append(told($("circle", { cx: x, cy: y, r: 6, fill: "var(--bg)", stroke: "var(--ink)", "stroke-width": 2 }), `the peak, ${bytes(total[peak])}: ${moments[peak]}\n${names.map((name) => `${name} ${bytes(kinds[name][peak])}`).join("\n")}`));
  const every = Math.max(1, Math.ceil(moments.length / 120));
  for (let at = 0; at < moments.length; at += every) {
    const left = chart.px(starts[at]), right = chart.px(starts[Math.min(at + every, moments.length)]);
    chart.svg.append(told($("rect", { x: left, y: TOP + (NARROW ? 260 : 360), width: Math.max(right - left, 1), height: 7, fill: moments[at].startsWith("forward") ? "var(--c0)" : moments[at] === "update" ? "var(--c5)" : "var(--c4)", opacity: at % (2 * every) ? 0.55 : 0.9 }), `${moments[at]}: ${bytes(total[at])}`));
  }
  inside.push(legend(names.map((name, at) => [name, colour(at)])), chart.svg);
  inside.push($("p", {}, `The peak is at ${D.peak}, with ${bytes(total[peak])} of ${bytes(D.limit)}.${D.limit >= 1.6 * Math.max(...total) ? ` The limit, ${bytes(D.limit)}, is far above.` : ""}`));
  inside.push($("p", { class: "soft small" }, "Under the picture: forward (blue), backward (orange), update (pink). As the planner weighs it; what the allocator and the runtime add is taken as the same all along."));
  return inside;
};

const lanesOf = (lanes, title, said) => {
  const names = Object.keys(lanes).filter((name) => lanes[name].length), end = Math.max(...names.flatMap((name) => lanes[name].map((row) => row[1])));
  const row = 40, left = NARROW ? 70 : 90, wide = W - left - RIGHT, high = names.length * row;
  const svg = $("svg", { viewBox: `0 0 ${W} ${high + 44}`, role: "group", "aria-label": title });
  const px = (time) => left + (time / end) * wide, used = new Set();
  for (const at of ticks(0, end, NARROW ? 3 : 8, false)) svg.append($("line", { class: "axis", x1: px(at), x2: px(at), y1: 4, y2: high + 8 }), text(px(at), high + 26, seconds(at), { "text-anchor": "middle", class: "soft" }));
  names.forEach((name, index) => {
    const busy = lanes[name].reduce((sum, [from, to]) => sum + to - from, 0) / end;
    svg.append(text(2, index * row + 18, D.laneNames[name] || name), text(2, index * row + 32, `${Math.round(Math.min(busy, 1) * 100)}% busy`, { class: "soft" }));
    for (const [from, to, kind, label] of lanes[name]) {
      used.add(kind);
      svg.append(told($("rect", { x: px(from), y: index * row + 6, width: Math.max(px(to) - px(from) - 0.3, 0.6), height: 28, rx: 1.5, fill: (D.kinds[kind] || ["var(--c7)"])[0] }), `${label || (D.kinds[kind] || ["", kind])[1]}${label ? `, ${(D.kinds[kind] || ["", kind])[1]}` : ""}: ${seconds(to - from)}, from ${seconds(from || 0)}`));
    }
  });
  return [heading(title), $("p", { class: "soft small" }, said), legend([...used].map((kind) => [(D.kinds[kind] || ["", kind])[1], (D.kinds[kind] || ["var(--c7)"])[0]])), svg];
};
const lanes = () => {
  const inside = [];
  if (D.recorded) inside.push(...lanesOf(D.recorded.lanes, "As it was recorded", D.recorded.said));
  if (D.lanes) inside.push(...lanesOf(D.lanes, "As the planner plays it", `${D.lanesOf[0].toUpperCase()}${D.lanesOf.slice(1)}, one row for each that works.`));
  else inside.push(heading("As the planner plays it"), lacking(D.lacks.picture, D.lacks.again));
  if (D.run && !D.recorded) inside.push(lacking("This run has no recorded timeline; it is written by", "anyfit fit --timeline timeline.json"));
  return inside;
};

const CHOICES = { keep: ["kept", "var(--c2)"], selective: ["recomputed in part", "var(--c3)"], recompute: ["recomputed", "var(--c4)"], offload: ["offloaded", "var(--c6)"] };
const blocks = () => {
  if (!D.blocks.length) return [heading("Blocks"), lacking(D.lacks.picture, D.lacks.again)];
  const inside = [heading("Blocks, in the order of forward")];
  const stages = [...new Set(D.blocks.map((each) => each.stage))];
  const used = [...new Set(D.blocks.map((each) => each.activations))], marks = (each) => [each.compiled && "compiled", each.replayed && "replayed", each.cut && `cut: ${each.cut}`].filter(Boolean);
  inside.push(legend([...used.map((name) => CHOICES[name]), ...(D.blocks.some((each) => marks(each).length) ? [["dot: compiled, replayed or cut", "var(--ink)"]] : [])]));
  for (const stage of stages) {
    if (stages.length > 1) inside.push($("p", { class: "soft" }, `stage ${stage}`));
    inside.push($("div", { class: "strip" }, ...D.blocks.filter((each) => each.stage === stage).map((each) => told(
      $("span", { style: `background:${marks(each).length ? `radial-gradient(circle,var(--ink) 0 3px,${CHOICES[each.activations][1]} 4px)` : CHOICES[each.activations][1]}` }),
      [`${each.path} (${each.kind})`, CHOICES[each.activations][0], ...marks(each), each.parameters ? `${count(each.parameters)} parameters` : "", each.kept_bytes === null ? "" : `keeps ${bytes(each.kept_bytes)} for backward`, each.seconds ? `${seconds(each.seconds)} forward and backward` : ""].filter(Boolean).join("\n")))));
  }
  if (D.chunks.length) inside.push(heading("Chunks of model state"), table(["", "chunks"], D.chunks.map(([said, number]) => [said, `${number}`]), [1]));
  return inside;
};

const alternatives = () => {
  const inside = [heading("What else was weighed")], fitting = D.alternatives.filter((each) => each.seconds !== null);
  if (!D.alternatives.length) return [...inside, note("Nothing else was weighed: the plan was written by hand, or only one way fits.")];
  const mine = { decision: "the plan", choice: "", seconds: D.mean, bytes: D.needed, fits: true };
  const all = [...fitting, mine], xs = all.map((each) => each.seconds), ys = all.map((each) => each.bytes);
  const spread = Math.max(...xs) - Math.min(...xs) || D.mean * 0.1, tall = Math.max(...ys) - Math.min(...ys) || D.needed * 0.1;
  const chart = frame({ high: NARROW ? 240 : 320, x: [Math.max(Math.min(...xs) - spread * 0.12, 0), Math.max(...xs) + spread * 0.12], y: [Math.max(Math.min(...ys) - tall * 0.15, 0), Math.max(...ys) + tall * 0.2], xs: seconds, ys: bytes, label: "alternatives by time and memory", xlabel: "a step", powers: true });
  const names = [...new Set(D.alternatives.map((each) => each.decision))];
  if (D.limit < Math.max(...ys) + tall * 0.2 && D.limit > Math.min(...ys) - tall * 0.15) limitLine(chart, D.limit, `limit ${bytes(D.limit)}`);
  for (const each of fitting) {
    const why = D.decisions.find((one) => one.name === each.decision), later = each.seconds / D.mean - 1;
    chart.svg.append(told($("circle", { cx: chart.px(each.seconds), cy: chart.py(each.bytes), r: 7, fill: each.fits ? colour(names.indexOf(each.decision)) : "none", stroke: colour(names.indexOf(each.decision)), "stroke-width": 2, "fill-opacity": 0.8 }),
      `${each.decision}: ${each.choice}\n${seconds(each.seconds)} a step (${later >= 0 ? "+" : ""}${(later * 100).toFixed(1)}%), ${bytes(each.bytes)}${each.fits ? "" : ", does not fit"}${why ? `\nchosen instead: ${why.choice}` : ""}`));
  }
  const x = chart.px(D.mean), y = chart.py(D.needed);
  chart.svg.append(told($("path", { d: `M${x},${y - 11}L${x + 9},${y}L${x},${y + 11}L${x - 9},${y}Z`, fill: "var(--ink)", stroke: "var(--bg)", "stroke-width": 2 }), `the plan: ${seconds(D.mean)} a step, ${bytes(D.needed)} at the far end of its error band`));
  inside.push(legend([["the plan", "var(--ink)"], ...names.map((name, at) => [name, colour(at)])]), chart.svg);
  inside.push(table(["decision", "instead", "a step", "memory", ""], D.alternatives.map((each) => [each.decision, each.choice, each.seconds === null ? "-" : seconds(each.seconds), bytes(each.bytes), each.fits ? "" : "does not fit"]), [2, 3]));
  return inside;
};

const elsewhere = () => {
  const inside = [heading("Speed against device memory")];
  if (D.speeds) {
    const fit = D.speeds.filter((each) => each.rate), most = Math.max(...fit.map((each) => each.rate), D.rate), sizes = D.speeds.map((each) => each.limit);
    const chart = frame({ high: NARROW ? 220 : 280, x: [0, Math.max(...sizes) * 1.04], y: [0, most * 1.1], xs: null, ys: count, label: "tokens a second by device memory", xlabel: "memory of the device" });
    for (const each of D.speeds) chart.svg.append(text(chart.px(each.limit), TOP + (NARROW ? 220 : 280) + 18, bytes(each.limit), { "text-anchor": "middle", class: "soft" }));
    chart.svg.append($("polyline", { points: fit.map((each) => `${chart.px(each.limit)},${chart.py(each.rate)}`).join(" "), fill: "none", stroke: "var(--c0)", "stroke-width": 2 }));
    for (const each of D.speeds) chart.svg.append(told($("circle", { cx: chart.px(each.limit), cy: chart.py(each.rate || 0), r: 6, fill: each.rate ? "var(--c0)" : "var(--bad)" }), each.rate ? `${bytes(each.limit)}: ${count(each.rate)} tokens/s, ${seconds(each.step)} a step\n${each.said}` : `${bytes(each.limit)}: ${each.said}`));
    inside.push(chart.svg);
  } else inside.push(lacking("Planned for other sizes of memory where the job is known:", D.lacks.speeds));
  inside.push(heading("Cost by machine"));
  if (!D.machines) return [...inside, lacking("Other machines are planned for where the job is known:", D.lacks.machines)];
  const fit = D.machines.filter((each) => each.seconds), priced = fit.filter((each) => each.cost), least = Math.min(...priced.map((each) => each.cost));
  if (priced.length) {
    const row = 30, left = NARROW ? 110 : 150, dearest = Math.max(...priced.map((each) => each.cost)), svg = $("svg", { viewBox: `0 0 ${W} ${priced.length * row + 6}`, role: "group", "aria-label": "cost by machine" });
    [...priced].sort((one, other) => one.cost - other.cost).forEach((each, at) => {
      const long = (each.cost / dearest) * (W - left - 90);
      svg.append(text(0, at * row + 20, each.machine), told($("rect", { x: left, y: at * row + 5, width: Math.max(long, 2), height: 22, rx: 4, fill: each.cost === least ? "var(--c2)" : "var(--c0)" }), `${each.machine}: ${money(each.cost)} for ${count(D.tokens)} tokens, in ${seconds(each.seconds)}\n${each.price}`), text(left + long + 8, at * row + 20, money(each.cost)));
    });
    inside.push($("p", { class: "soft small" }, `For ${count(D.tokens)} tokens, each machine with its own best batch. Prices are typical ones, or yours.`), svg);
  }
  inside.push(table(["machine", "GPUs", "batch", "time", "cost", "tokens/s", ""], D.machines.map((each) => [each.machine, `${each.devices}`, each.batch ? `${each.batch}` : "-", each.seconds ? seconds(each.seconds) : "-", each.cost ? money(each.cost) : "-", each.rate ? count(each.rate) : "-", each.said]), [1, 2, 3, 4, 5]));
  return inside;
};

const line = (title, name, show, marks = []) => {
  const points = D.run.steps.map((step, at) => [step, D.run[name][at]]).filter(([, value]) => value !== null);
  if (!points.length) return [heading(title), note("no finite value was recorded")];
  const values = points.map((each) => each[1]).concat(marks.map((each) => each[0])), low = Math.min(...values), top = Math.max(...values), room = (top - low) * 0.08 || Math.abs(top) * 0.1 || 1;
  const high = NARROW ? 150 : 180, chart = frame({ high, x: [points[0][0], points.at(-1)[0]], y: [name === "loss" ? low - room : Math.max(low - room, 0), top + room], xs: (at) => `${at}`, ys: show, label: title, xlabel: "step" });
  for (const [value, said] of marks) chart.svg.append($("line", { class: "limit", style: "stroke:var(--c2)", x1: LEFT, x2: W - RIGHT, y1: chart.py(value), y2: chart.py(value) }), text(W - RIGHT, chart.py(value) - 5, said, { "text-anchor": "end" }));
  for (const { step, said } of D.run.events) if (step >= points[0][0]) chart.svg.append(told($("rect", { x: chart.px(step) - 1.5, y: TOP, width: 3, height: high, fill: "var(--bad)", opacity: 0.7 }), `step ${step}: ${said}`));
  chart.svg.append($("polyline", { points: points.map(([step, value]) => `${chart.px(step)},${chart.py(value)}`).join(" "), fill: "none", stroke: "var(--c0)", "stroke-width": 1.8, "stroke-linejoin": "round" }));
  const every = Math.max(1, Math.ceil(points.length / 80));
  for (let at = 0; at < points.length; at += every) chart.svg.append(told($("circle", { cx: chart.px(points[at][0]), cy: chart.py(points[at][1]), r: points.length > 60 ? 3 : 4, fill: "var(--c0)" }), `step ${points[at][0]}: ${show(points[at][1])}`));
  return [heading(title), chart.svg];
};
const run = () => [
  heading("Predicted beside measured"),
  table(["", "forecast", "measured", "against forecast"], D.run.beside.map((each) => [each.name, each.forecast, each.measured, each.against]), [1, 2, 3]),
  ...line("Loss", "loss", (value) => Number(value.toPrecision(4)).toString()),
  ...line("Gradient norm", "norm", (value) => Number(value.toPrecision(3)).toString()),
  ...line("Tokens a second", "rate", count, D.run.forecastRate ? [[D.run.forecastRate, "forecast"]] : []),
  heading("Alarms and re-plans"),
  D.run.events.length ? table(["step", ""], D.run.events.map((each) => [`${each.step}`, each.said])) : note("None: no spike, no step left out, no re-plan."),
  heading("How to do it again"),
  ...D.run.again.map(([said, command]) => $("div", {}, $("p", {}, said), $("pre", { tabindex: "0" }, command))),
];

const TABS = [["overview", "Overview", overview], ["memory", "Memory", memory], ["lanes", "Timeline", lanes], ["blocks", "Blocks", blocks], ["alternatives", "Alternatives", alternatives], ["machines", "Other machines", elsewhere]];
if (D.run) TABS.splice(1, 0, ["run", "Run", run]);
const list = document.querySelector("[role=tablist]"), main = document.querySelector("main");
const choose = (name) => {
  for (const tab of list.children) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(`panel-${tab.id.slice(4)}`).hidden = !chosen;
  }
  tip.style.display = "none";
};
for (const [name, title, draw] of TABS) {
  const tab = $("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` }, title);
  tab.addEventListener("click", () => choose(name));
  list.append(tab);
  main.append($("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}` }, ...draw()));
}
list.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], tabs = [...list.children], at = tabs.indexOf(document.activeElement);
  const next = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1 : step ? (at + step + tabs.length) % tabs.length : -1;
  if (next >= 0) {
    event.preventDefault();
    tabs[next].focus();
    tabs[next].click();
  }
});
choose(TABS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "overview");
const theme = (name) => {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
};
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
