// One answer: its tokens, and what both devices did, made of the events of docs/api.md.

/** What a stretch of a device's time was; the order is that of the legend. */
export const KINDS = {
  queue: "waits for a slot",
  read: "reads the video (CPU)",
  vision: "vision tower",
  prefill: "prefill",
  helper: "layers of the target's prefill",
  draft: "draft steps",
  stale: "draft steps in vain",
  optimistic: "verification, optimistic",
  conservative: "verification, conservative",
  target_only: "one token alone",
  wait: "waits for the other device",
};

export const SOURCES = { draft: "draft", guess: "n-gram guess", target: "target" };

const LEAST_MS = 0.05; // shorter stretches are not drawn
const WAITS = "waits for the selection";

/** An answer as it grows. Times are milliseconds since the request came to the gateway. */
export class Run {
  constructor() {
    this.events = [];
    this.tokens = []; // as in the events, with `at` and `forward`
    this.spans = []; // {device, kind, start, end, note, forward?, block?}
    this.marks = []; // {device, at, note}
    this.forwards = [];
    this.blocks = [];
    this.media = [];
    this.selection = null;
    this.losses = [];
    this.hippo = null;
    this.metrics = null;
    this.error = null; // {message, code, status}
    this.isCancelled = false;
    this.isOver = false;
    this.end = 0;
    this._free = { target: 0, draft: 0 }; // the end of each device's last stretch
    this._help = { start: 0, end: 0 }; // when the helper ran
  }

  /** Returns the run of a recording; see `toRecord`. */
  static fromRecord(record) {
    const run = new Run();
    for (const event of record.events) run.takeEvent(event);
    Object.assign(run, { hippo: record.hippo, metrics: record.metrics, error: record.error });
    run.isOver = true;
    return run;
  }

  toRecord() {
    const { events, hippo, metrics, error } = this;
    return { events, hippo, metrics, error };
  }

  /** Takes a chunk of the stream. */
  takeChunk(chunk) {
    if (chunk.error) {
      this.error = chunk.error;
      return;
    }
    for (const choice of chunk.choices) {
      for (const event of choice.events ?? []) this.takeEvent(event);
    }
    this.hippo = chunk.hippo ?? this.hippo;
    this.metrics = chunk.metrics ?? this.metrics;
  }

  takeEvent(event) {
    this.events.push(event);
    this.end = Math.max(this.end, event.at);
    if (event.type === "prompt") this._takePrompt(event);
    else if (event.type === "selection") this._takeSelection(event);
    else if (event.type === "draft_prefill") this._takeDraftPrefill(event);
    else if (event.type === "block") this._takeBlock(event);
    else if (event.type === "verdict") this._takeVerdict(event);
    else if (event.type === "draft_loss") {
      this.losses.push(event);
      this.marks.push({ device: "draft", at: event.at, note: `lost: ${event.problem}` });
    }
  }

  get text() {
    return textOf(this.tokens.filter((token) => !token.is_thought));
  }

  /** What a model that thinks has thought before. */
  get thought() {
    return textOf(this.tokens.filter((token) => token.is_thought));
  }

  get hasDraft() {
    return this.spans.some((span) => span.device === "draft");
  }

  /** When the first token came; null before. */
  get firstTokenAt() {
    return this.tokens.length ? this.tokens[0].at : null;
  }

  /** The stretches in which consecutive forwards had the same mode. */
  get modes() {
    const stretches = [];
    for (const { mode, start, end } of this.forwards) {
      const last = stretches.at(-1);
      if (last && last.mode === mode) last.end = end;
      else stretches.push({ mode, start, end });
    }
    return stretches.filter((stretch) => stretch.mode !== "prefill");
  }

  /** Milliseconds of each kind of stretch, by device. */
  totals(device) {
    const sums = {};
    for (const span of this.spans) {
      if (span.device !== device) continue;
      sums[span.kind] = (sums[span.kind] ?? 0) + span.end - span.start;
    }
    return sums;
  }

  _addSpan(device, kind, start, end, note, more = {}) {
    const from = Math.max(start, this._free[device], 0);
    if (end - from >= LEAST_MS) this.spans.push({ device, kind, start: from, end, note, ...more });
    this._free[device] = Math.max(this._free[device], end);
  }

  _takePrompt(event) {
    const { service, at, preprocess, queue } = event;
    if (service === "target") this.media = event.media;
    this._addSpan(service, "queue", at - preprocess - queue, at - preprocess, "queue");
    const what = `${event.num_prompt_tokens} tokens, ${event.num_visual_tokens} of them visual`;
    this._addSpan(service, "read", at - preprocess, at, `prompt of ${what}`);
  }

  _takeSelection(event) {
    this.selection = event;
    const { kept, num_visual_tokens: total, strategy, score } = event;
    if (kept.length === total) return; // nothing was chosen
    const note = `selection (${strategy}): ${kept.length} of ${total} visual tokens, ${score} ms`;
    this.marks.push({ device: "target", at: event.at, note });
  }

  _takeDraftPrefill(event) {
    const start = event.at - (event.forward - event.vision);
    const cached = event.context ? `, ${event.context} tokens cached` : "";
    // A draft on hold runs its tower after the selection.
    const isHeld = this.selection && start - event.vision >= this.selection.at;
    if (isHeld) this._addSpan("draft", "wait", this._free.draft, start - event.vision, WAITS);
    const end = Math.min(this._free.draft + event.vision, start);
    this._addSpan("draft", "vision", this._free.draft, isHeld ? start : end, "vision tower");
    this._addSpan("draft", "wait", this._free.draft, start, WAITS);
    this._addSpan("draft", "prefill", start, event.at, `prefill of the kept tokens${cached}`);
    this._showHelp();
  }

  _takeBlock(event) {
    const size = event.token_ids.length;
    const branches = event.branches ?? []; // none in older recordings
    const branched = branches.flat().length - branches.length;
    const start = event.at - (size + branched) * event.step;
    this.blocks[event.block] = event;
    this._addSpan("draft", "wait", start - event.wait, start, "waits for the target");
    const guesses = event.guessed_places.length;
    const note =
      `block ${event.block + 1}: ${size} draft token${size === 1 ? "" : "s"}` +
      (guesses ? `, ${guesses} of them from a guess` : "") +
      (branched ? `, ${branched} more in branches` : "") +
      (event.is_stale ? ", after its run was rejected" : "");
    const kind = event.is_stale ? "stale" : "draft";
    this._addSpan("draft", kind, start, event.at, note, { block: event.block });
  }

  /** Shows that the draft's device ran layers of the target while the draft waited. */
  _showHelp() {
    const { start, end } = this._help;
    const note = "first layers of the target's prefill";
    for (const wait of this.spans.filter(({ device, kind }) => device === "draft" && kind === "wait")) {
      const [from, to] = [Math.max(wait.start, start), Math.min(wait.end, end)];
      if (to - from < LEAST_MS) continue;
      this.spans.push({ ...wait, kind: "helper", start: from, end: to, note });
      if (wait.end - to >= LEAST_MS) this.spans.push({ ...wait, start: to });
      wait.end = from;
    }
    this.spans = this.spans.filter((span) => span.end - span.start >= LEAST_MS);
  }

  _takeVerdict(event) {
    const { at, mode, forward_number: forward } = event;
    const start = at - event.forward;
    const drafted = event.num_draft_tokens + event.num_reused_tokens;
    const accepted = event.num_accepted_tokens + event.num_accepted_reused;
    if (mode === "prefill") {
      const cached = event.context ? `, ${event.context} tokens cached` : "";
      const seen = start + event.vision;
      this._addSpan("target", "vision", start, seen, "vision tower", { forward });
      this._addSpan("target", "prefill", seen, at, `prefill${cached}`, { forward });
      const helped = start + (event.helper_wait ?? 0); // none in older recordings
      this._help = { start: helped, end: Math.min(helped + (event.helper ?? 0), at) };
      this._showHelp();
    } else {
      this._addSpan("target", "wait", start - event.wait, start, "waits for the draft");
      const note =
        `forward ${forward}: ` +
        (drafted ? `${accepted} of ${drafted} draft tokens accepted` : "no draft token") +
        (event.num_reused_tokens ? ", of a broken run" : "") +
        (event.is_rejection ? ", the run rejected" : "");
      this._addSpan("target", mode, start, at, note, { forward });
    }
    const shown = Math.max(start, this.forwards.at(-1)?.end ?? 0);
    this.forwards[forward] = { mode, start: shown, end: at, drafted, accepted };
    for (const token of event.tokens) this.tokens.push({ ...token, at, forward });
  }
}

function textOf(tokens) {
  return tokens.map((token) => token.text).join("");
}

/** Returns a sentence about a token: who wrote it, and its place. */
export function describeToken(run, token) {
  const { mode, drafted, accepted } = run.forwards[token.forward];
  const shown = token.text === "" ? "(no text)" : JSON.stringify(token.text);
  const parts = [`Token ${token.index + 1} ${shown}`];
  if (token.source === "target") {
    parts.push(mode === "prefill" ? "the target's, by its prefill" : "the target's own");
  } else {
    const size = run.blocks[token.block]?.token_ids.length;
    const who = token.source === "guess" ? "from an n-gram guess of the draft" : "by the draft";
    const place = token.place < size ? `${token.place + 1} of ${size}` : "of a branch";
    parts.push(size === undefined ? who : `${who}, ${place} in block ${token.block + 1}`);
  }
  if (mode !== "prefill") {
    const kept = drafted ? `, ${accepted} of ${drafted} draft tokens accepted` : "";
    parts.push(`forward ${token.forward} (${mode.replace("_", " ")})${kept}`);
  }
  parts.push(`settled at ${token.at.toFixed(1)} ms`);
  return parts.join("; ");
}
