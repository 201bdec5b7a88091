"use strict";
// Draws the timeline: lanes of bursts that can be moved, zoomed and pointed at. Times are microseconds.
(() => {
  const source = document.getElementById("timeline-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const box = document.querySelector(".timeline");
  const canvas = box.querySelector("canvas");
  const tip = box.querySelector(".tip");
  const pen = canvas.getContext("2d");
  const AXIS = 26, SHORTEST = 50;
  for (const lane of data.lanes) unpack(lane);
  const slowByPlace = new Map();
  for (const [at, took, place, says] of data.slow) {
    if (!slowByPlace.has(place)) slowByPlace.set(place, []);
    slowByPlace.get(place).push({ at, took, says });
  }
  let from = 0, to = data.span, colours = {}, width = 0, layout = {};

  function unpack(lane) {
    const count = lane.bursts.length / 3;
    lane.starts = new Float64Array(count);
    lane.ends = new Float64Array(count);
    lane.mixes = new Uint32Array(count);
    let at = 0;
    for (let i = 0; i < count; i++) {
      lane.starts[i] = at + lane.bursts[3 * i];
      at = lane.ends[i] = lane.starts[i] + lane.bursts[3 * i + 1];
      lane.mixes[i] = lane.bursts[3 * i + 2];
    }
    lane.bursts = null;
  }

  function measure() {
    width = canvas.clientWidth;
    const narrow = width < 640;
    // On a narrow page labels are above the lanes, else beside them.
    const gutter = narrow ? 0 : Math.min(230, Math.max(110, width * 0.16));
    const lane = data.lanes.length > 24 ? 16 : 24;
    layout = { narrow, gutter, lane, label: narrow ? 18 : 0, gap: narrow ? 8 : 6, plot: width - gutter };
    const height = AXIS + data.lanes.length * (layout.lane + layout.label + layout.gap) + 4;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    layout.height = height;
    const style = getComputedStyle(document.documentElement);
    for (const name of ["env", "policy", "reset", "waiting", "yours", "deliver", "weights", "other",
      "ink", "soft", "line", "grid", "card", "bad"]) colours[name] = style.getPropertyValue("--" + name).trim();
    layout.font = getComputedStyle(document.body).fontFamily;
    draw();
  }

  const across = (time) => layout.gutter + (time - from) / (to - from) * layout.plot;
  const timeAt = (x) => from + (x - layout.gutter) / layout.plot * (to - from);
  const topOf = (number) => AXIS + number * (layout.lane + layout.label + layout.gap) + layout.label;

  // The first burst that ends behind a time.
  function firstAfter(lane, time) {
    let low = 0, high = lane.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.ends[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    pen.clearRect(0, 0, width, layout.height);
    drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(layout.gutter, 0, layout.plot, layout.height);
    pen.clip();
    data.lanes.forEach(drawLane);
    drawArrows();
    data.lanes.forEach(drawMarks);
    pen.restore();
    data.lanes.forEach(drawLabel);
  }

  function drawLane(lane, number) {
    const top = topOf(number), height = layout.lane;
    pen.fillStyle = colours.grid;
    pen.fillRect(layout.gutter, top + height - 1, layout.plot, 1);
    // Several bursts may share a pixel: their shares are added up.
    let column = null;
    const flush = () => { if (column) paint(column, top, height); column = null; };
    for (let i = firstAfter(lane, from); i < lane.starts.length && lane.starts[i] < to; i++) {
      const left = across(lane.starts[i]), right = across(lane.ends[i]);
      if (right - left >= 1.5) {
        flush();
        paint({ left, right, shares: data.mixes[lane.mixes[i]] }, top, height);
        continue;
      }
      const pixel = Math.floor(left);
      if (!column || column.pixel !== pixel) {
        flush();
        column = { pixel, left: pixel, right: pixel + 1, sums: new Map() };
      }
      for (const [kind, share] of data.mixes[lane.mixes[i]])
        column.sums.set(kind, (column.sums.get(kind) || 0) + share * (right - left));
    }
    flush();
  }

  function paint(burst, top, height) {
    const shares = burst.shares || [...burst.sums];
    let whole = 0;
    for (const [, share] of shares) whole += share;
    let bottom = top + height;
    const byColour = new Map();
    for (const [kind, share] of shares) {
      const name = data.kinds[kind][1];
      byColour.set(name, (byColour.get(name) || 0) + share);
    }
    // Always in the same order, so that neighbours make bands.
    for (const name of ["env", "policy", "reset", "yours", "deliver", "weights", "other", "waiting"]) {
      const share = byColour.get(name);
      if (!share) continue;
      const part = share / whole * height;
      pen.fillStyle = colours[name];
      pen.fillRect(burst.left, bottom - part, Math.max(0.6, burst.right - burst.left), part);
      bottom -= part;
    }
  }

  function drawMarks(lane, number) {
    const top = topOf(number), height = layout.lane;
    for (const [at, says] of lane.marks) {
      if (at < from || at > to) continue;
      const x = across(at);
      pen.fillStyle = colours.bad;
      pen.fillRect(x - 1, top - 3, 2, height + 6);
      const text = "↻ " + says.replace(lane.place + " was ", "");
      pen.font = "600 11px " + layout.font;
      const size = pen.measureText(text).width;
      const left = Math.max(layout.gutter, Math.min(x + 4, width - size - 10));
      pen.fillStyle = colours.card;
      pen.fillRect(left, top + height / 2 - 8, size + 8, 16);
      pen.fillStyle = colours.bad;
      pen.textBaseline = "middle";
      pen.textAlign = "left";
      pen.fillText(text, left + 4, top + height / 2);
    }
    if (lane.thread !== "steps" && lane.thread !== "collector") return;
    for (const slow of slowByPlace.get(lane.place) || []) {
      const x = across(slow.at + slow.took / 2);
      pen.fillStyle = colours.ink;
      pen.beginPath();
      pen.moveTo(x - 4, top - 6);
      pen.lineTo(x + 4, top - 6);
      pen.lineTo(x, top);
      pen.fill();
    }
  }

  function drawArrows() {
    pen.strokeStyle = colours.weights;
    pen.globalAlpha = 0.55;
    pen.lineWidth = 1;
    pen.beginPath();
    for (const [fromLane, start, toLane, end] of data.arrows) {
      if (end < from || start > to) continue;
      const down = toLane > fromLane;
      pen.moveTo(across(start), topOf(fromLane) + (down ? layout.lane : 0));
      pen.lineTo(across(end), topOf(toLane) + (down ? 0 : layout.lane));
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  function nameOf(lane) {
    const same = data.lanes.filter((other) => other.place === lane.place).length;
    return same > 1 ? lane.place + ": " + lane.thread : lane.place;
  }

  function drawLabel(lane, number) {
    const top = topOf(number);
    pen.fillStyle = colours.ink;
    pen.font = "13px " + layout.font;
    pen.textAlign = "left";
    pen.textBaseline = layout.narrow ? "alphabetic" : "middle";
    const room = (layout.narrow ? width : layout.gutter - 12);
    let text = nameOf(lane);
    if (pen.measureText(text).width > room) {
      while (text.length > 4 && pen.measureText(text + "…").width > room) text = text.slice(0, -1);
      text += "…";
    }
    if (layout.narrow) {
      const size = pen.measureText(text).width;
      pen.fillStyle = colours.card;
      pen.fillRect(0, top - 17, size + 5, 15);
      pen.fillStyle = colours.ink;
    }
    pen.fillText(text, 0, layout.narrow ? top - 4 : top + layout.lane / 2);
  }

  function show(time, step) {
    if (step >= 1e6) return (time / 1e6).toFixed(0) + " s";
    if (step >= 1e3) {
      const digits = Math.max(0, Math.ceil(-Math.log10(step / 1e6)));
      return (time / 1e6).toFixed(digits) + " s";
    }
    return (time / 1e3).toFixed(Math.max(0, Math.ceil(-Math.log10(step / 1e3)))) + " ms";
  }

  function drawAxis() {
    const rough = (to - from) / Math.max(2, Math.floor(layout.plot / 110));
    const size = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = size * ([1, 2, 5, 10].find((factor) => size * factor >= rough) || 10);
    pen.font = "12px " + layout.font;
    pen.textBaseline = "alphabetic";
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = across(tick), text = show(tick, step), half = pen.measureText(text).width / 2;
      pen.fillStyle = colours.grid;
      pen.fillRect(x, AXIS - 8, 1, layout.height);
      pen.fillStyle = colours.soft;
      pen.textAlign = "left";
      pen.fillText(text, Math.min(Math.max(x - half, layout.gutter), width - 2 * half), 12);
    }
  }

  // -- moving, zooming, pointing --------------------------------------------------------------------------------------

  function look(newFrom, newTo) {
    const length = Math.min(data.span, Math.max(SHORTEST, newTo - newFrom));
    from = Math.min(Math.max(0, newFrom), data.span - length);
    to = from + length;
    tip.hidden = true;
    window.requestAnimationFrame(draw);
  }

  function zoom(factor, around) {
    const length = Math.min(data.span, Math.max(SHORTEST, (to - from) * factor));
    const share = (around - from) / (to - from);
    look(around - share * length, around + (1 - share) * length);
  }

  const took = (us) => us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us + " µs";

  function point(x, y) {
    const number = data.lanes.findIndex((_, at) => y >= topOf(at) - 7 && y <= topOf(at) + layout.lane);
    tip.hidden = true;
    if (number < 0 || x < layout.gutter) return;
    const lane = data.lanes[number], time = timeAt(x), near = (to - from) / layout.plot * 5;
    const lines = [];
    for (const [at, says] of lane.marks) if (Math.abs(at - time) < near) lines.push(says);
    for (const slow of slowByPlace.get(lane.place) || [])
      if (time > slow.at - near && time < slow.at + slow.took + near) lines.push(slow.says + ": " + took(slow.took));
    for (const [, , toLane, end, says] of data.arrows)
      if (toLane === number && says && Math.abs(end - time) < near) { lines.push("first steps with " + says); break; }
    const at = firstAfter(lane, time);
    if (at < lane.starts.length && lane.starts[at] <= time) {
      const shares = data.mixes[lane.mixes[at]];
      const length = took(lane.ends[at] - lane.starts[at]);
      if (shares.length === 1) lines.push(data.kinds[shares[0][0]][0] + ", " + length);
      else lines.push("a burst of " + length, ...shares.map(([kind, share]) => share + " % " + data.kinds[kind][0]));
    }
    if (!lines.length) return;
    tip.textContent = [nameOf(lane) + " at " + show(time, 1e3), ...lines].join("\n");
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(x + 12, width - tip.offsetWidth - 2)) + "px";
    tip.style.top = topOf(number) + layout.lane + 6 + "px";
  }

  const fingers = new Map();
  const place = (event) => {
    const edge = canvas.getBoundingClientRect();
    return { x: event.clientX - edge.left, y: event.clientY - edge.top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, place(event));
    canvas.classList.add("moving");
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event), before = fingers.get(event.pointerId);
    if (!before) { point(now.x, now.y); return; }
    const perPixel = (to - from) / layout.plot;
    if (fingers.size === 1) {
      if (now.x !== before.x) look(from - (now.x - before.x) * perPixel, to - (now.x - before.x) * perPixel);
    } else {
      const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
      const apart = Math.abs(before.x - other.x), nowApart = Math.abs(now.x - other.x);
      if (apart > 8 && nowApart > 8) zoom(apart / nowApart, timeAt(other.x));
    }
    fingers.set(event.pointerId, now);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
    const now = place(event);
    fingers.delete(event.pointerId);
    canvas.classList.remove("moving");
    if (name === "pointerup") point(now.x, now.y);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, timeAt(place(event).x)));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), timeAt(place(event).x));
  }, { passive: false });
  const acts = {
    in: () => zoom(0.5, (from + to) / 2),
    out: () => zoom(2, (from + to) / 2),
    all: () => look(0, data.span),
    left: () => look(from - (to - from) / 4, to - (to - from) / 4),
    right: () => look(from + (to - from) / 4, to + (to - from) / 4),
  };
  for (const button of document.querySelectorAll("[data-do]"))
    button.addEventListener("click", () => acts[button.dataset.do]());
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[keys[event.key]]();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", measure);
  new ResizeObserver(() => { if (canvas.clientWidth !== width) measure(); }).observe(box);
  measure();
})();
