"""A gateway that looks names up in a file, which a test can change as a cluster changes its DNS.

``python -m tests.support.running.named_gateway FILE FLAGS...``; a line of the file is a name and
its addresses. A name that is not there is looked up as ever.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

from gateway.__main__ import main

_getaddrinfo = socket.getaddrinfo


def serve_names(file: Path) -> None:
    """Makes ``socket.getaddrinfo`` read the file at each look-up."""

    def look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        for line in file.read_text().splitlines():
            name, *addresses = line.split()
            if name == host:
                return [
                    (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                    for address in addresses
                ]
        return _getaddrinfo(host, port, *args, **kwargs)

    socket.getaddrinfo = look_up


if __name__ == "__main__":
    serve_names(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:], os.environ))
