"""The worker processes' life: limits in time, crashes, cancellation, closing; nothing is left."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest

from hippo.errors import MediaError, UnavailableError
from hippo.media.limits import DecodeLimits
from hippo.types import FramePlan, Media, MediaKind
from hippo.video.decoder import MediaDecoder
from tests.support.clips import image, video

pytestmark = pytest.mark.asyncio(loop_scope="module")  # where the decoder lives


async def num_frames(decoder: MediaDecoder, media: Media | None = None, client: str = "") -> int:
    return len((await decoder.decode(media or video(), FramePlan(), client=client)).frames)


async def with_first_at_work(decoder: MediaDecoder) -> tuple[int, asyncio.Task[int]]:
    """Stops the first worker, which then has an item; returns its process id."""
    pid = decoder.worker_pids[0] or 0
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(num_frames(decoder, client="one"))
    await asyncio.sleep(0.05)
    return pid, task


async def test_a_worker_killed_between_two_items_is_replaced(decoder: MediaDecoder) -> None:
    pid = decoder.worker_pids[0]
    os.kill(pid or 0, signal.SIGKILL)
    assert await num_frames(decoder) == 4
    assert decoder.worker_pids[0] != pid
    pid, task = await with_first_at_work(decoder)
    os.kill(pid, signal.SIGKILL)
    assert await task == 4  # the item is decoded again


@pytest.fixture
def crashing_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers started now fall over at the first image."""
    crash = "import os\nimport PIL.Image\nPIL.Image.open = lambda *_, **__: os.abort()\n"
    (tmp_path / "sitecustomize.py").write_text(crash)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("crashing_images")
async def test_an_item_that_crashes_the_decoder_twice_is_refused() -> None:
    async with MediaDecoder() as decoder:
        with pytest.raises(MediaError, match="the image crashes its decoder"):
            await decoder.decode(Media(MediaKind.IMAGE, b"anything"), FramePlan())
        assert await num_frames(decoder) == 4


async def test_workers_that_do_not_start_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    decoder = MediaDecoder()
    for beginning in (decoder.start(), num_frames(decoder)):
        with pytest.raises(UnavailableError, match="does not start"):
            await beginning
    monkeypatch.undo()
    both = await asyncio.gather(decoder.start(), num_frames(decoder), decoder.start())
    assert both[1] == 4
    await decoder.close()


async def test_a_cancelled_decode_frees_its_worker_for_the_next(decoder: MediaDecoder) -> None:
    _, task = await with_first_at_work(decoder)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await num_frames(decoder) == 4


async def test_an_expensive_item_waits_for_a_worker_of_expensive_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MediaDecoder(num_workers=2) as decoder:
        assert decoder.worker_pids[1] is None
        pid, first = await with_first_at_work(decoder)
        assert await num_frames(decoder, image("PNG")) == 1  # a cheap item does not wait
        monkeypatch.setattr("hippo.video.decoder.CHEAP_S", 0.0)
        second = asyncio.create_task(num_frames(decoder, client="two"))
        await asyncio.sleep(0.3)
        monkeypatch.undo()
        assert await num_frames(decoder, image("PNG")) == 1
        assert not first.done() and not second.done()
        os.kill(pid, signal.SIGCONT)
        assert [await first, await second] == [4, 4]


async def test_an_item_that_is_not_cheap_after_all_is_decoded_by_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MediaDecoder(num_workers=2) as decoder:
        pid, first = await with_first_at_work(decoder)
        await num_frames(decoder, image("PNG"))
        slow = decoder.worker_pids[1] or 0
        os.kill(slow, signal.SIGSTOP)
        monkeypatch.setattr("hippo.video.decoder._CHEAP_TIMEOUT_S", 0.1)
        second = asyncio.create_task(num_frames(decoder, client="two"))
        while decoder.worker_pids[1] == slow:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        assert [await first, await second] == [4, 4]


async def test_large_files_and_large_results_are_carried() -> None:
    async with MediaDecoder() as decoder:
        size = 5 << 20
        padding = size.to_bytes(4, "big") + b"free" + bytes(size - 8)
        clip = video(16, width=640, height=480)
        padded = Media(MediaKind.VIDEO, clip.data + padding)
        media = await decoder.decode(padded, FramePlan(fps=8.0))
        assert media.frames.shape == (16, 480, 640, 3)
        task = asyncio.create_task(decoder.decode(padded, FramePlan(fps=8.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await decoder.decode(padded, FramePlan(fps=8.0))
        assert bool((again.frames == media.frames).all())


async def test_the_process_that_workers_come_from_is_replaced_too() -> None:
    async with MediaDecoder(num_workers=1) as decoder:
        pid = decoder.worker_pids[0] or 0
        process = psutil.Process(pid).parent()
        assert process is not None and process.ppid() == os.getpid()
        process.kill()
        process.wait()
        assert await num_frames(decoder) == 4
        assert decoder.worker_pids[0] == pid  # it goes on
        os.kill(pid, signal.SIGKILL)
        assert await num_frames(decoder) == 4
        assert psutil.Process(decoder.worker_pids[0] or 0).parent() != process


async def test_closing_ends_decodes_in_flight() -> None:
    decoder, early = MediaDecoder(num_workers=1), MediaDecoder()
    await decoder.start()
    _, first = await with_first_at_work(decoder)
    tasks = [first, *(asyncio.create_task(num_frames(each)) for each in (decoder, early, early))]
    await asyncio.sleep(0)
    await early.close()  # before its worker is ready
    await decoder.close()
    for ending in (*tasks, num_frames(decoder)):
        with pytest.raises(UnavailableError, match="closed"):
            await ending
    await decoder.close()
    assert decoder.worker_pids[0] is None


async def test_a_stop_signal_to_the_group_does_not_reach_the_workers(decoder: MediaDecoder) -> None:
    pid = decoder.worker_pids[0]
    os.kill(pid or 0, signal.SIGINT)
    os.kill(pid or 0, signal.SIGTERM)
    assert await num_frames(decoder) == 4
    assert decoder.worker_pids[0] == pid


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
async def test_workers_run_on_the_given_core() -> None:
    core = max(os.sched_getaffinity(0))
    async with MediaDecoder(cpu_core=core) as decoder:
        pid = decoder.worker_pids[0]
        assert os.sched_getaffinity(pid or 0) == {core}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("side", [64, 512])  # frames of a few kilobytes, and of some megabytes
async def test_nothing_is_left_behind(side: int) -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("hippo-media")
        num_children = len(psutil.Process().children())
        return len(os.listdir("/proc/self/fd")), mapped, num_children

    before = resources()
    async with MediaDecoder(DecodeLimits(max_memory_bytes=64 << 20)) as decoder:
        data = video(width=side, height=side, num_frames=16)
        kept = [await decoder.decode(data, FramePlan(fps=8.0))]
        num_open = len(os.listdir("/proc/self/fd"))
        kept += [await decoder.decode(data, FramePlan(fps=8.0)) for _ in range(8)]
        assert len(os.listdir("/proc/self/fd")) == num_open
        assert all(each.frames.equal(kept[0].frames) for each in kept) and kept[0].frames.any()
        with pytest.raises(MediaError):
            await decoder.decode(Media(MediaKind.VIDEO, b"nonsense"), FramePlan())
        os.kill(decoder.worker_pids[0] or 0, signal.SIGKILL)
        await decoder.decode(data, FramePlan())
        del kept
    assert resources() == before
