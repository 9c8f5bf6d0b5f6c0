"""What a campaign costs beside its cases: `python tests/benchmarks/campaign/bench_campaign.py`.

An adapter waits for a time at each case, so that two workers share no core and all that a campaign adds shows. Printed
for one worker and for two: the seconds of the campaign, how long its workers were busy, and what was lost per task.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from tabulate import tabulate

ADAPTER = """
import time
from backends.ggml import GgmlBackend

class Waits(GgmlBackend):
    delegates = ("ggml",)
    seconds = 0.2

    def supports_case(self, case):
        time.sleep(self.seconds)
        return super().supports_case(case)
"""


def installed(folder: Path, seconds: float) -> dict[str, str]:
    """The environment in which child processes know the adapter as `waits`."""
    (folder / "waits_adapter.py").write_text(ADAPTER.replace("0.2", str(seconds)))
    info = folder / "waits_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waits-adapter\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[conformance.backends]\nwaits = waits_adapter:Waits\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


@click.command()
@click.option("--cases", default="ops/[AMS]*", show_default=True, help="Ids, as of `conform run --case`.")
@click.option("--seconds", default=0.2, show_default=True, help="What a case waits.")
def main(cases: str, seconds: float) -> None:
    """Print the table."""
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = installed(folder, seconds)
        for workers in (1, 2):
            out = folder / f"of-{workers}"
            words = ["campaign", "--backend", "waits", "--case", cases, "--workers", str(workers)]
            command = [sys.executable, "-m", "conformance.cli", *words, "-o", out.as_posix()]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise click.ClickException(
                    f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-800:]}"
                )
            document = json.loads((out / "run.json").read_text())
            record, ran = document["campaign"], len(document["results"])
            lost = workers * record["seconds"] - record["busy"]
            row = (workers, ran, record["tasks"], record["seconds"], lost / record["tasks"])
            table.append((*row, f"{lost / (workers * record['seconds']):.1%}"))
    heads = ("workers", "cases", "tasks", "seconds", "idle seconds per task", "idle")
    click.echo(tabulate(table, heads, "github", floatfmt=".2f"))
    click.echo(f"two workers are {table[0][3] / table[1][3]:.2f} times as fast as one")


if __name__ == "__main__":
    main()
