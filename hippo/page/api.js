// The gateway's documented REST interface (docs/api.md).

/** A failed request: the server's own message, code and status. */
export class ApiError extends Error {
  constructor(message, { status = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, code });
  }
}

/** Requests to the gateway that served this page, with a key where it asks for one. */
export class Api {
  key = "";

  /** Returns the served models. */
  async models() {
    return (await this._get("/v1/models")).data;
  }

  /** Returns the operator's sample videos. */
  async samples() {
    return (await this._get("/v1/samples")).data;
  }

  /** Returns a sample video as a file. */
  async sample(name, signal) {
    const url = `/v1/samples/${encodeURIComponent(name)}`;
    const blob = await (await this._fetch(url, { signal })).blob();
    return new File([blob], name, { type: blob.type });
  }

  /** Returns what a model sees of a video of a length and size. */
  async frames(model, { duration, videoWidth, videoHeight }) {
    const size = { model, seconds: duration, width: videoWidth, height: videoHeight };
    return this._get(`/v1/frames?${new URLSearchParams(size)}`);
  }

  /** Uploads a video; returns its id. `onProgress(share)` is called with 0 to 1. */
  upload(file, onProgress, signal) {
    return new Promise((resolve, reject) => {
      // fetch() does not tell how much of a body was sent.
      const request = new XMLHttpRequest();
      const form = new FormData();
      form.append("file", file);
      request.open("POST", "/v1/videos");
      for (const [name, value] of Object.entries(this._headers())) {
        request.setRequestHeader(name, value);
      }
      request.upload.onprogress = ({ loaded, total }) => onProgress(total ? loaded / total : 0);
      request.onload = () => {
        if (request.status === 200) resolve(JSON.parse(request.responseText).id);
        else reject(errorOf(request.status, request.responseText));
      };
      request.onerror = () => reject(new ApiError("the gateway does not answer"));
      request.onabort = () => reject(new DOMException("cancelled", "AbortError"));
      signal.addEventListener("abort", () => request.abort(), { once: true });
      request.send(form);
    });
  }

  /** Streams an answer: `onChunk` is called with each chunk, an error's included. */
  async ask(body, onChunk, signal) {
    const response = await this._fetch("/v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal,
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let isWhole = false;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice("data: ".length);
        if (data === "[DONE]") {
          isWhole = true;
          continue;
        }
        const chunk = JSON.parse(data);
        isWhole ||= Boolean(chunk.error);
        onChunk(chunk);
      }
    }
    if (!isWhole) throw new ApiError("the answer broke off before its end");
  }

  _headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  }

  async _get(path) {
    return (await this._fetch(path)).json();
  }

  async _fetch(path, options = {}) {
    const headers = this._headers();
    if (options.body) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the gateway does not answer");
    }
    if (!response.ok) throw errorOf(response.status, await response.text());
    return response;
  }
}

function errorOf(status, text) {
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // Not the gateway's own answer, such as a proxy's.
  }
  return new ApiError(error.message ?? (text.slice(0, 200) || "no reason given"), {
    status,
    code: error.code,
  });
}
