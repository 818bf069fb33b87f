"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

// -- looks ------------------------------------------------------------------------------------------

root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").onclick = () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  dispatchEvent(new Event("resize"));
};
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
document.querySelectorAll(".copy").forEach((button) => {
  button.onclick = () => navigator.clipboard.writeText(button.nextElementSibling.textContent)
    .then(() => (button.textContent = "copied"), () => (button.textContent = "select and copy by hand"));
});

const tip = document.getElementById("tip");
function showTip(text, event) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
}
// Pictures have their texts as <title>, which browsers show late or, of nested elements, not at all.
document.querySelectorAll(".picture svg").forEach((svg) => {
  const texts = new Map();
  svg.querySelectorAll("title").forEach((title) => {
    if (title.parentNode !== svg) texts.set(title.parentNode, title.textContent);
    title.remove();
  });
  svg.onmousemove = (event) => {
    let at = event.target;
    while (at !== svg && !texts.has(at)) at = at.parentNode;
    showTip(texts.get(at), event);
  };
  svg.onmouseleave = () => showTip("");
});

// -- numbers for people -----------------------------------------------------------------------------

function scaled(value, step, units) {
  let at = 0;
  while (value >= step && at < units.length - 1) { value /= step; at += 1; }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ${units[at]}`;
}
const bytes = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const count = (n) => scaled(n, 1000, ["", "K", "M", "B", "T"]).trim();
const flops = (n) => scaled(n / 1e3, 1000, ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${(s * 1e6).toFixed(1)} us`);

// -- the table of modules: rows exist only where they are shown ---------------------------------------

function drawModules(model) {
  const table = document.querySelector("#modules table"), body = table.tBodies[0];
  const work = model.staged ? "one microbatch, in all stages" : "one step of a rank";
  const columns = [
    ["compute", (m) => seconds(m.seconds), `seconds of computation of ${work}`],
    ["FLOPs", (m) => flops(m.flops), `floating-point operations of ${work}`],
    ["sent", (m) => bytes(m.sent), `bytes sent for it within ${work}`],
    ["live at most", (m) => bytes(m.live), "the most bytes live on a rank while it runs"],
  ];
  if (model.numel !== undefined) {
    columns.unshift(["parameters", (m) => count(m.numel || 0), "numbers in its parameters, on all ranks together"],
      [model.staged ? "over stages" : "on a rank", (m) => bytes(m.bytes || 0),
        `bytes of its parameters that ${model.staged ? "one rank of each stage" : "a rank"} holds`]);
    columns.push(["placed", (m) => (m.placed || []).join("; "), "how its parameters are divided"]);
  }
  const head = table.tHead.insertRow();
  for (const [name, , hint] of [["module", null, "the name of the module"], ...columns]) {
    const cell = document.createElement("th");
    cell.textContent = name; cell.title = hint; cell.scope = "col";
    if (name === "placed") cell.className = "words";
    head.append(cell);
  }

  const open = new Set([model]);
  for (let at = model; (at.children || []).length === 1; ) open.add((at = at.children[0]));
  let kept = null; // of a search: modules that match, and those around one
  const search = document.getElementById("search"), found = document.getElementById("found");

  function row(module, depth) {
    const element = body.insertRow(), words = search.value.trim().toLowerCase();
    element.tabIndex = -1;
    element.setAttribute("role", "row");
    element.setAttribute("aria-level", depth + 1);
    if (module.children) element.setAttribute("aria-expanded", open.has(module));
    const name = element.insertCell();
    name.style.paddingLeft = `${12 + 18 * depth}px`;
    name.innerHTML = `<span class="twist">${module.children ? (open.has(module) ? "\u25be" : "\u25b8") : ""}</span>`;
    const label = module.layers ? `${module.name} (${module.layers} equal layers)` : module.name;
    const at = words ? label.toLowerCase().indexOf(words) : -1;
    if (at < 0) name.append(label);
    else {
      const mark = document.createElement("mark");
      mark.textContent = label.slice(at, at + words.length);
      name.append(label.slice(0, at), mark, label.slice(at + words.length));
    }
    for (const [title, text] of columns) {
      const cell = element.insertCell();
      cell.textContent = text(module);
      if (title === "placed") cell.className = "words";
      if (title === "compute" && model.seconds) {
        cell.className = "bar";
        cell.style.setProperty("--share", `${(100 * module.seconds) / model.seconds}%`);
      }
    }
    element.module = module;
    element.onmousemove = (event) => showTip(hint(module), event);
    element.onmouseleave = () => showTip("");
    element.onclick = () => toggle(module);
  }
  const hint = (m) => `${m.path || "the model"}\n${((100 * m.seconds) / (model.seconds || 1)).toFixed(1)}% of computation, ` +
    `${((100 * m.sent) / (model.sent || 1)).toFixed(1)}% of what is sent${(m.placed || []).map((each) => `\n${each}`).join("")}`;

  function draw(focus) {
    body.replaceChildren();
    const visit = (module, depth, inside) => { // inside: in a module that matches
      row(module, depth);
      const hit = inside || (kept && kept.get(module) === "hit");
      if (open.has(module)) for (const each of module.children || []) if (!kept || hit || kept.has(each)) visit(each, depth + 1, hit);
    };
    visit(model, 0, false);
    const rows = [...body.rows], first = rows.find((each) => each.module === focus) || rows[0];
    first.tabIndex = 0;
    if (focus) first.focus();
  }
  function toggle(module) {
    if (!module.children) return;
    if (!open.delete(module)) open.add(module);
    showTip("");
    draw(module);
  }
  body.onkeydown = (event) => {
    const current = event.target.closest("tr");
    if (!current) return;
    const go = (to) => { if (to) { current.tabIndex = -1; to.tabIndex = 0; to.focus(); } };
    const level = (each) => Number(each.getAttribute("aria-level"));
    const isOpen = current.getAttribute("aria-expanded") === "true";
    if (event.key === "ArrowDown") go(current.nextElementSibling);
    else if (event.key === "ArrowUp") go(current.previousElementSibling);
    else if (event.key === "Home") go(body.rows[0]);
    else if (event.key === "End") go(body.rows[body.rows.length - 1]);
    else if (event.key === "Enter" || event.key === " ") toggle(current.module);
    else if (event.key === "ArrowRight") {
      if (isOpen) go(current.nextElementSibling);
      else toggle(current.module);
    } else if (event.key === "ArrowLeft") {
      if (isOpen) toggle(current.module);
      else { let up = current; while (up && level(up) >= level(current)) up = up.previousElementSibling; go(up); }
    } else return;
    event.preventDefault();
  };
  document.querySelectorAll("[data-expand]").forEach((button) => {
    button.onclick = () => {
      const visit = (module) => { open.add(module); (module.children || []).forEach(visit); };
      search.value = found.textContent = "";
      kept = null;
      open.clear();
      button.dataset.expand === "all" ? visit(model) : open.add(model);
      draw();
    };
  });
  search.oninput = () => {
    const words = search.value.trim().toLowerCase();
    kept = words ? new Map() : null;
    let hits = 0;
    const visit = (module, around) => {
      if ((module.layers ? module.name : module.path).toLowerCase().includes(words)) {
        hits += 1;
        around.forEach((each) => { open.add(each); if (!kept.has(each)) kept.set(each, "around"); });
        kept.set(module, "hit");
        return; // all inside has the same words in its path
      }
      (module.children || []).forEach((each) => visit(each, [...around, module]));
    };
    if (words) visit(model, []);
    found.textContent = words ? `${hits} ${hits === 1 ? "module" : "modules"}` : "";
    draw();
  };
  draw();
}
if (data.modules) drawModules(data.modules);

// -- the timeline -------------------------------------------------------------------------------------

function drawTimeline(step) {
  const canvas = document.querySelector("#timeline canvas"), pen = canvas.getContext("2d");
  const LANE = 34, LEFT = 96, TOP = 8, FOOT = 26;
  const height = TOP + FOOT + LANE * step.streams.length;
  const lanes = step.streams.map(() => []);
  let end = 0;
  for (let i = 0; i < step.spans.length; i += 6) {
    const [stream, half, label, module, start, length] = step.spans.slice(i, i + 6);
    lanes[stream].push({ stream, half, label, module, start, end: start + length });
    end = Math.max(end, start + length);
  }
  let from = 0, to = end, width = 0;
  const HALVES = { forward: "#4e8fd0", backward: "#e08a3c", optimizer: "#8a9099" };
  const STREAMS = ["#3f9c6b", "#a55fb0", "#c9524f", "#8f7a2e"];
  const colour = (span) => (step.streams[span.stream] === "compute" ? HALVES[step.halves[span.half]]
    : STREAMS[(span.stream - 1) % STREAMS.length]);
  const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 8);
  const time = (at) => from + ((at - LEFT) / (width - LEFT - 8)) * (to - from);

  function fitted(text, room) {
    if (pen.measureText(text).width <= room) return text;
    let length = text.length;
    while (length && pen.measureText(text.slice(0, length) + "\u2026").width > room) length--;
    return text.slice(0, length) + "\u2026";
  }

  function draw() {
    const style = getComputedStyle(root), ratio = devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    const ink = style.getPropertyValue("--ink"), soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
    let tick = 10 ** Math.floor(Math.log10(to - from));
    const most = Math.max(2, Math.min(8, (width - LEFT) / 80)); // labels that have room
    tick *= [0.1, 0.2, 0.5, 1, 2].find((part) => (to - from) / (tick * part) <= most) || 5;
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      pen.fillStyle = line; pen.fillRect(x(t), TOP, 1, height - TOP - FOOT);
      const last = x(t) > width - 28; // a label in the middle would leave the picture
      pen.fillStyle = soft; pen.textAlign = last ? "right" : "center";
      pen.fillText(t ? seconds(t / 1e9) : "0", last ? width - 2 : x(t), height - FOOT / 2);
    }
    lanes.forEach((spans, number) => {
      const y = TOP + LANE * number;
      let drawn = -1;
      pen.save();
      pen.beginPath(); pen.rect(LEFT, 0, width - LEFT, height); pen.clip();
      for (const span of spans) {
        if (span.end < from || span.start > to) continue;
        const left = x(span.start), right = Math.max(x(span.end), left + 0.75);
        if (right <= drawn + 0.5) continue; // hidden by what is drawn: there may be tens of thousands
        drawn = right;
        pen.fillStyle = colour(span);
        pen.fillRect(left, y + 4, Math.max(0.75, right - left - (right - left > 4 ? 1 : 0)), LANE - 10);
        if (right - left > 60) {
          pen.fillStyle = "#fff"; pen.textAlign = "left";
          pen.fillText(fitted(step.labels[span.label], right - left - 9), left + 4, y + LANE / 2 - 1);
        }
      }
      pen.restore();
      pen.fillStyle = ink; pen.textAlign = "right"; pen.fillText(step.streams[number], LEFT - 8, y + LANE / 2 - 1);
    });
    document.getElementById("at").textContent = `${from ? seconds(from / 1e9) : 0} to ${seconds(to / 1e9)} of ${seconds(end / 1e9)}`;
  }
  function show(first, last) {
    const length = Math.min(end, Math.max(last - first, end / 1e5));
    from = Math.min(Math.max(0, first), end - length); to = from + length;
    draw();
  }
  const zoom = (by, around = (from + to) / 2) => show(around - (around - from) / by, around + (to - around) / by);
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  document.querySelectorAll("[data-zoom]").forEach((button) => {
    const by = Number(button.dataset.zoom);
    button.onclick = () => (by ? zoom(by) : show(0, end));
  });
  canvas.onkeydown = (event) => {
    const act = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(1.5), "=": () => zoom(1.5),
      "-": () => zoom(1 / 1.5), Home: () => show(0, end) }[event.key];
    if (act) { act(); event.preventDefault(); }
  };
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 0.8, time(event.offsetX));
  }, { passive: false });
  let held = null;
  canvas.onpointerdown = (event) => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = () => (held = null);
  canvas.onpointerleave = () => showTip("");
  canvas.onpointermove = (event) => {
    if (held !== null) {
      const by = ((held - event.offsetX) / (width - LEFT)) * (to - from);
      held = event.offsetX;
      return show(from + by, to + by);
    }
    const number = Math.floor((event.offsetY - TOP) / LANE), near = (2 * (to - from)) / width, when = time(event.offsetX);
    const over = (lanes[number] || []).filter((span) => span.start - near <= when && when <= span.end + near);
    const span = over.sort((a, b) => b.end - b.start - (a.end - a.start))[0];
    showTip(span && `${step.labels[span.label]}: ${seconds((span.end - span.start) / 1e9)}\n${step.halves[span.half]}` +
      `${step.modules[span.module] ? ` of ${step.modules[span.module]}` : ""}`, event);
  };
  addEventListener("resize", draw);
  draw();
}
if (data.timeline) drawTimeline(data.timeline);
