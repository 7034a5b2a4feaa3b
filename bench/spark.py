"""The benchmarks that need Spark, for an environment that has it; writes bench/REPORT.md like ``make bench``.

    .venv-spark-newest/bin/python -m bench.spark [topics] [store] [rebuild] [--directory DIR] [--rows N] [--leave GIB]

For parts that are not named the report shows the numbers of their last run. ``--directory`` stores the inputs of store
and rebuild for the next run. ``--rows``: for topics and store; with fewer rows, Spark's fixed costs weigh more.
``--leave``: measure writing to topics a second time, with all memory allocated but so many GiB (memory_in_use).
"""

import argparse
import subprocess
import sys
from importlib.metadata import version

from bench.__main__ import HERE, RESULTS, report, run_part

PARTS = ("topics", "store", "rebuild")


def main() -> None:
    """Run the selected parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help="one or more of " + ", ".join(PARTS))
    parser.add_argument("--directory", default="")
    parser.add_argument("--rows", default="")
    parser.add_argument("--leave", default="")
    given = parser.parse_args()
    if set(given.parts) - set(PARTS):
        parser.error(f"the parts are {', '.join(PARTS)}")
    RESULTS.mkdir(exist_ok=True)
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr.splitlines()[0]
    bad = []
    for name in given.parts:
        options = ["--directory", given.directory] if given.directory and name != "topics" else []
        if given.rows and name != "rebuild":
            options += ["--rows", given.rows]
        if given.leave and name == "topics":
            options += ["--leave", given.leave]
        if not run_part(f"spark_{name}", options, {"pyspark": version("pyspark"), "java": java}):
            bad.append(name)
    (HERE / "REPORT.md").write_text(report(), encoding="utf-8")
    print(f"written: {HERE / 'REPORT.md'}")
    if bad:
        sys.exit(f"failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
