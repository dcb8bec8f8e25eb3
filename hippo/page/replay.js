import { el } from "./dom.js";
import { Run } from "./run.js";
import { TurnView } from "./turn.js";

// The entry of a recording: an answer is shown from the data in the file, without a server.

const data = JSON.parse(document.getElementById("recording").textContent);
document.getElementById("about").textContent = [data.model, data.made_at].join(" · ");
const turns = document.getElementById("turns");

for (const turn of data.turns) {
  const view = new TurnView(turn.question, { video: turn.video, note: turn.note });
  turns.append(view.node);
  view.selections = turn.selections;
  for (const [name, record] of Object.entries(turn.runs)) {
    view.addRun(name, Run.fromRecord(record));
  }
  view.finish();
  if (turn.pictures.length) loadPictures(turn.pictures).then((all) => view.frames.setPictures(all));
}

function loadPictures(urls) {
  return Promise.all(
    urls.map(async (src) => {
      const image = el("img", { src });
      await image.decode();
      return image;
    }),
  );
}
