"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const page = JSON.parse(document.getElementById("page").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colors = 10;
  // Distances between ticks: of steps, of seconds, and of bytes.
  const steps = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  const epochs = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, ...steps];
  const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, ...Array.from({ length: 12 }, (_, power) => 3600 * 2 ** power)];
  const powers = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const live = [];
  let spreading = false;

  // The reader's choices. They are kept in the history entry, so that they survive a reload of the page.
  const choices = {
    axis: "step", smoothing: 0, isLive: true, scroll: null,
    zoom: {}, log: {}, hidden: {}, frames: {}, opened: {}, ...history.state?.report,
  };
  const keep = () => {
    try { history.replaceState({ ...history.state, report: choices }, ""); } catch { /* a frame without a history */ }
  };

  const number = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return String(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
    return String(Number(value.toPrecision(size < 1 ? 3 : 5)));
  };
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${Number(value.toPrecision(3))} ${units[unit]}`;
  };
  const shown = (unit) => (value) => {
    if (value == null) return "–";
    if (unit === "%") return `${Number((100 * value).toPrecision(3))} %`;
    return unit === "B" ? bytes(value) : number(value);
  };
  const clock = (value) => {
    if (value == null) return "–";
    const seconds = Math.round(value);
    const two = (part) => String(part).padStart(2, "0");
    const rest = `${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
    return seconds < 3600 ? rest.replace(/^0/, "") : `${Math.floor(seconds / 3600)}:${rest}`;
  };

  // An exponential mean that weighs its first values rightly.
  const smoothed = (values) => {
    const kept = choices.smoothing;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = kept * sum + (1 - kept) * value;
      weight = kept * weight + (1 - kept);
      return sum / weight;
    });
  };

  // Positions of a run in steps, epochs and seconds. Beyond the last one, the last slope continues.
  const units = ["step", "epoch", "seconds"].filter((unit) => page.places.every((each) => each[unit]?.length > 1));
  const canConvert = (from, to) => units.includes(from) && units.includes(to);
  const converted = (value, run, from, to) => {
    if (from === to) return value;
    const { [from]: given, [to]: wanted } = page.places[run];
    let low = 0, high = given.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (given[middle] <= value) low = middle; else high = middle;
    }
    return wanted[low] + ((value - given[low]) / (given[high] - given[low])) * (wanted[high] - wanted[low]);
  };
  // What is logged is shown along the chosen axis. What is measured at intervals of time stays on the axis of time.
  const axisOf = (chart) => (chart.x === "step" && canConvert("step", choices.axis) ? choices.axis : chart.x);
  const columnsOf = (chart) => {
    const axis = axisOf(chart);
    if (axis === chart.x) return chart.data;
    const [xs, ...columns] = chart.data;
    return uPlot.join(columns.map((column, index) => {
      const points = xs.map((x, at) => [x, column[at]]).filter(([, value]) => value != null);
      return [points.map(([x]) => converted(x, chart.runs[index], chart.x, axis)), points.map(([, value]) => value)];
    }));
  };

  const stacked = (columns) => {
    const sums = columns[0].map(() => 0);
    return columns.map((column) => column.map((value, index) => (value == null ? null : (sums[index] += value)))).reverse();
  };

  // Every chart with the same x axis shows the same stretch of it: all that any of them has, where one shows all of its own.
  const whole = (x) => {
    const [first, last] = [[], []];
    for (const { plot } of live.filter((each) => each.x === x && each.plot)) {
      first.push(plot.data[0][0]);
      last.push(plot.data[0].at(-1));
    }
    return [Math.min(...first), Math.max(...last)];
  };
  const spread = (from, min, max) => {
    if (spreading) return;
    spreading = true;
    const [points] = from.plot.data;
    const [low, high] = whole(from.x);
    const all = min <= points[0] && max >= points.at(-1) && low < high;
    for (const each of live) {
      if ((each !== from || all) && each.x === from.x && each.plot) {
        each.plot.setScale("x", all ? { min: low, max: high } : { min, max });
      }
    }
    if (all) delete choices.zoom[from.x]; else choices.zoom[from.x] = [min, max];
    keep();
    spreading = false;
  };

  // Two fingers zoom, and one moves what is zoomed; vertical moves scroll the page.
  const touch = (entry) => (plot) => {
    const fingers = new Map();
    let before = null;
    const all = () => whole(entry.x);
    const span = () => {
      const xs = [...fingers.values()];
      return { middle: xs.reduce((a, b) => a + b, 0) / xs.length, width: Math.max(...xs) - Math.min(...xs) };
    };
    const start = () => { before = fingers.size ? { ...span(), min: plot.scales.x.min, max: plot.scales.x.max } : null; };
    const leave = (event) => { fingers.delete(event.pointerId); start(); };
    plot.over.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") return;
      fingers.set(event.pointerId, event.clientX);
      start();
    });
    plot.over.addEventListener("pointermove", (event) => {
      if (!before || !fingers.has(event.pointerId)) return;
      fingers.set(event.pointerId, event.clientX);
      const now = span();
      const { width, left } = plot.over.getBoundingClientRect();
      const [low, high] = all();
      const zoom = fingers.size > 1 && now.width > 10 ? before.width / now.width : 1;
      const range = Math.min((before.max - before.min) * zoom, high - low);
      if (fingers.size === 1 && range >= high - low) return;
      const held = before.min + ((before.middle - left) / width) * (before.max - before.min);
      const min = Math.min(Math.max(held - ((now.middle - left) / width) * range, low), high - range);
      plot.setScale("x", { min, max: min + range });
    });
    plot.over.addEventListener("pointerup", leave);
    plot.over.addEventListener("pointercancel", leave);
  };

  const optionsOf = (entry) => {
    const { chart, box, x } = entry;
    const few = chart.data[0].length <= 40;
    const axis = { stroke: () => color("--soft"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
    const several = chart.runs.some((run) => run !== chart.runs[0]);
    const names = chart.stacked ? [...chart.names].reverse() : chart.names;
    const hidden = choices.hidden[chart.key] ?? [];
    const perRun = {};
    const series = names.map((label, index) => {
      const turn = (perRun[chart.runs[index]] = (perRun[chart.runs[index]] ?? -1) + 1);
      const number = chart.stacked ? chart.runs[names.length - 1 - index] : several ? chart.runs[index] : index;
      const stroke = () => color(`--c${number % colors}`);
      const dash = chart.dashed[index] ? [6, 4] : several && turn > 0 && !chart.dashed.includes(true) ? [2, 3] : undefined;
      const show = !hidden.includes(label);
      return chart.stacked
        ? { label, show, stroke, fill: stroke, width: 0, points: { show: false },
            value: (plot, value, at, point) => (point == null ? "–" : shown(chart.unit)(chart.data[names.length - index][point])) }
        : { label, show, stroke, width: 1.75, dash, spanGaps: true, points: { show: few, size: 5, fill: stroke },
            value: (plot, value) => shown(chart.unit)(value) };
    });
    // Behind a smoothed curve are its values.
    const raw = entry.isSmoothed ? series.map((each) => ({ ...each, class: "raw", alpha: 0.25, width: 1, dash: undefined, points: { show: false } })) : [];
    const tall = chart.stacked ? 88 : box.clientWidth < 420 ? 190 : 230;
    const shownAt = x === "seconds" ? clock : number;
    const distances = { seconds: times, epoch: epochs, step: steps };
    return {
      width: box.clientWidth, height: tall,
      series: [{ label: x === "seconds" ? "time" : x, value: (plot, value) => shownAt(value) }, ...series, ...raw],
      scales: {
        x: { time: false },
        y: chart.stacked ? { range: [0, 1] } : choices.log[chart.key] ? { distr: 3 } : chart.unit ? { range: (plot, low, high) => [0, Math.max(1.1 * high, chart.unit === "%" ? 0.05 : 1)] } : {},
      },
      axes: [
        { ...axis, size: 34, space: 70, incrs: distances[x] ?? steps, values: (plot, ticks) => ticks.map(shownAt) },
        { ...axis, size: 62, ...(chart.unit === "B" ? { incrs: powers } : {}), ...(chart.stacked ? { splits: () => [0, 1] } : {}), values: (plot, ticks) => ticks.map((tick) => (tick == null ? "" : shown(chart.unit)(tick))) },
      ],
      legend: { live: true },
      cursor: { drag: { x: true, y: false, dist: 6 }, focus: { prox: -1 }, sync: { key: x, setSeries: false, scales: ["x", null] }, y: false },
      hooks: {
        init: [touch(entry)],
        setScale: [(plot, key) => {
          if (key !== "x" || plot !== entry.plot) return;
          spread(entry, plot.scales.x.min, plot.scales.x.max);
          box.dataset.shown = `${plot.scales.x.min} ${plot.scales.x.max}`;
        }],
        setSeries: [(plot, index, { show }) => {
          if (show == null || index == null || index > names.length) return;
          if (raw.length) plot.setSeries(index + names.length, { show });
          choices.hidden[chart.key] = names.filter((_, each) => !plot.series[each + 1].show);
          keep();
        }],
      },
    };
  };
  const dataOf = (entry) => {
    const [xs, ...columns] = columnsOf(entry.chart);
    if (entry.chart.stacked) return [xs, ...stacked(columns)];
    return entry.isSmoothed ? [xs, ...columns.map(smoothed), ...columns] : [xs, ...columns];
  };
  const draw = (entry) => {
    const { chart } = entry;
    if (entry.plot) entry.plot.destroy();
    entry.plot = null;
    entry.x = axisOf(chart);
    entry.isSmoothed = choices.smoothing > 0 && !chart.stacked && chart.data[0].length > 2;
    entry.plot = new uPlot(optionsOf(entry), dataOf(entry), entry.box);
    const zoom = choices.zoom[entry.x];
    if (zoom) entry.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    // With a single point there is nothing to move along.
    entry.box.dataset.drawn = String(entry.plot.data[0].length);
  };

  const download = (content, type, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    link.download = name.replace(/[^\w.-]+/g, "_");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const fileOf = (entry, ending) => `${page.title}-${entry.chart.title}.${ending}`;
  const saveTable = (entry) => {
    const { chart } = entry;
    const quoted = (name) => (/[",\n]/.test(name) ? `"${name.replaceAll('"', '""')}"` : name);
    // Runs that are compared reach a step at different times.
    const isOne = !chart.runs.some((run) => run !== chart.runs[0]) || chart.stacked;
    const others = isOne && units.includes(chart.x) ? units.filter((unit) => unit !== chart.x) : [];
    const run = chart.stacked ? 0 : chart.runs[0];
    const [xs, ...columns] = chart.data;
    const rows = xs.map((x, at) => [
      x, ...others.map((unit) => Number(converted(x, run, chart.x, unit).toPrecision(6))), ...columns.map((column) => column[at] ?? ""),
    ]);
    const lines = [[chart.x, ...others, ...chart.names].map(quoted), ...rows].map((row) => row.join(","));
    download(`${lines.join("\n")}\n`, "text/csv", fileOf(entry, "csv"));
  };
  const savePicture = (entry) => {
    const source = entry.plot.ctx.canvas, ratio = devicePixelRatio, line = 20 * ratio, pad = 12 * ratio;
    const canvas = document.createElement("canvas"), ink = canvas.getContext("2d");
    const font = `${13 * ratio}px system-ui, sans-serif`;
    ink.font = font;
    // The names of the curves, in as many lines as they need.
    const names = entry.plot.series.slice(1, entry.chart.names.length + 1).filter((each) => each.show);
    const places = [];
    let left = pad, top = 0;
    for (const each of names) {
      const width = ink.measureText(each.label).width + 34 * ratio;
      if (left > pad && left + width > source.width + pad) { left = pad; top += line; }
      places.push([each, left, top]);
      left += width;
    }
    canvas.width = source.width + 2 * pad;
    canvas.height = source.height + 2 * line + top + 2 * pad;
    ink.fillStyle = color("--paper");
    ink.fillRect(0, 0, canvas.width, canvas.height);
    ink.drawImage(source, pad, pad + line);
    ink.textBaseline = "middle";
    ink.fillStyle = color("--text");
    ink.font = `600 ${font}`;
    ink.fillText(entry.chart.title, pad, pad + line / 2);
    ink.font = font;
    for (const [each, x, y] of places) {
      const middle = pad + line * 1.5 + source.height + y;
      ink.fillStyle = each.stroke();
      ink.fillRect(x, middle - 5 * ratio, 10 * ratio, 10 * ratio);
      ink.fillStyle = color("--text");
      ink.fillText(each.label, x + 16 * ratio, middle);
    }
    canvas.toBlob((blob) => download(blob, "image/png", fileOf(entry, "png")));
  };

  const button = (entry, label, title, press, pressed) => {
    const made = document.createElement("button");
    Object.assign(made, { type: "button", textContent: label, title });
    if (pressed != null) made.setAttribute("aria-pressed", String(pressed));
    made.addEventListener("click", () => press(made));
    entry.box.parentElement.querySelector(".head").append(made);
  };

  for (const [index, chart] of charts.entries()) {
    const box = document.getElementById(`chart-${index}`);
    const entry = { chart, box, plot: null, x: chart.x, isSmoothed: false };
    chart.key = `${chart.title} by ${chart.x}`;
    live.push(entry);
    const values = chart.data.slice(1).flat().filter((value) => value != null);
    if (!chart.stacked && !chart.unit && values.length > 1 && values.every((value) => value > 0)) {
      button(entry, "log", "Use a logarithmic scale", (made) => {
        choices.log[chart.key] = !choices.log[chart.key];
        made.setAttribute("aria-pressed", String(choices.log[chart.key]));
        keep();
        draw(entry);
      }, Boolean(choices.log[chart.key]));
    }
    button(entry, "CSV", "Save the values as a table", () => saveTable(entry));
    button(entry, "PNG", "Save the chart as a picture", () => savePicture(entry));
    draw(entry);
    let width = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth === width) return;
      width = box.clientWidth;
      entry.plot.setSize({ width, height: entry.plot.height });
    }).observe(box);
  }
  const redraw = () => live.forEach(({ plot }) => plot.redraw(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);

  const tools = document.getElementById("tools");
  if (tools) {
    const axis = document.getElementById("axis"), smoothing = document.getElementById("smoothing");
    for (const option of [...axis.options]) if (!canConvert("step", option.value) && option.value !== "step") option.remove();
    axis.value = axisOf({ x: "step" });
    axis.addEventListener("change", () => { choices.axis = axis.value; keep(); live.forEach(draw); });
    const say = () => { smoothing.nextElementSibling.textContent = choices.smoothing.toFixed(2); };
    smoothing.value = choices.smoothing;
    say();
    let waits = false;
    smoothing.addEventListener("input", () => {
      choices.smoothing = Number(smoothing.value);
      say();
      if (waits) return;
      waits = true;
      setTimeout(() => { waits = false; keep(); live.filter(({ chart }) => !chart.stacked).forEach(draw); }, 20);
    });
    tools.hidden = false;
  }

  // Logged pictures: one step at a time, the newest unless the reader chose another.
  for (const slider of document.querySelectorAll(".steps")) {
    const frames = [...slider.closest("figure").querySelectorAll(".frame")];
    const show = () => {
      frames.forEach((frame, index) => { frame.hidden = index !== Number(slider.value); });
      slider.nextElementSibling.textContent = frames[slider.value].dataset.step;
    };
    const chosen = frames.findIndex((frame) => frame.dataset.step === choices.frames[slider.name]);
    slider.value = chosen < 0 ? frames.length - 1 : chosen;
    slider.addEventListener("input", () => {
      const isNewest = Number(slider.value) === frames.length - 1;
      if (isNewest) delete choices.frames[slider.name]; else choices.frames[slider.name] = frames[slider.value].dataset.step;
      keep();
      show();
    });
    show();
    slider.closest("label").hidden = false;
  }

  const details = [...document.querySelectorAll("details")];
  for (const each of details) {
    const name = each.querySelector("summary").textContent;
    each.open = choices.opened[name] ?? each.open;
    each.addEventListener("toggle", () => { choices.opened[name] = each.open; keep(); });
  }
  addEventListener("beforeprint", () => details.forEach((each) => { each.open = true; }));
  for (const each of document.querySelectorAll(".output")) each.scrollTop = each.scrollHeight;

  // The page of a running run loads itself again after each update, unless the reader is busy with it.
  if (page.state === "running") {
    const toggle = document.getElementById("live"), stale = document.getElementById("stale");
    const say = () => { toggle.setAttribute("aria-pressed", String(choices.isLive)); };
    let due = performance.now() + 1000 * page.refresh, isHeld = false;
    toggle.addEventListener("click", () => { choices.isLive = !choices.isLive; keep(); say(); });
    say();
    toggle.hidden = false;
    addEventListener("pointerdown", () => { isHeld = true; });
    for (const name of ["pointerup", "pointercancel", "blur"]) addEventListener(name, () => { isHeld = false; });
    setInterval(() => {
      const late = Date.now() / 1000 - page.due;
      stale.hidden = late < 120;
      stale.textContent = `No update for ${Math.floor(late / 60) || 1} min: the run may have been killed.`;
      const isBusy = isHeld || document.hidden || !getSelection().isCollapsed;
      if (!choices.isLive || isBusy || performance.now() < due) return;
      due = performance.now() + 60000;
      choices.scroll = scrollY;
      keep();
      history.scrollRestoration = "manual";
      location.reload();
    }, 500);
  }
  if (choices.scroll != null) {
    scrollTo(0, choices.scroll);
    history.scrollRestoration = "auto";
    choices.scroll = null;
    keep();
  }
  document.documentElement.dataset.charts = String(live.length);
})();
