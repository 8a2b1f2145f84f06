"""A process of its own for every compiler that must be isolated.

Some compilers read their flags once, patch the library they belong to, or
can take the whole process down. Here no flag of the reader's process changes,
and a crash is an error message. A worker is kept, since importing jax or torch
is most of the cost of a small compile, and ends with its parent. It is never
forked: a fork copies the locks of threads but not the threads.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

import cloudpickle

SCRATCH = "{scratch}"  # in a variable: the worker's own temporary folder
ENVIRONMENT = {  # what must stand before the compiler is imported
    "xla": {
        "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        # libtpu otherwise lets one process a machine load it.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # jax 0.7's CUDA plugin otherwise hides its compiler without a driver.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
    "torch": {"CUDA_VISIBLE_DEVICES": "",
              "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor"}}
# What the reader set for these compilers must not change what we show.
_COMPILERS_READ = re.compile(
    "TORCH|PYTORCH|TRITON_|XLA_|JAX_|LIBTPU|TPU_|MLIR_")


class CompilerError(RuntimeError):
    """A compiler refused the work, ran out of time or died."""


class _Worker:
    def __init__(self, kind: str, environment: dict[str, str]) -> None:
        self.kind = kind
        self.log = tempfile.TemporaryFile()
        # libtpu and g++ part what they are given at spaces.
        self.scratch = tempfile.mkdtemp(prefix="course-", dir=next((
            folder for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp")
            if " " not in folder and os.access(folder, os.W_OK)), None))
        package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        own = {name: value for name, value in os.environ.items()
               if not _COMPILERS_READ.match(name)}
        given = {name: value.replace(SCRATCH, self.scratch)
                 for name, value in environment.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-P", *["-S"] * sys.flags.no_site, "-c",
             f"from {__name__} import _serve; _serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            start_new_session=True,  # a stopped cell must not half-stop it
            env={**own, **given, "COURSE_SCRATCH": self.scratch,
                 "TMPDIR": self.scratch,
                 "PYTHONPATH": os.pathsep.join(
                     [package, *filter(None, sys.path)])})

    def call(self, target: str, args: tuple, timeout: float) -> Any:
        expired = threading.Event()
        timer = threading.Timer(
            timeout, lambda: (expired.set(), self._kill()))
        timer.start()
        try:
            _send(self.process.stdin, cloudpickle.dumps((target, args)))
            ok, value = _receive(self.process.stdout)
        except (EOFError, BrokenPipeError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)  # what it ends with is worth telling
            self.stop()
            reason = (f"took longer than {timeout:.0f} s" if expired.is_set()
                      else f"died (exit code {self.process.returncode})")
            self.log.seek(0)
            lines = self.log.read().decode(errors="replace").splitlines()[-5:]
            raise CompilerError(
                f"The {self.kind} compiler process {reason} in {target}. "
                f"Its last lines: {chr(10).join(lines) or 'none'}") from None
        except BaseException:  # a stopped cell leaves no process behind
            self.stop()
            raise
        finally:
            timer.cancel()
        if ok:
            return value
        raise value

    def stop(self) -> None:
        self._kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what it never read
                pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _kill(self) -> None:
        """End the worker and whatever it has started, a C++ compiler say."""
        if hasattr(os, "killpg") and self.process.poll() is None:
            with contextlib.suppress(OSError):  # it ends at this moment
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # on Windows


_workers: dict[tuple, _Worker] = {}
_lock = threading.Lock()


def call(kind: str, target: str, *args: Any, timeout: float = 300,
         environment: dict[str, str] | None = None) -> Any:
    """Run ``target`` ("package.module:function") with ``args`` in a worker.

    ``kind`` is "xla" or "torch"; ``environment`` adds variables, and each has
    a worker of its own. "{scratch}" in a value becomes its temporary folder,
    which it finds in COURSE_SCRATCH. Arguments and result travel by
    cloudpickle, errors too; a worker that dies or takes longer than
    ``timeout`` seconds raises ``CompilerError``.
    """
    variables = {**ENVIRONMENT[kind], **(environment or {})}
    key = (kind, os.getpid(), *sorted(variables.items()))
    with _lock:
        if key in _workers and _workers[key].process.poll() is not None:
            _workers.pop(key).stop()  # it died while it had nothing to do
        if key not in _workers:
            _workers[key] = _Worker(kind, variables)
        return _workers[key].call(target, args, timeout)


@atexit.register
def stop() -> None:
    """End every worker this process started."""
    for key in [key for key in _workers if key[1] == os.getpid()]:
        _workers.pop(key).stop()


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """One message; EOFError if the other side ended, be it half-way."""
    head = stream.read(8)
    data = stream.read(size := int.from_bytes(head, "big"))
    if len(head) < 8 or len(data) < size:
        raise EOFError
    return cloudpickle.loads(data)


def _end_with(parent: int) -> None:
    """Leave when the parent is gone, even in the middle of a compile."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(os.environ["COURSE_SCRATCH"], ignore_errors=True)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, its text elsewhere."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
        return error
    except Exception:
        return CompilerError(f"{type(error).__name__}: {error}")


def _serve() -> None:
    inbox = sys.stdin.buffer
    # Compilers print to stdout; keep it for messages and give them stderr.
    outbox = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),),
                     daemon=True).start()
    while True:
        try:
            target, args = _receive(inbox)
        except EOFError:  # the parent has closed it or is gone
            shutil.rmtree(os.environ["COURSE_SCRATCH"], ignore_errors=True)
            return
        module, _, name = target.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            reply = cloudpickle.dumps((True, function(*args)))
        except Exception as error:
            reply = cloudpickle.dumps((False, _portable(error)))
        _send(outbox, reply)
