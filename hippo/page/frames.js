import { choice, count, el } from "./dom.js";

// The frames of a video with the visual tokens marked that the draft saw.

export const STRATEGIES = ["holistic", "attention", "specvlm", "uv", "uniform", "random"];
const ANSWERED = "as answered";
const MOST_FRAMES = 32;
const FRAME_WIDTH = 192;
const SEEK_MS = 4000;

/** Returns which frames of a grid are shown, and the second of each: at most 32, evenly spaced. */
export function shownFrames(media) {
  const [frames] = media.grid;
  const size = Math.min(frames, MOST_FRAMES);
  const seconds = media.frame_seconds;
  return Array.from({ length: size }, (_, place) => {
    const frame = Math.floor((place * frames) / size);
    return { frame, second: seconds[Math.floor((frame * seconds.length) / frames)] ?? 0 };
  });
}

/** Returns a picture (canvas) from the middle of a video, and its length in seconds. */
export async function firstLook(url) {
  const video = el("video", { muted: true, preload: "auto", src: url });
  await once(video, "loadeddata");
  const seconds = video.duration;
  video.removeAttribute("src");
  video.load();
  const [picture] = await captureFrames(url, [seconds / 2]);
  return { picture, seconds };
}

/** Returns pictures (canvases) of a video at the given seconds. Rejects if the browser cannot
 * decode the video. */
export async function captureFrames(url, seconds) {
  const video = el("video", { muted: true, preload: "auto", src: url });
  await once(video, "loadeddata");
  const height = Math.round((FRAME_WIDTH * video.videoHeight) / video.videoWidth);
  const pictures = [];
  for (const second of seconds) {
    // A little later, because a frame's own time may round to the frame before it.
    const at = Math.min(second + 0.001, Math.max(video.duration - 0.001, 0));
    const isThere = Math.abs(video.currentTime - at) < 1e-6;
    video.currentTime = at;
    if (!isThere) await once(video, "seeked");
    const picture = el("canvas", { width: FRAME_WIDTH, height });
    picture.getContext("2d").drawImage(video, 0, 0, FRAME_WIDTH, height);
    pictures.push(picture);
  }
  video.removeAttribute("src");
  video.load();
  return pictures;
}

function once(video, name) {
  return new Promise((resolve, reject) => {
    const failed = () => reject(new Error("this browser cannot decode the video"));
    const timer = setTimeout(failed, SEEK_MS);
    video.addEventListener("error", failed, { once: true });
    video.addEventListener(
      name,
      () => {
        clearTimeout(timer);
        resolve();
      },
      { once: true },
    );
  });
}

/** Shows the frames; `ask(strategy)` resolves to the indices that a strategy keeps, or is null if
 * only those of `selections` can be shown. */
export class FramesView {
  constructor(ask) {
    this._ask = ask;
    this._chosen = ANSWERED;
    this._pictures = null; // canvases or images, one for each shown frame
    this._choices = el("div");
    this._note = el("p", { className: "detail", "aria-live": "polite" });
    this._list = el("ul", { className: "frames" });
    this.node = el(
      "section",
      { className: "frames-section", "aria-label": "What the draft saw", hidden: true },
      el("div", { className: "section-head" }, el("h3", { textContent: "What the draft saw" }), this._choices),
      this._note,
      this._list,
    );
  }

  /** Shows a run's selection; `selections` maps further strategies to kept indices. */
  setRun(run, selections) {
    this._media = run.media.find((item) => item.grid.length === 3);
    this._selection = run.selection;
    this._selections = selections;
    this.node.hidden = !this._media || !run.selection;
    if (!this.node.hidden) this._draw();
  }

  setPictures(pictures) {
    this._pictures = pictures;
    if (!this.node.hidden) this._draw();
  }

  /** The frames' pictures as JPEG in data: URLs, for a recording. */
  pictureUrls() {
    return (this._pictures ?? []).map((picture) => picture.toDataURL("image/jpeg", 0.7));
  }

  async _choose(strategy) {
    this._chosen = strategy;
    if (strategy !== ANSWERED && !this._selections[strategy]) {
      this._drawChoices();
      this._note.textContent = "Asks the target which tokens this strategy keeps …";
      try {
        this._selections[strategy] = await this._ask(strategy);
      } catch (error) {
        if (this._chosen === strategy) this._note.textContent = error.message;
        return;
      }
    }
    if (this._chosen === strategy) this._draw();
  }

  _drawChoices() {
    const options = STRATEGIES.map((name) => [name, name, !this._ask && !this._selections[name]]);
    this._choices.replaceChildren(
      choice("Strategy", [[ANSWERED, ANSWERED], ...options], this._chosen, (strategy) =>
        this._choose(strategy),
      ),
    );
  }

  _draw() {
    this._drawChoices();
    const { kept: answered, num_visual_tokens: total, strategy } = this._selection;
    const kept = new Set(this._chosen === ANSWERED ? answered : this._selections[this._chosen]);
    const isWhole = this._chosen === ANSWERED && kept.size === total;
    this._note.textContent = isWhole
      ? `The draft saw all ${count(total, "visual token")} of this answer: nothing was pruned.`
      : `${this._chosen === ANSWERED ? strategy : this._chosen}: ` +
        `${kept.size} of ${count(total, "visual token")} kept, marked below.`;
    const [frames, rows, columns] = this._media.grid;
    const shown = shownFrames(this._media);
    const size = rows * columns;
    const items = shown.map(({ frame, second }, place) => {
      const cells = Array.from({ length: size }, (_, cell) => kept.has(frame * size + cell));
      const number = cells.filter(Boolean).length;
      const canvas = drawFrame(this._pictures?.[place], cells, rows, columns, this._media);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${second.toFixed(1)} s: ${number} of ${size} tokens kept`);
      return el("li", {}, canvas, el("span", { textContent: `${second.toFixed(1)} s · ${number}` }));
    });
    this._list.replaceChildren(...items);
    if (shown.length < frames) this._note.append(` ${shown.length} of ${frames} frames are shown.`);
    if (!this._pictures) this._note.append(" The pictures are not at hand; only the grid is drawn.");
  }
}

function drawFrame(picture, cells, rows, columns, media) {
  const width = FRAME_WIDTH;
  const ratio = picture
    ? (picture.naturalHeight ?? picture.height) / (picture.naturalWidth ?? picture.width)
    : media.height / media.width;
  const height = Math.round(width * ratio);
  const canvas = el("canvas", { width, height });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#8884";
  pen.fillRect(0, 0, width, height);
  if (picture) pen.drawImage(picture, 0, 0, width, height);
  const [cellWidth, cellHeight] = [width / columns, height / rows];
  const isWhole = cells.every(Boolean);
  for (const [cell, isKept] of cells.entries()) {
    const left = (cell % columns) * cellWidth;
    const top = Math.floor(cell / columns) * cellHeight;
    if (!isKept) {
      pen.fillStyle = "rgba(17, 20, 24, 0.62)";
      pen.fillRect(left, top, cellWidth, cellHeight);
    } else if (!isWhole) {
      pen.strokeStyle = "#ffb020";
      pen.lineWidth = 1.5;
      pen.strokeRect(left + 0.75, top + 0.75, cellWidth - 1.5, cellHeight - 1.5);
    }
  }
  return canvas;
}
