"""Open JupyterLab on the first notebook of the course."""

import os
import socket
import sys

from tools.books import ROOT, notebooks


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
    wanted = int(os.getenv("PORT") or 8888)
    port = free_port(wanted)
    if port != wanted:
        print(f"Port {wanted} is taken: JupyterLab listens on {port}.",
              flush=True)
    root = ["--allow-root"] if os.geteuid() == 0 else []  # in a container
    os.chdir(ROOT)
    os.execv(sys.executable, [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.port={port}",
        *root, *sys.argv[1:], *map(str, notebooks()[:1])])


if __name__ == "__main__":
    main()
