"""Open JupyterLab on the first notebook of the course."""

import os
import socket
import sys

from tools.books import ROOT, notebooks


def wanted_port(text: str) -> int:
    """The port that PORT names; SystemExit if it names none."""
    if text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536:
        return int(text)
    sys.exit(f"PORT={text}: a port is a whole number from 1 to 65535, as in:"
             " make lab PORT=9000")


def free_port(wanted: int) -> int:
    """The first port from ``wanted`` on that nothing listens on."""
    for port in range(wanted, min(wanted + 50, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    sys.exit(f"PORT={wanted}: neither this port nor the 49 after it can be"
             " used; name another, as in: make lab PORT=9000")


def main() -> None:
    wanted = wanted_port(os.getenv("PORT") or "8888")
    port = free_port(wanted)
    if port != wanted:
        print(f"Port {wanted} is taken: JupyterLab listens on {port}.",
              flush=True)
    command = [sys.executable, "-m", "jupyterlab", *sys.argv[1:],
               f"--ServerApp.port={port}", f"--ServerApp.root_dir={ROOT}"]
    for first in notebooks()[:1]:  # also in the address that is printed
        command += [f"--LabApp.default_url=/lab/tree/notebooks/{first.name}"]
    if os.geteuid() == 0:  # in a container
        command += ["--allow-root"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
