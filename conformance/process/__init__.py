"""Child processes: `spawn` and its like start one, `end_group` ends it, a `Worker` answers requests in one.

Every process of this project starts here. Such a process

- never has the current directory on its `sys.path`;
- leads a process group, and ending it ends all that it started;
- ends when the process that started it ends, even by `kill -9`.

`service` is the child's side of a `Worker`.
"""

from .spawn import Child, end_group, interrupt, spawn, spawn_command, words, worker_pid
from .worker import Tail, Worker, WorkerDiedError, WorkerTimeoutError

__all__ = [
    "Child",
    "Tail",
    "Worker",
    "WorkerDiedError",
    "WorkerTimeoutError",
    "end_group",
    "interrupt",
    "spawn",
    "spawn_command",
    "words",
    "worker_pid",
]
