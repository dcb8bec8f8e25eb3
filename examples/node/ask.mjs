// Asks about a video and prints the text as it settles.
//   node ask.mjs VIDEO [QUESTION] [--base-url URL] [--api-key KEY] [--model NAME]
import { readFile } from "node:fs/promises";
import { parseArgs } from "node:util";
import OpenAI from "openai";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    "base-url": { type: "string", default: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1" },
    "api-key": { type: "string", default: process.env.OPENAI_API_KEY ?? "none" },
    model: { type: "string", default: process.env.HIPPO_MODEL ?? "hippo" },
  },
});
const [video, question = "Describe the video."] = positionals;
if (!video) throw new Error("usage: node ask.mjs VIDEO [QUESTION]");

const client = new OpenAI({ baseURL: values["base-url"], apiKey: values["api-key"] });
const data = (await readFile(video)).toString("base64");
const chunks = await client.chat.completions.create({
  model: values.model,
  temperature: 0,
  stream: true,
  messages: [
    {
      role: "user",
      content: [
        { type: "video_url", video_url: { url: `data:video/mp4;base64,${data}` } },
        { type: "text", text: question },
      ],
    },
  ],
});
for await (const chunk of chunks) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
process.stdout.write("\n");
