import { el } from "./dom.js";
import { SOURCES, describeToken } from "./run.js";

// The text of an answer, each token in the colour of who wrote it.

/** Shows a run's tokens; `onToken(token)` is called for the one pointed at, or null. */
export class TokenView {
  constructor(label, onToken) {
    this.node = el("div", {
      className: "answer",
      tabIndex: 0,
      role: "group",
      "aria-label": `${label}: the answer; arrow keys go from token to token`,
      on: {
        keydown: (event) => this._onKey(event),
        pointerover: (event) => this._point(this._nodes.indexOf(event.target)),
        pointerleave: () => this._point(-1),
        blur: () => this._point(-1),
      },
    });
    this._onToken = onToken;
    this._run = null;
    this._nodes = [];
    this._thought = null; // folded
    this._pointed = -1;
  }

  /** Shows the tokens that had settled at `time`. */
  show(run, time) {
    if (run !== this._run) {
      this.node.replaceChildren();
      this._nodes = [];
      this._thought = null;
      this._run = run;
    }
    for (const token of run.tokens.slice(this._nodes.length)) {
      const node = el("span", { className: `token ${token.source}`, textContent: token.text });
      this._nodes.push(node);
      if (token.is_thought && !this._thought) {
        const title = el("summary", { textContent: "Thought" });
        this._thought = el("details", { className: "thought" }, title);
        this.node.append(this._thought);
      }
      (token.is_thought ? this._thought : this.node).append(node);
    }
    if (this._thought) this._thought.hidden = run.tokens[0].at > time;
    for (const [index, node] of this._nodes.entries()) node.hidden = run.tokens[index].at > time;
  }

  _onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this._nodes.length) return;
    event.preventDefault();
    const last = this._nodes.length - 1;
    this._point(Math.min(Math.max(this._pointed + step, 0), last));
  }

  _point(index) {
    if (index === this._pointed) return;
    this._nodes[this._pointed]?.classList.remove("pointed");
    this._pointed = index;
    const token = index < 0 ? null : this._run.tokens[index];
    if (token) {
      this._nodes[index].classList.add("pointed");
      this._nodes[index].title = tokenSentence(this._run, token);
    }
    this._onToken(token);
  }
}

/** Returns the legend of the colours, with the number of tokens of each source. */
export function sourceLegend(run) {
  const items = Object.entries(SOURCES).map(([source, name]) => {
    const size = run.tokens.filter((token) => token.source === source).length;
    const shown = source === "target" ? name : `${name}, accepted`;
    return el("li", {}, el("span", { className: `token ${source}`, textContent: shown }), ` ${size}`);
  });
  return el("ul", { className: "legend", "aria-label": "Who wrote the tokens" }, ...items);
}

/** Returns the sentence about a token; an empty one for null. */
export function tokenSentence(run, token) {
  return token === null ? "" : describeToken(run, token);
}
