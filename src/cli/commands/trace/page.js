"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
// Distinct also to most who do not see all colours (Okabe and Ito), darker ones first.
const colours = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#b5a300", "#5f6f7a", "#a6761d"];
const shades = { pause: "rgba(163, 18, 27, 0.13)", resume: "rgba(0, 120, 60, 0.13)", trim: "rgba(0, 70, 160, 0.13)", change: "rgba(150, 100, 0, 0.08)" };
const MOST_ROWS = 200;

function size(bytes) {
  if (bytes == null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit++;
  }
  return `${unit === 0 || Number.isInteger(bytes) ? bytes : bytes.toFixed(2)} ${units[unit]}`;
}

function seconds(ms) {
  return ms == null ? "" : `${(ms / 1000).toFixed(3)} s`;
}

function element(name, text, parent, className) {
  const made = document.createElement(name);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
}

/** Each line above those before it that are shown, and what to fill between them. */
function stacked(gpu, isShown) {
  const sums = gpu.times.map(() => 0);
  const lines = gpu.bytes.map((bytes, i) => (isShown(i) ? bytes.map((value, at) => (sums[at] += value)) : bytes));
  const bands = [];
  for (let below = 0; below < lines.length; below++) {
    const above = lines.findIndex((_, i) => i > below && isShown(i));
    if (isShown(below) && above > 0) bands.push({ series: [above + 1, below + 1] });
  }
  return { lines: [gpu.times, ...lines], bands };
}

/** Pauses, resumes and failures, behind and over the areas. */
const marks = {
  drawClear: (chart) => {
    const { ctx, bbox } = chart;
    for (const slice of data.slices) {
      const from = Math.max(chart.valToPos(slice.from, "x", true), bbox.left);
      const to = Math.min(chart.valToPos(slice.to, "x", true), bbox.left + bbox.width);
      if (to < bbox.left || from > bbox.left + bbox.width) continue;
      ctx.fillStyle = shades[slice.verb];
      ctx.fillRect(from, bbox.top, Math.max(to - from, 2), bbox.height);
    }
  },
  draw: (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = "#a3121b";
    ctx.lineWidth = 2;
    ctx.setLineDash([6, 4]);
    for (const { at } of data.failures) {
      const x = chart.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  },
};

function draw(gpu, parent) {
  element("h2", gpu.name, parent);
  if (gpu.owners.length === 0) return element("p", "Nobody had memory here.", parent, "quiet") && null;
  const now = element("p", "", parent, "now");
  const colour = (i) => colours[i % colours.length];
  const lines = gpu.owners.map((name, i) => ({
    label: name,
    stroke: colour(i),
    fill: colour(i) + "b0",
    width: 1,
    paths: uPlot.paths.stepped({ align: 1 }),
    points: { show: false },
    value: (_, __, ___, at) => size(at == null ? gpu.bytes[i].at(-1) : gpu.bytes[i][at]),
  }));
  const first = stacked(gpu, () => true);
  const restack = (chart) => {
    const { lines, bands } = stacked(gpu, (i) => chart.series[i + 1].show);
    chart.delBand(null);
    bands.forEach((band) => chart.addBand(band));
    chart.setData(lines, false);
    chart.redraw();
  };
  const tell = (chart) => {
    const { left } = chart.cursor;
    if (left == null || left < 0) return void (now.textContent = "");
    const at = chart.posToVal(left, "x");
    // As wide as it is drawn.
    const near = chart.posToVal(left + 2, "x") - at;
    const under = data.slices.filter((slice) => slice.from <= at + near && at - near <= slice.to);
    const failed = data.failures.filter((failure) => Math.abs(failure.at - at) <= near);
    now.textContent = [...under, ...failed].map((one) => one.what).join("; ");
  };
  const options = {
    width: parent.clientWidth,
    height: 320,
    series: [{ label: "at", value: (_, value) => seconds(value) }, ...lines],
    bands: first.bands,
    scales: { x: { time: false }, y: { range: (_, __, max) => [0, Math.max(max * 1.05, 1)] } },
    axes: [
      { values: (_, all) => all.map((ms) => `${+(ms / 1000).toPrecision(10)} s`) },
      { size: 80, incrs: Array.from({ length: 50 }, (_, power) => 2 ** power), values: (_, all) => all.map(size) },
    ],
    cursor: { sync: { key: "all" } },
    hooks: { drawClear: [marks.drawClear], draw: [marks.draw], setCursor: [tell], setSeries: [restack] },
  };
  return new uPlot(options, first.lines, parent);
}

function peaks(gpu, parent) {
  const list = element("table", null, parent, "list");
  const head = element("tr", null, list);
  ["whose", "at most", "last"].forEach((title) => element("th", title, head));
  gpu.owners.forEach((name, i) => {
    const row = element("tr", null, list);
    element("td", name, row);
    element("td", size(gpu.peaks[i]), row, "number");
    element("td", size(gpu.bytes[i].at(-1)), row, "number");
  });
}

function events(parent) {
  const slices = data.slices.map((one) => ({ at: one.from, what: one.what, took: seconds(one.to - one.from) }));
  const failures = data.failures.map((one) => ({ ...one, took: "", failed: true }));
  const all = [...slices, ...failures].sort((one, other) => one.at - other.at);
  if (all.length === 0) return;
  element("h2", "Pauses, resumes and failures", parent);
  const list = element("table", null, parent, "list");
  const head = element("tr", null, list);
  ["at", "what", "took"].forEach((title) => element("th", title, head));
  for (const one of all.slice(-MOST_ROWS)) {
    const row = element("tr", null, list, one.failed ? "failed" : "");
    [seconds(one.at), one.what, one.took].forEach((text, i) => element("td", text, row, i === 1 ? "" : "number"));
  }
  if (all.length > MOST_ROWS) element("p", `The last ${MOST_ROWS} of ${all.length}.`, parent, "quiet");
}

const about = [`From ${new Date(data.began_at_ms).toLocaleString()} on. Drag over a chart to look closer, double-click to go back.`];
if (data.slices.length) about.push("Red: a pause; green: a resume; blue: a trim.");
if (data.failures.length) about.push("Dashed: memory was asked for, and there was none.");
if (data.missed) about.push(`${data.missed} older events were overwritten.`);
document.getElementById("about").textContent = [...about, ...data.ended].join(" ");

const charts = data.gpus.map((gpu) => {
  const section = element("section", null, document.getElementById("charts"));
  const chart = draw(gpu, section);
  if (chart) peaks(gpu, section);
  return chart;
});
events(document.getElementById("events"));
addEventListener("resize", () => charts.forEach((chart) => chart?.setSize({ width: chart.root.parentElement.clientWidth, height: 320 })));
