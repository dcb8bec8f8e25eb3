"""``hippo ask --record``: an answer, the target's alone and the kept tokens as one HTML file."""

import base64
import datetime
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hippo.client.answers import Answer
from hippo.client.requests import Question, RequestForm, new_salt
from hippo.client.server import Server
from hippo.errors import HippoError, InvalidRequestError, OverloadedError
from hippo.page import recording

# As hippo/page/frames.js has them.
STRATEGIES = ("holistic", "attention", "specvlm", "uv", "uniform", "random")
MOST_FRAMES = 32
FRAME_WIDTH = 192
_JPEG_QUALITY = 70
_EARLIER_S = 2.0


class Recorder:
    """Writes an answer, which is to be asked for with ``body``, to an HTML file."""

    def __init__(
        self,
        server: Server,
        form: RequestForm,
        question: Question,
        speculative: Mapping[str, Any],
    ) -> None:
        self._server = server
        self._form = replace(form, further={**form.further, "return_events": True})
        self._question = question
        self._salt = new_salt()  # the pair's; the target alone shares no cache with it
        self._policy = speculative["policy"]
        self.body = self._form.request(question, speculative).body(self._salt)

    def write(
        self, path: Path, pair: Answer, *, text: str, videos: Sequence[str], note: str
    ) -> None:
        """Asks the target alone and for the choices of the other strategies, and writes the file.

        ``pair`` is the answer to ``body``; ``videos`` names what it is about, if anything. Raises
        HippoError if the gateway refuses, or if ``path`` cannot be written.
        """
        alone = self._ask({"policy": "off"}, new_salt())
        video = next((each for name in videos if (each := Path(name).expanduser()).is_file()), None)
        seconds = _shown_seconds(pair.events)
        selections = [event for event in pair.events if event["type"] == "selection"]
        kept = {}
        if seconds and selections:
            kept = dict(self._kept_by_strategy(selections[0]["ratio"]))
        now = datetime.datetime.now(datetime.UTC)
        data = {
            "version": 1,
            "made_at": f"{now:%Y-%m-%d %H:%M}",
            "model": self._form.model,
            "turns": [
                {
                    "question": text,
                    "note": note,
                    "video": video.name if video else "",
                    "runs": {"pair": _run_of(pair), "alone": _run_of(alone)},
                    "selections": kept,
                    "pictures": pictures(str(video), seconds) if video and seconds else [],
                }
            ],
        }
        try:
            path.write_text(recording(data), "utf-8")
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from None

    def _ask(self, speculative: Mapping[str, Any], salt: str, **changes: Any) -> Answer:
        form = replace(self._form, **changes)
        with closing(self._server.connect()) as connection:
            return connection.ask(form.request(self._question, speculative).body(salt))

    def _kept_by_strategy(self, ratio: float) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields what each strategy keeps, as the target tells it with one token; leaves out a
        strategy that the operator does not allow, and all for which the key may ask no more."""
        for strategy in STRATEGIES:
            pruning = {"strategy": strategy, "ratio": ratio}
            wishes = {"policy": self._policy, "pruning": pruning}
            with suppress(InvalidRequestError, OverloadedError):
                for event in self._ask(wishes, self._salt, max_tokens=1).events:
                    if event["type"] == "selection":
                        yield strategy, event["kept"]


def pictures(video: str, seconds: Sequence[float]) -> list[str]:
    """Returns the frames of a video at ascending ``seconds`` as small JPEGs in data: URLs; none if
    PyAV and Pillow (hippo-serve[engine]) are not installed."""
    try:
        import av
    except ImportError:
        return []
    found = []
    try:
        with av.open(video) as container:
            stream = container.streams.video[0]
            start = stream.start_time or 0  # in some containers the first frame's time is not 0
            for second in seconds:
                assert stream.time_base is not None
                # A seek in a transport stream may end behind its aim.
                aim = start + int((second - _EARLIER_S) / stream.time_base)
                container.seek(max(aim, 0), stream=stream)
                for frame in container.decode(stream):
                    if frame.pts is None:
                        continue
                    if (frame.pts - start) * stream.time_base >= second - 1e-3:
                        found.append(_as_url(frame))
                        break
    except av.FFmpegError as error:
        raise HippoError(f"{video} cannot be decoded for the recording: {error}") from None
    return found if len(found) == len(seconds) else []


def _as_url(frame: Any) -> str:
    from PIL import Image

    from hippo.video.canvas import Orientation

    image = Image.fromarray(Orientation.of(frame).applied(frame.to_ndarray(format="rgb24")))
    height = max(1, round(FRAME_WIDTH * image.height / image.width))
    buffer = io.BytesIO()
    image.resize((FRAME_WIDTH, height)).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _shown_seconds(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the times of the frames that the page shows of the target's first video."""
    prompts = [each for each in events if each["type"] == "prompt" and each["service"] == "target"]
    videos = [item for prompt in prompts[:1] for item in prompt["media"] if item["grid"]]
    if not videos:
        return []
    num_frames, seconds = videos[0]["grid"][0], videos[0]["frame_seconds"]
    size = min(num_frames, MOST_FRAMES)
    frames = [place * num_frames // size for place in range(size)]
    return [seconds[frame * len(seconds) // num_frames] for frame in frames]


def _run_of(answer: Answer) -> dict[str, Any]:
    return {
        "events": list(answer.events),
        "hippo": dict(answer.figures),
        "metrics": dict(answer.metrics),
        "error": None,
    }
