"""The process of a worker on this machine: `spawn` starts it, `pool.Local` starts it again where it dies.

It reads its words from stdin, one JSON object, since the key of its TLS must stand on no command line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys


def main() -> int:
    """Serve the scheduler until it is gone, or the process that started this one."""
    from distributed import Worker  # noqa: PLC0415  # an extra
    from distributed.security import Security  # noqa: PLC0415  # as above

    words = json.loads(sys.stdin.readline())
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # the campaign says itself who died

    async def serve() -> None:
        async with Worker(
            words["address"],
            nthreads=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            name=words["name"],
            resources=words["devices"],
            security=Security(**words["security"]),
            memory_limit=0,  # the keeper limits the processes of backends
            dashboard=False,
        ) as worker:
            await worker.finished()

    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
