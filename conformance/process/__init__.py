"""How child processes of our own are started and ended: `spawn` and its like, and `end_group`.

Whatever of this project runs in a process of its own starts here. Such a process

- cannot be reached through the current directory, which is never on its `sys.path`;
- leads a process group, and ending it ends all that it started;
- ends with whoever started it, whatever became of them, `kill -9` included.

`wire` is what two of them talk over without ever waiting for longer than they may.
"""

from .spawn import Child, Done, end_group, interrupt, run, spawn, spawn_command, spawn_script, words, worker_pid

__all__ = [
    "Child",
    "Done",
    "end_group",
    "interrupt",
    "run",
    "spawn",
    "spawn_command",
    "spawn_script",
    "words",
    "worker_pid",
]
