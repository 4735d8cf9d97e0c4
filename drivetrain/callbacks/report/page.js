"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colors = 10;
  // Distances between ticks: of steps, of seconds, and of bytes.
  const steps = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, ...Array.from({ length: 12 }, (_, power) => 3600 * 2 ** power)];
  const powers = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const live = [];
  let spreading = false;

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
    const keep = 0.9;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  };
  const stacked = (columns) => {
    const sums = columns[0].map(() => 0);
    return columns.map((column) => column.map((value, index) => (value == null ? null : (sums[index] += value)))).reverse();
  };

  // Every chart with the same x axis shows the same stretch of it: all that any of them has, where one shows all of its own.
  const whole = (x) => {
    const [first, last] = [[], []];
    for (const { chart } of live.filter((each) => each.chart.x === x)) {
      first.push(chart.data[0][0]);
      last.push(chart.data[0].at(-1));
    }
    return [Math.min(...first), Math.max(...last)];
  };
  const spread = (from, min, max) => {
    if (spreading) return;
    spreading = true;
    const [points] = from.chart.data;
    const [low, high] = whole(from.chart.x);
    const all = min <= points[0] && max >= points.at(-1) && low < high;
    for (const each of live) {
      if ((each !== from || all) && each.chart.x === from.chart.x) {
        each.plot.setScale("x", all ? { min: low, max: high } : { min, max });
      }
    }
    spreading = false;
  };

  // Two fingers zoom, and one moves what is zoomed; vertical moves scroll the page.
  const touch = (entry) => (plot) => {
    const fingers = new Map();
    let before = null;
    const all = () => whole(entry.chart.x);
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
    const { chart, box } = entry;
    const few = chart.data[0].length <= 40;
    const axis = { stroke: () => color("--soft"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false } };
    const several = chart.runs.some((run) => run !== chart.runs[0]);
    const names = chart.stacked ? [...chart.names].reverse() : chart.names;
    const perRun = {};
    const series = names.map((label, index) => {
      const turn = (perRun[chart.runs[index]] = (perRun[chart.runs[index]] ?? -1) + 1);
      const number = chart.stacked ? chart.runs[names.length - 1 - index] : several ? chart.runs[index] : index;
      const stroke = () => color(`--c${number % colors}`);
      const dash = chart.dashed[index] ? [6, 4] : several && turn > 0 && !chart.dashed.includes(true) ? [2, 3] : undefined;
      return chart.stacked
        ? { label, stroke, fill: stroke, width: 0, points: { show: false },
            value: (plot, value, at, point) => (point == null ? "–" : shown(chart.unit)(chart.data[names.length - index][point])) }
        : { label, stroke, width: 1.75, dash, spanGaps: true, points: { show: few, size: 5, fill: stroke },
            value: (plot, value) => shown(chart.unit)(value) };
    });
    const tall = chart.stacked ? 88 : box.clientWidth < 420 ? 190 : 230;
    return {
      width: box.clientWidth, height: tall,
      series: [{ label: chart.x === "seconds" ? "time" : chart.x, value: (plot, value) => (chart.x === "seconds" ? clock(value) : number(value)) }, ...series],
      scales: {
        x: { time: false },
        y: chart.stacked ? { range: [0, 1] } : entry.log ? { distr: 3 } : chart.unit ? { range: (plot, low, high) => [0, Math.max(1.1 * high, chart.unit === "%" ? 0.05 : 1)] } : {},
      },
      axes: [
        { ...axis, size: 34, space: 70, ...(chart.x === "seconds" ? { incrs: times, values: (plot, ticks) => ticks.map(clock) } : { incrs: steps, values: (plot, ticks) => ticks.map(number) }) },
        { ...axis, size: 62, ...(chart.unit === "B" ? { incrs: powers } : {}), ...(chart.stacked ? { splits: () => [0, 1] } : {}), values: (plot, ticks) => ticks.map((tick) => (tick == null ? "" : shown(chart.unit)(tick))) },
      ],
      legend: { live: true },
      cursor: { drag: { x: true, y: false, dist: 6 }, focus: { prox: -1 }, sync: { key: chart.x, setSeries: false, scales: ["x", null] }, y: false },
      hooks: {
        init: [touch(entry)],
        setScale: [(plot, key) => {
          if (key !== "x" || !entry.plot) return;
          spread(entry, plot.scales.x.min, plot.scales.x.max);
          box.dataset.shown = `${plot.scales.x.min} ${plot.scales.x.max}`;
        }],
      },
    };
  };
  const dataOf = ({ chart, smooth }) => {
    const [xs, ...columns] = chart.data;
    if (chart.stacked) return [xs, ...stacked(columns)];
    return [xs, ...(smooth ? columns.map(smoothed) : columns)];
  };
  const draw = (entry) => {
    const kept = entry.plot && { min: entry.plot.scales.x.min, max: entry.plot.scales.x.max };
    if (entry.plot) entry.plot.destroy();
    entry.plot = null;
    entry.plot = new uPlot(optionsOf(entry), dataOf(entry), entry.box);
    if (kept && kept.min != null) entry.plot.setScale("x", kept);
    // With a single point there is nothing to move along.
    entry.box.dataset.drawn = String(entry.plot.data[0].length);
  };
  const button = (entry, label, title, name) => {
    const made = document.createElement("button");
    Object.assign(made, { type: "button", textContent: label, title });
    made.setAttribute("aria-pressed", "false");
    made.addEventListener("click", () => {
      entry[name] = !entry[name];
      made.setAttribute("aria-pressed", String(entry[name]));
      draw(entry);
    });
    entry.box.parentElement.querySelector(".head").append(made);
  };

  for (const [index, chart] of charts.entries()) {
    const box = document.getElementById(`chart-${index}`);
    const entry = { chart, box, plot: null, log: false, smooth: false };
    live.push(entry);
    if (!chart.stacked) {
      const values = chart.data.slice(1).flat().filter((value) => value != null);
      if (chart.data[0].length > 40) button(entry, "smooth", "Show a running mean", "smooth");
      if (!chart.unit && values.length > 1 && values.every((value) => value > 0)) button(entry, "log", "Use a logarithmic scale", "log");
    }
    draw(entry);
    let width = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth === width) return;
      width = box.clientWidth;
      entry.plot.setSize({ width, height: entry.plot.height });
    }).observe(box);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.forEach(({ plot }) => plot.redraw(false)));
  document.documentElement.dataset.charts = String(live.length);
})();
