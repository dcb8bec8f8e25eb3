import { choice, count, duration, el, number } from "./dom.js";
import { FramesView } from "./frames.js";
import { Timeline } from "./timeline.js";
import { TokenView, sourceLegend, tokenSentence } from "./tokens.js";

// One question and its answers: with the draft, and of the target alone.

export const LANES = { pair: "With the draft", alone: "Target alone" };
const SPEEDS = [1, 0.5, 0.25, 0.1];

/** Shows a turn. `runs` maps "pair" and "alone" to their runs; `ask` is FramesView's. */
export class TurnView {
  constructor(question, { video = null, note = "", ask = null } = {}) {
    this.runs = {};
    this.selections = {};
    this._lanes = {};
    this._times = new Map(); // by run: the time up to which it is shown
    this._speed = 1;
    this._playing = null;
    this._timeline = new Timeline();
    this.frames = new FramesView(ask);
    this._detail = el("p", { className: "detail", "aria-live": "polite" });
    this._legend = el("div");
    this._laneList = el("div", { className: "lanes" });
    this._figures = el("div");
    this._verdict = el("p", { className: "verdict", role: "status" });
    this._player = el("div", { className: "player", hidden: true });
    this._foot = el("div", { className: "foot" });
    this.node = el(
      "article",
      { className: "turn" },
      el(
        "header",
        {},
        el("h2", { textContent: question }),
        el("p", { className: "note", textContent: [video, note].filter(Boolean).join(" · ") }),
      ),
      this._verdict,
      this._laneList,
      this._legend,
      this._detail,
      this._player,
      this._figures,
      this._timeline.node,
      this.frames.node,
      this._foot,
    );
  }

  /** Adds a lane for a run; the state is shown until the run is over. */
  addRun(name, run, title = LANES[name]) {
    this.runs[name] = run;
    const tokens = new TokenView(title, (token) => this._pointAt(run, token));
    const clock = el("span", { className: "clock" });
    const state = el("p", { className: "state", role: "status" });
    const problem = el("p", { className: "problem", role: "alert", hidden: true });
    const head = el("div", { className: "lane-head" }, el("h3", { textContent: title }), clock);
    const node = el("section", { className: `lane ${name}` }, head, tokens.node, state, problem);
    this._lanes[name] = { tokens, clock, state, problem };
    this._laneList.append(node);
    this.show();
  }

  /** Shows everything up to `times[name]` milliseconds of each run; by default all of it. */
  show(times = {}) {
    this._times.clear();
    for (const [name, run] of Object.entries(this.runs)) {
      const time = times[name] ?? Infinity;
      if (time < run.end) this._times.set(run, time);
      const { tokens, clock, state, problem } = this._lanes[name];
      tokens.show(run, time);
      const isDone = run.isOver && time >= run.end;
      clock.textContent = duration(Math.min(time, run.end));
      clock.classList.toggle("done", isDone);
      state.textContent = isDone ? "" : stateOf(run, time);
      problem.hidden = !(run.error || run.isCancelled);
      problem.textContent = problemOf(run);
    }
    this._timeline.setRuns(
      Object.entries(this.runs).map(([name, run]) => [name === "pair" ? "pair" : "alone", run]),
      this._times,
    );
  }

  /** Shows figures, frames and the player once all runs are over. */
  finish() {
    const { pair } = this.runs;
    this.show();
    this._verdict.textContent = verdictOf(this.runs);
    this._figures.replaceChildren(figuresTable(this.runs));
    if (pair) {
      this._legend.replaceChildren(sourceLegend(pair));
      this.frames.setRun(pair, this.selections);
    }
    const end = this._end;
    if (end <= 0) return;
    this._seeker = el("input", {
      type: "range",
      min: 0,
      max: Math.ceil(end),
      value: Math.ceil(end),
      step: "any",
      "aria-label": "Time of the replay",
      on: {
        input: () => {
          this.pause();
          this._seek(Number(this._seeker.value));
        },
      },
    });
    this._button = el("button", { type: "button", on: { click: () => this._toggle() } });
    this._speedChoice = el("span");
    this._player.replaceChildren(this._button, this._seeker, this._speedChoice);
    this._player.hidden = false;
    this._setSpeed(1);
    this.pause();
  }

  /** Adds a node below everything, such as a button. */
  addFoot(...nodes) {
    this._foot.append(...nodes);
  }

  play(from = 0) {
    const began = performance.now();
    const token = {};
    this._playing = token;
    this._button.textContent = "Pause";
    const advance = () => {
      if (this._playing !== token) return;
      const time = from + (performance.now() - began) * this._speed;
      this._seek(time);
      if (time >= this._end) this.pause();
      else requestAnimationFrame(advance);
    };
    advance();
  }

  pause() {
    this._playing = null;
    this._button.textContent = Object.keys(this.runs).length > 1 ? "Replay the race" : "Replay";
  }

  get _end() {
    return Math.max(...Object.values(this.runs).map((run) => run.end));
  }

  _toggle() {
    if (this._playing) return this.pause();
    const time = Number(this._seeker.value);
    this.play(time >= this._end - 1 ? 0 : time);
  }

  _seek(time) {
    this._seeker.value = Math.min(time, this._end);
    this._seeker.setAttribute("aria-valuetext", duration(Math.min(time, this._end)));
    this.show({ pair: time, alone: time });
  }

  _setSpeed(speed) {
    this._speed = speed;
    const options = SPEEDS.map((each) => [each, `${each}×`]);
    this._speedChoice.replaceChildren(
      choice("Speed of the replay", options, speed, (chosen) => {
        this._setSpeed(chosen);
        if (this._playing) this.play(Number(this._seeker.value));
      }),
    );
  }

  _pointAt(run, token) {
    this._detail.textContent = tokenSentence(run, token);
    this._timeline.link(run, token);
  }
}

function stateOf(run, time) {
  const isReading = !run.events.some((event) => event.type === "prompt" && event.at <= time);
  if (isReading) return "reads the video …";
  if (run.firstTokenAt === null || run.firstTokenAt > time) return "prefill …";
  return "answers …";
}

function problemOf(run) {
  if (run.isCancelled) return "Cancelled.";
  if (!run.error) return "";
  const { message, code, status } = run.error;
  const more = [status, code].filter(Boolean).join(", ");
  return more ? `${message} (${more})` : message;
}

function verdictOf({ pair, alone }) {
  if (!pair?.hippo || !alone?.hippo) {
    if (pair?.hippo?.draft_problem) return `No draft took part: ${pair.hippo.draft_problem}.`;
    return "";
  }
  const ids = (run) => run.tokens.map((token) => token.id);
  const [one, other] = [ids(pair), ids(alone)];
  const at = one.findIndex((id, index) => id !== other[index]);
  const isEqual = at < 0 && one.length === other.length;
  const words = isEqual
    ? `The two answers are equal, token for token (${count(one.length, "token")}).`
    : `The answers differ from token ${(at < 0 ? Math.min(one.length, other.length) : at) + 1} on, ` +
      "as they may in bfloat16 or float16.";
  const [decode, total] = ["decode", "total"].map((name) => ratioOf(alone, pair, name));
  if (!decode || !total) return words;
  const much = `Decodes ${number(decode)}× as fast as the target alone, the whole answer `;
  return `${much}${number(total)}×. ${words}`;
}

function ratioOf(slow, fast, name) {
  const [one, other] = [slow, fast].map((run) => run?.hippo?.timings_ms[name]);
  return one && other ? one / other : null;
}

function figuresTable(runs) {
  const names = Object.keys(runs).filter((name) => runs[name].hippo);
  if (!names.length) return el("p");
  const { pair, alone } = runs;
  const estimate = pair?.hippo?.estimated_speedup;
  const timed = (title, key) => [
    title,
    names.map((name) => duration(runs[name].hippo.timings_ms[key])),
    ratioOf(alone, pair, key),
  ];
  const told = (title, value) => [title, names.map((name) => value(runs[name])), null];
  const rows = [
    timed("First token", "time_to_first_token"),
    timed("Decoding", "decode"),
    timed("Whole answer", "total"),
    told("Tokens a second, decoding", (run) => number(run.metrics?.tokens_per_second ?? NaN, 1)),
    told("Tokens per forward", (run) =>
      number(run.hippo.mean_tokens_per_forward),
    ),
    told("Draft tokens accepted", (run) => {
      const { num_accepted_tokens: accepted, num_draft_tokens: drafted } = run.hippo;
      return drafted ? `${accepted} of ${drafted}` : "–";
    }),
    told("Forwards of the target", (run) => String(run.hippo.num_forwards)),
  ];
  if (!alone && estimate) rows.push(["Speedup, estimated by the gateway", [`${estimate}×`], null]);
  const isRace = names.length > 1;
  const head = ["", ...names.map((name) => LANES[name]), ...(isRace ? ["speedup"] : [])];
  const headCell = (name) => (name ? el("th", { scope: "col", textContent: name }) : el("td"));
  const cells = ([title, values, ratio]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", textContent: title }),
      ...values.map((value) => el("td", { textContent: value })),
      ...(isRace ? [el("td", { className: "ratio", textContent: ratio ? `${number(ratio)}×` : "" })] : []),
    );
  return el(
    "table",
    { className: "figures" },
    el("caption", { className: "unseen", textContent: "Figures" }),
    el("thead", {}, el("tr", {}, ...head.map(headCell))),
    el("tbody", {}, ...rows.map(cells)),
  );
}
