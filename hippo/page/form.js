// The options of a request, read from the page's form.

/** Returns the request's fields of a form (docs/api.md); empty fields are left to the server. */
export function requestFields(form) {
  const { policy, gamma, most, strategy, ratio, temperature, tokens, seed } = form.elements;
  const pruning = {};
  if (strategy.value) pruning.strategy = strategy.value;
  if (strategy.value && strategy.value !== "none") pruning.ratio = Number(ratio.value);
  const speculative = { policy: policy.value, pruning };
  if (gamma.value && !gamma.disabled) speculative.gamma = gamma.value === "auto" ? "auto" : Number(gamma.value);
  if (most.value) speculative.max_draft_tokens = Number(most.value);
  return {
    temperature: Number(temperature.value),
    max_tokens: Number(tokens.value),
    seed: Number(seed.value),
    speculative,
  };
}

/** Returns a line about the fields of a request. */
export function describeFields({ temperature, max_tokens: tokens, seed, speculative }) {
  const { policy, gamma, max_draft_tokens: most, pruning } = speculative;
  const parts = [policy];
  if (gamma) parts.push(`draft length ${gamma}`);
  if (most) parts.push(`at most ${most} draft tokens`);
  if (pruning.strategy) {
    const share = pruning.ratio === undefined ? "" : ` ${Math.round(100 * pruning.ratio)} %`;
    parts.push(`pruning ${pruning.strategy}${share}`);
  }
  parts.push(`temperature ${temperature}`, `seed ${seed}`, `at most ${tokens} tokens`);
  return parts.join(", ");
}

/** Makes the form's own fields follow each other: which are usable, and the shown values. */
export function followFields(form) {
  const { policy, gamma, strategy, ratio, temperature } = form.elements;
  const follow = () => {
    gamma.disabled = !["serial", "vpsd"].includes(policy.value);
    ratio.disabled = ["", "none"].includes(strategy.value);
    form.querySelector("output[for=ratio]").value = `${Math.round(100 * ratio.value)} %`;
    form.querySelector("output[for=temperature]").value = Number(temperature.value).toFixed(1);
  };
  form.addEventListener("input", follow);
  follow();
}
