import { choice, count, duration, el } from "./dom.js";
import { KINDS } from "./run.js";

// The timeline of the devices of several runs, on one axis, as a canvas.

const ROW = 26;
const GAP = 10;
const MODE = 5; // height of the band of modes above a target's row
const AXIS = 22;
const LABEL = 92;
const MOST_PIXELS = 12000;
const ZOOMS = [1, 2, 4, 8];
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000];

/** Draws what each device did; `setRuns` gives the runs as [title, run] pairs. */
export class Timeline {
  constructor() {
    this._canvas = el("canvas", {
      tabIndex: 0,
      role: "img",
      on: {
        pointermove: (event) => this._onPointer(event),
        pointerleave: () => this._tell(null),
        keydown: (event) => this._onKey(event),
      },
    });
    this._labels = el("div", { className: "timeline-labels", "aria-hidden": "true" });
    this._strip = el("div", { className: "timeline-strip" }, this._canvas);
    this._legend = el("ul", { className: "legend kinds" });
    this._detail = el("p", { className: "detail", "aria-live": "polite" });
    this._zoom = el("div");
    this._totals = el("ul", { className: "totals" });
    this.node = el(
      "section",
      { className: "timeline", "aria-label": "Timeline of the devices" },
      el("div", { className: "section-head" }, el("h3", { textContent: "Both devices" }), this._zoom),
      el("div", { className: "timeline-body" }, this._labels, this._strip),
      this._detail,
      this._legend,
      el("details", {}, el("summary", { textContent: "Sums" }), this._totals),
    );
    this._rows = [];
    this._runs = [];
    this._spans = [];
    this._told = null;
    this._linked = null; // {run, forward, block} of the token pointed at
    this._factor = 1;
    this._waiting = false;
    new ResizeObserver(() => this._drawSoon()).observe(this._strip);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this._setZoom(1);
  }

  /** Sets what is shown; `times` holds for each run the time up to which it is drawn. */
  setRuns(runs, times) {
    this._runs = runs;
    this._times = times;
    this._rows = runs.flatMap(([title, run]) => [
      { title, device: "target", run },
      ...(run.hasDraft ? [{ title, device: "draft", run }] : []),
    ]);
    this._drawSoon();
  }

  /** Marks the forward and the block of a token; null marks nothing. */
  link(run, token) {
    this._linked =
      token === null
        ? null
        : { run, forward: token.forward, block: token.source === "target" ? null : token.block };
    this._drawSoon();
  }

  _setZoom(factor) {
    this._factor = factor;
    const options = ZOOMS.map((zoom) => [zoom, zoom === 1 ? "whole" : `${zoom}×`]);
    this._zoom.replaceChildren(choice("Zoom", options, factor, (zoom) => this._setZoom(zoom)));
    this.draw();
  }

  _drawSoon() {
    if (this._waiting) return;
    this._waiting = true;
    requestAnimationFrame(() => {
      this._waiting = false;
      this.draw();
    });
  }

  draw() {
    const fit = this._strip.clientWidth;
    if (!fit || !this._rows.length) return;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const width = Math.min(fit * this._factor, MOST_PIXELS);
    const height = this._rows.length * (ROW + GAP) + AXIS;
    this._canvas.width = width * ratio;
    this._canvas.height = height * ratio;
    this._canvas.style.width = `${width}px`;
    this._canvas.style.height = `${height}px`;
    const pen = this._canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(this._canvas);
    this._colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this._total = Math.max(1, ...this._runs.map(([, run]) => run.end));
    this._scale = (width - 2) / this._total;
    this._spans = [];
    this._drawAxis(pen, width, height);
    for (const [index, row] of this._rows.entries()) this._drawRow(pen, row, index, width);
    this._drawLabels();
    this._drawLegend();
    this._canvas.setAttribute(
      "aria-label",
      `${count(this._spans.length, "stretch").replace("stretchs", "stretches")} of ` +
        `${count(this._rows.length, "device row")} in ${duration(this._total)}; ` +
        "arrow keys go from one to the next",
    );
  }

  _drawAxis(pen, width, height) {
    const step = STEPS.find((each) => each * this._scale >= 64) ?? STEPS.at(-1);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this._colour("faint");
    pen.strokeStyle = this._colour("line");
    pen.lineWidth = 1;
    for (let at = 0; at <= this._total; at += step) {
      const x = Math.round(at * this._scale) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, height - AXIS + 4);
      pen.stroke();
      const text = step >= 1000 ? `${at / 1000} s` : `${+at.toFixed(1)} ms`;
      const size = pen.measureText(text).width;
      if (x + size + 3 < width) pen.fillText(text, x + 3, height - 6);
    }
  }

  _drawRow(pen, { device, run }, index, width) {
    const top = index * (ROW + GAP) + MODE + 2;
    const until = this._times.get(run) ?? Infinity;
    const place = (span) => {
      const left = span.start * this._scale;
      return [left, Math.max((Math.min(span.end, until) - span.start) * this._scale, 1)];
    };
    if (device === "target") {
      for (const stretch of run.modes) {
        if (stretch.start > until) continue;
        const [left, size] = place(stretch);
        pen.fillStyle = this._colour(stretch.mode);
        pen.fillRect(left, top - MODE - 1, size, MODE - 2);
      }
    }
    for (const span of run.spans) {
      if (span.device !== device || span.start > until) continue;
      const [left, size] = place(span);
      const inset = span.kind === "wait" || span.kind === "queue" ? ROW / 2 - 4 : 2;
      pen.fillStyle = this._colour(span.kind);
      const gap = size > 3 ? 0.75 : 0; // so that two neighbours can be told apart
      pen.fillRect(left, top + inset, size - gap, ROW - MODE - 2 * inset);
      const isLinked =
        this._linked?.run === run &&
        ((span.forward !== undefined && span.forward === this._linked.forward) ||
          (span.block !== undefined && span.block === this._linked.block));
      this._spans.push({ span, row: index, left, size, top });
      if (isLinked || this._told === span) {
        pen.strokeStyle = this._colour("ink");
        pen.lineWidth = 2;
        pen.strokeRect(left, top, Math.max(size, 3), ROW - MODE);
      }
    }
    for (const mark of run.marks) {
      if (mark.device !== device || mark.at > until) continue;
      const x = mark.at * this._scale;
      pen.fillStyle = this._colour("selection");
      pen.beginPath();
      pen.moveTo(x - 5, top - MODE - 1);
      pen.lineTo(x + 5, top - MODE - 1);
      pen.lineTo(x, top + 5);
      pen.fill();
      pen.fillRect(x - 0.75, top, 1.5, ROW - MODE);
      this._spans.push({
        span: { device, kind: "mark", start: mark.at, end: mark.at, note: mark.note },
        row: index,
        left: x - 5,
        size: 10,
        top,
      });
    }
    if (until < run.end) {
      pen.fillStyle = this._colour("ink");
      pen.fillRect(Math.min(until * this._scale, width - 1), top - MODE, 1.5, ROW);
    }
  }

  _drawLabels() {
    const nodes = this._rows.map(({ title, device }) =>
      el("span", {}, el("b", { textContent: device }), ` ${title}`),
    );
    this._labels.style.width = `${LABEL}px`;
    this._labels.replaceChildren(...nodes);
  }

  _drawLegend() {
    const size = this._rows.reduce((sum, { run }) => sum + run.spans.length + run.marks.length, 0);
    if (size === this._numDescribed) return;
    this._numDescribed = size;
    const used = new Set(this._runs.flatMap(([, run]) => run.spans.map((span) => span.kind)));
    const items = Object.entries(KINDS)
      .filter(([kind]) => used.has(kind))
      .map(([kind, name]) => el("li", {}, el("i", { className: `swatch ${kind}` }), name));
    if (this._runs.some(([, run]) => run.marks.length)) {
      items.push(el("li", {}, el("i", { className: "swatch selection" }), "selection is sent"));
    }
    this._legend.replaceChildren(...items);
    const told = this._rows.map(({ title, device, run }) => {
      const busy = Object.entries(run.totals(device))
        .sort(([, one], [, other]) => other - one)
        .map(([kind, ms]) => `${KINDS[kind]} ${duration(ms)}`);
      return el("li", { textContent: `${device} ${title}: ${busy.join(", ")}` });
    });
    this._totals.replaceChildren(...told);
  }

  _onPointer(event) {
    const { left, top } = this._canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const row = Math.floor(y / (ROW + GAP));
    const hits = this._spans.filter(
      (each) => each.row === row && x >= each.left - 1 && x <= each.left + each.size + 1,
    );
    this._tell(hits.at(-1)?.span ?? null);
  }

  _onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this._spans.length) return;
    event.preventDefault();
    const at = this._spans.findIndex(({ span }) => span === this._told);
    const next = Math.min(Math.max(at + step, 0), this._spans.length - 1);
    this._tell(this._spans[next].span);
  }

  _tell(span) {
    if (span === this._told) return;
    this._told = span;
    this._detail.textContent =
      span === null
        ? ""
        : `${span.device}, ${span.start.toFixed(1)} ms: ${span.note}` +
          (span.end > span.start ? ` (${duration(span.end - span.start)})` : "");
    this._drawSoon();
  }
}
