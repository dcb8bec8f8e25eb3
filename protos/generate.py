"""Generates the typed Python stubs of ``hippo.v1``: ``python protos/generate.py [OUT]``."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes ``hippo/v1/*_pb2*.py[i]`` under ``out``. Raises CalledProcessError if protoc fails."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/hippo/v1/*.proto"))
    plugins = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(
        [
            sys.executable,
            *("-m", "grpc_tools.protoc", "-Iprotos"),
            *(f"--python_out={out}", f"--grpc_python_out={out}"),
            *(f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"),
            *protos,
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": plugins},
        check=True,
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
