import { Api } from "./api.js";
import { clock, count, el } from "./dom.js";
import { describeFields, followFields, requestFields } from "./form.js";
import { captureFrames, firstLook, shownFrames } from "./frames.js";
import { Run } from "./run.js";
import { TurnView } from "./turn.js";

// The live page: one conversation about one video.

const LARGE_BYTES = 4e6; // of a sample: a larger one is only fetched when it is chosen

const api = new Api();
const find = (id) => document.getElementById(id);
const form = find("ask");
const state = {
  models: [],
  video: null, // {file, url, id}
  messages: [], // of the conversation
  salts: {}, // by lane: what is cached is shared only within a lane
  turns: [], // {question, note, view}
  working: null, // the AbortController of the question in progress
};

async function start() {
  followFields(form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!state.working) askQuestion();
  });
  find("cancel").addEventListener("click", () => state.working?.abort());
  find("models").addEventListener("change", () => describeVideo());
  find("first").addEventListener("click", () => raceOverSample());
  find("preview").addEventListener("loadedmetadata", () => describeVideo());
  find("preview").addEventListener("error", () => {
    if (!find("preview").hidden) find("seen").textContent = "This browser cannot show it; the server may read it.";
  });
  find("anew").addEventListener("click", () => beginAnew());
  find("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  find("file").addEventListener("change", ({ target }) => {
    if (target.files.length) takeVideo(target.files[0]);
    target.value = "";
  });
  const drop = find("drop");
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragenter" || name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) {
        takeVideo(event.dataTransfer.files[0]);
      }
    });
  }
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    api.key = find("key").value.trim();
    connect();
  });
  beginAnew();
  await connect();
}

/** Asks what is served; shows the field for a key if the gateway wants one. */
async function connect() {
  try {
    state.models = await api.models();
    const samples = await api.samples().catch(() => []); // the page works without them
    find("key-form").hidden = true;
    find("models").replaceChildren(
      ...state.models.map(({ id }) => el("option", { value: id, textContent: id })),
    );
    find("models-field").hidden = state.models.length < 2;
    find("about").textContent = describeModel(state.models[0]);
    find("samples").replaceChildren(...samples.map((sample) => el("li", {}, sampleButton(sample))));
    find("samples-field").hidden = !samples.length;
    find("first").hidden = !samples.length;
    say("");
    showSamples(samples);
  } catch (error) {
    find("key-form").hidden = error.status !== 401;
    if (error.status === 401) find("key").focus();
    say(problemText(error));
  }
}

function sampleButton({ name }) {
  return el(
    "button",
    { type: "button", "aria-pressed": "false", "data-name": name, on: { click: () => takeSample(name) } },
    el("span", { textContent: name }),
  );
}

/** Adds a picture and the length to each sample's button, one after another. */
async function showSamples(samples) {
  for (const { name, bytes } of samples) {
    if (bytes > LARGE_BYTES) continue;
    const button = find("samples").querySelector(`[data-name="${CSS.escape(name)}"]`);
    if (!button || button.querySelector("canvas")) continue;
    let url = "";
    try {
      url = URL.createObjectURL(await api.sample(name));
      const { picture, seconds } = await firstLook(url);
      if (button.querySelector("canvas")) continue;
      button.prepend(picture);
      button.append(el("small", { textContent: clock(seconds) }));
    } catch {
      // The name alone stays: the browser cannot decode the video, or the sample is gone.
    } finally {
      URL.revokeObjectURL(url);
    }
  }
}

/** Tells the length and size of the chosen video, and what the model will see of it. */
async function describeVideo() {
  const { video } = state;
  const preview = find("preview");
  if (!video) return;
  const { duration, videoWidth: width, videoHeight: height } = preview;
  if (!Number.isFinite(duration) || !width) return;
  find("chosen").textContent = `${sizeOf(video.file)}, ${clock(duration)} long, ${width} × ${height}`;
  try {
    const seen = await api.frames(find("models").value, preview);
    if (state.video !== video) return;
    find("seen").textContent =
      `The model will see ${count(seen.num_frames, "frame")} of ${seen.width} × ${seen.height}: ` +
      `about ${count(seen.num_tokens, "visual token")}.`;
  } catch {
    // An earlier target does not tell.
  }
}

function describeModel({ id, hippo }) {
  const size = (parameters) =>
    parameters >= 1e9 ? `${(parameters / 1e9).toFixed(1)} B` : `${(parameters / 1e6).toFixed(1)} M`;
  const part = ({ num_parameters: parameters, device, dtype }) =>
    `${size(parameters)} parameters, ${dtype} on ${device}`;
  const draft = hippo.draft ? part(hippo.draft) : `none: ${hippo.draft_problem}`;
  return `${id} · target ${part(hippo)} · draft ${draft}`;
}

function problemText({ message, status, code }) {
  const more = [status, code].filter(Boolean).join(", ");
  return more ? `${message} (${more})` : message;
}

function say(text) {
  find("problem").textContent = text;
  find("problem").hidden = !text;
}

/** Forgets the conversation; the video stays, and what was shown. */
function beginAnew() {
  state.messages = [];
  state.salts = { pair: crypto.getRandomValues(new Uint32Array(4)).join("-") };
  state.salts.alone = `${state.salts.pair}-alone`;
  find("anew").hidden = true;
  find("going").textContent = "";
}

function takeVideo(file) {
  if (state.working) return;
  state.wanted = null;
  if (!file.type.startsWith("video/") && file.type) {
    say(`${file.name} is of type ${file.type}; choose a video file`);
    return;
  }
  say("");
  if (state.video) URL.revokeObjectURL(state.video.url);
  const url = URL.createObjectURL(file);
  state.video = { file, url, id: null };
  find("chosen").textContent = sizeOf(file);
  find("seen").textContent = "";
  find("preview").hidden = false;
  find("preview").src = url;
  pressSample(null);
  beginAnew();
}

function sizeOf({ name, size }) {
  const megabytes = size / 1e6;
  return `${name}, ${megabytes.toFixed(megabytes < 10 ? 2 : 0)} MB`;
}

/** Chooses a sample, which plays; returns whether it could be had. */
async function takeSample(name) {
  if (state.working) return false;
  const wanted = (state.wanted = {});
  find("chosen").textContent = `Fetches ${name} …`;
  try {
    const file = await api.sample(name);
    if (state.wanted !== wanted || state.working) return false; // another one was chosen meanwhile
    takeVideo(file);
    pressSample(name);
    find("question").focus();
    await find("preview").play().catch(() => {}); // where playing needs a click of its own
    return true;
  } catch (error) {
    find("chosen").textContent = state.video ? sizeOf(state.video.file) : "";
    say(problemText(error));
    return false;
  }
}

function pressSample(name) {
  for (const button of find("samples").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.name === name));
  }
}

async function raceOverSample() {
  const samples = [...find("samples").querySelectorAll("button")];
  const isChosen = samples.some((button) => button.getAttribute("aria-pressed") === "true");
  find("race").checked = true;
  if (isChosen || (await takeSample(samples[0].dataset.name))) form.requestSubmit();
}

/** Asks with the draft, and then the target alone if both are to race. */
async function askQuestion() {
  const suggested = state.video && !state.messages.length ? find("question").placeholder : "";
  const question = find("question").value.trim() || suggested;
  if (!question) {
    say("ask something about the video");
    find("question").focus();
    return;
  }
  say("");
  const working = new AbortController();
  setWorking(working);
  try {
    await uploadVideo(working.signal);
    await answerQuestion(question, working.signal);
  } catch (error) {
    if (error.name !== "AbortError") say(problemText(error));
    else say("Cancelled.");
  } finally {
    setWorking(null);
  }
}

function setWorking(working) {
  state.working = working;
  find("cancel").hidden = !working;
  find("submit").disabled = Boolean(working);
  find("drop").classList.toggle("busy", Boolean(working));
  if (working) find("preview").pause(); // decoding takes time from a device on this machine
  if (!working) find("going").textContent = "";
}

async function uploadVideo(signal) {
  const { video } = state;
  if (!video || video.id) return;
  const tell = (share) => {
    find("going").textContent = `Uploads the video: ${Math.round(100 * share)} %`;
  };
  tell(0);
  video.id = await api.upload(video.file, tell, signal);
}

async function answerQuestion(question, signal) {
  const fields = requestFields(form);
  const isRace = find("race").checked;
  const { video, messages } = state;
  const content = [{ type: "text", text: question }];
  if (video && !messages.length) {
    content.unshift({ type: "video_url", video_url: { url: video.id } });
  }
  const asked = [...messages, { role: "user", content }];
  const request = (lane, changes = {}) => ({
    model: find("models").value,
    messages: asked,
    stream: true,
    return_events: true,
    cache_salt: state.salts[lane],
    ...fields,
    ...changes,
  });
  const note = describeFields(fields);
  const pair = new Run();
  const view = new TurnView(question, {
    video: video?.file.name,
    note,
    ask: (strategy) => askSelection(request("pair"), strategy, pair.selection.ratio),
  });
  if (find("intro").contains(document.activeElement)) find("question").focus();
  find("intro").hidden = true;
  find("turns").append(view.node);
  view.node.scrollIntoView({ block: "start" });
  const turn = { question, note, video: video?.file.name ?? "", view };
  state.turns.push(turn);

  find("going").textContent = isRace ? "1 of 2: with the draft" : "";
  view.addRun("pair", pair);
  await stream(request("pair"), pair, () => view.show(), signal);
  if (isRace && !pair.error && !pair.isCancelled) {
    find("going").textContent = "2 of 2: the target alone, beside the replayed answer of the pair";
    const alone = new Run();
    view.addRun("alone", alone);
    await race(request("alone", { speculative: { policy: "off" } }), alone, view, signal);
  }
  view.finish();
  if (pair.error || pair.isCancelled) return;
  const said = { role: "assistant", content: pair.text };
  if (pair.thought) said.reasoning = pair.thought;
  state.messages = [...asked, said];
  find("question").value = "";
  find("anew").hidden = false;
  view.addFoot(
    el("button", {
      type: "button",
      textContent: "Save as one file that replays this conversation",
      on: { click: () => saveRecording() },
    }),
  );
  await showPictures(view, pair, video);
}

/** Streams one answer into `run`; errors and a cancelled request end it. */
async function stream(body, run, onChange, signal) {
  let isDrawn = true;
  const draw = () => {
    if (!isDrawn) return;
    isDrawn = false;
    requestAnimationFrame(() => {
      isDrawn = true;
      if (!run.isOver) onChange();
    });
  };
  try {
    await api.ask(
      body,
      (chunk) => {
        run.takeChunk(chunk);
        draw();
      },
      signal,
    );
  } catch (error) {
    if (error.name === "AbortError") run.isCancelled = true;
    else run.error = { message: error.message, code: error.code, status: error.status };
  }
  run.isOver = true;
  onChange();
}

/** Streams the target's own answer while the pair's is replayed beside it, both from their start. */
async function race(body, alone, view, signal) {
  const began = performance.now();
  const show = () => view.show({ pair: performance.now() - began });
  const timer = setInterval(show, 33);
  try {
    await stream(body, alone, show, signal);
  } finally {
    clearInterval(timer);
  }
}

/** Returns the indices that a strategy keeps, as the target tells them with one token. */
async function askSelection(body, strategy, ratio) {
  const run = new Run();
  await api.ask(
    { ...body, max_tokens: 1, speculative: { policy: "serial", pruning: { strategy, ratio } } },
    (chunk) => run.takeChunk(chunk),
  );
  if (run.error) throw new Error(run.error.message);
  if (!run.selection) throw new Error("the target told no selection");
  return run.selection.kept;
}

async function showPictures(view, run, video) {
  const media = run.media.find((item) => item.grid.length === 3);
  if (!media || !video) return;
  try {
    const seconds = shownFrames(media).map(({ second }) => second);
    view.frames.setPictures(await captureFrames(video.url, seconds));
  } catch {
    // The browser cannot decode the video: the grid is drawn without pictures, and says so.
  }
}

/** Saves the conversation as an HTML file that needs no server. */
async function saveRecording() {
  const data = {
    version: 1,
    made_at: new Date().toISOString().slice(0, 16).replace("T", " "),
    model: find("about").textContent,
    turns: state.turns
      .filter(({ view }) => view.runs.pair?.hippo)
      .map(({ question, note, video, view }) => ({
        question,
        note,
        video,
        runs: Object.fromEntries(
          Object.entries(view.runs).map(([name, run]) => [name, run.toRecord()]),
        ),
        selections: view.selections,
        pictures: view.frames.pictureUrls(),
      })),
  };
  const player = await (await fetch("/page/player.html")).text();
  const json = JSON.stringify(data).replaceAll("<", "\\u003c");
  const file = new Blob([player.split("RECORDED-DATA").join(json)], { type: "text/html" });
  const url = URL.createObjectURL(file);
  el("a", { href: url, download: "hippo-run.html" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

start();
