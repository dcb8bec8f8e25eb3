// Small helpers for the document. Text only ever becomes text nodes, never HTML.

/** Returns a new element; `props` are properties, or attributes where the name has a hyphen or is
 * `role`; `on` maps event names to listeners. Children are nodes or texts; null is left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  const { on = {}, ...others } = props;
  for (const [name, value] of Object.entries(others)) {
    if (value === null || value === undefined) continue;
    if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Returns a duration in milliseconds as text with a unit. */
export function duration(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

/** Returns a length of time as minutes and seconds. */
export function clock(seconds) {
  const whole = Math.max(Math.round(seconds), 1);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

/** Returns a number with `digits` decimals, or a dash for none. */
export function number(value, digits = 2) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

/** Returns "1 token", "2 tokens", ... */
export function count(value, noun) {
  return `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}

/** Returns a row of keys, of which one is pressed, as a group of toggle buttons.
 * `choose(value)` is called when another one is pressed. */
export function choice(label, options, chosen, choose) {
  const group = el("div", { className: "choice", role: "group", "aria-label": label });
  for (const [value, name, isDisabled] of options) {
    group.append(
      el("button", {
        type: "button",
        textContent: name,
        disabled: Boolean(isDisabled),
        "aria-pressed": String(value === chosen),
        on: { click: () => choose(value) },
      }),
    );
  }
  return group;
}
