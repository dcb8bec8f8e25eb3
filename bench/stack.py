"""A running stack's own speedup against one measured side by side, over the same minutes.

    python -m bench.stack --url http://127.0.0.1:8000 --prometheus http://127.0.0.1:9090

This is `hippo bench --prometheus` about the held-out clips of the bundled pair's world: each clip
is asked about as ordinary traffic is (some of which the gateway runs target-only, to calibrate its
baseline), then target-only and adaptive in turn. The client's clock says how much faster adaptive
is; Prometheus says what the stack's metrics say of the same answers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.clips import held_out_clips
from hippo.cli import main as hippo


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the clips and runs the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--num-clips", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        clips = held_out_clips(Path(folder), kind="short", num_clips=args.num_clips)
        return hippo(
            [
                *("bench", "--url", args.url, "--prometheus", args.prometheus),
                *("--video", *(str(clip.path) for clip in clips), "--prompt", clips[0].question),
                *("--rounds", str(args.rounds)),
                *(("--out", "-") if args.json else ()),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
