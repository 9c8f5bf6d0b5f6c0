"""Start child processes (`spawn`), end them (`end_group`) and send them requests (`Worker`).

Every process of this project is started here. Such a process

- never has the current directory on its `sys.path`;
- leads a process group, which is ended as a whole;
- ends when the process that started it ends, even by `kill -9`.

`service` is the child side of a `Worker`.
"""

from .deadline import FOREVER, OVER, Deadline
from .spawn import Child, end_group, interrupt, is_traced, spawn, spawn_command, words, worker_pid
from .worker import Tail, Worker, WorkerDiedError, WorkerTimeoutError, call

__all__ = [
    "FOREVER",
    "OVER",
    "Child",
    "Deadline",
    "Tail",
    "Worker",
    "WorkerDiedError",
    "WorkerTimeoutError",
    "call",
    "end_group",
    "interrupt",
    "is_traced",
    "spawn",
    "spawn_command",
    "words",
    "worker_pid",
]
