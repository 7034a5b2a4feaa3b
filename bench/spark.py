"""The benchmarks that need Spark, for an environment that has it; writes bench/REPORT.md like ``make bench``.

    .venv-spark-newest/bin/python -m bench.spark [topics] [store] [rebuild] [--directory DIR] [--rows N] [--leave GIB]

Those that are not named keep the numbers of their last run. ``--directory`` keeps what store and rebuild have made.
``--rows``: of topics and store; the fewer, the more of a run is what it costs once.
``--leave``: writing to topics once more with all memory held but so many GiB (memory_in_use).
"""

import argparse
import subprocess
from importlib.metadata import version

from bench.__main__ import HERE, RESULTS, report, run_part

PARTS = ("topics", "store", "rebuild")


def main() -> None:
    """Runs what is asked for and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help="of " + ", ".join(PARTS))
    parser.add_argument("--directory", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--leave", default="")
    given = parser.parse_args()
    if set(given.parts) - set(PARTS):
        parser.error(f"the parts are {', '.join(PARTS)}")
    RESULTS.mkdir(exist_ok=True)
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr.splitlines()[0]
    for name in given.parts:
        kept = ["--directory", given.directory] if given.directory and name != "topics" else []
        if given.rows and name != "rebuild":
            kept += ["--rows", given.rows]
        if given.leave and name == "topics":
            kept += ["--leave", given.leave]
        run_part(f"spark_{name}", kept, {"pyspark": version("pyspark"), "java": java})
    (HERE / "REPORT.md").write_text(report(), encoding="utf-8")
    print(f"written: {HERE / 'REPORT.md'}")


if __name__ == "__main__":
    main()
