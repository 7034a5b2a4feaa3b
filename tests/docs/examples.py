"""The examples of the documentation pages, and the test that runs each.

An example is a block between fences, or a paragraph that is indented by four spaces.
"""

import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "bench/*.md",
        "changelog.d/*.md",
        "tests/**/*.md",
        ".github/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
_FENCED = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))((?: {4,}[^\n]*\n)(?:(?: {4,}[^\n]*)?\n)*)")


def examples(page: str) -> list[str]:
    """The texts of a page's examples, without their indentation, in no particular order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = [dedent(found[2]).strip("\n") for found in _FENCED.finditer(text)]
    # An indented paragraph in a list belongs to the list.
    rest = re.sub(r"^(?:\d+\.|[-*]) .*\n(?: +.*\n|\n(?= ))*", "\n", _FENCED.sub("", text), flags=re.MULTILINE)
    return fenced + [dedent(found[1]).strip("\n") for found in _INDENTED.finditer(rest)]


GUIDES = "tests/client/test_guides.py::test_examples"
FORMATS = "tests/docs/test_formats.py::test_every_example_is_checked"
OPERATE = "tests/docs/test_operate.py::test_every_block_of_commands_is_run_by_a_test"
STREAM = "tests/spark/test_topic_docs.py::test_a_streaming_count_in_five_commands"
BUCKET_TABLE = "tests/spark/test_job_docs.py::test_the_bucket_of_the_page"
JOBS = "tests/spark/test_job_docs.py::test_the_commands_of_the_page"
TARGETS = "tests/docs/test_examples.py::test_the_commands_for_tests_exist"
SECURITY = "tests/docs/test_security.py::test_the_page_from_certificates_to_clients"
NOT_RUN = "not run: "
"""Prefix of the reason why no test runs an example."""

RUN_BY: dict[str, dict[str, str]] = {
    "README.md": {
        "make run ": "tests/interop/test_readme.py::test_make_run",
        "pip install": "tests/interop/test_readme.py::test_the_commands_by_hand",
        "mqnamesrv ": "tests/interop/test_readme.py::test_the_commands_by_hand",
        "producers  ──": NOT_RUN + "a drawing",
        "docker/build": "tests/docker/test_single.py::test_the_store_stays_when_containers_go",
        "<dependency>": "tests/interop/test_readme.py::test_the_first_producer_and_consumer",
        "import java.nio": "tests/interop/test_readme.py::test_the_first_producer_and_consumer",
        "import anyio": "tests/interop/test_readme.py::test_the_first_python_program",
        "python first.py": "tests/interop/test_readme.py::test_the_first_python_program",
    },
    "CONTRIBUTING.md": {"make test ": TARGETS},
    "docs/add-a-request-code.md": {"def min_offset": "tests/docs/test_examples.py::test_the_handler_is_the_brokers"},
    "docs/add-a-check.md": {"from trimq": "tests/docs/test_examples.py::test_the_check_is_a_feature"},
    "docs/architecture.md": {"disk/": NOT_RUN + "a list of folders", "producer ──": NOT_RUN + "a drawing"},
    "docs/formats/auth.md": {"": FORMATS},
    "docs/formats/bucket.md": {"header (64) |": NOT_RUN + "a layout; its fields are in the examples", "": FORMATS},
    "docs/formats/checkpoint.md": {"": FORMATS},
    "docs/formats/config.md": {"": FORMATS},
    "docs/formats/consume-queue.md": {"": FORMATS},
    "docs/formats/frame.md": {"total 4 |": NOT_RUN + "a layout; its fields are in the examples", "": FORMATS},
    "docs/formats/index.md": {"header 40 |": NOT_RUN + "a layout; its fields are in the examples", "": FORMATS},
    "docs/formats/message-trace.md": {"": FORMATS},
    "docs/formats/own-files.md": {"": FORMATS},
    "docs/formats/record.md": {"": FORMATS},
    "docs/formats/timer.md": {"": FORMATS},
    "docs/formats/transaction.md": {"": FORMATS},
    "docs/operate.md": {"# name server": "tests/broker/test_listeners.py::test_the_manuals_listeners", "": OPERATE},
    "docs/pipeline.md": {"": STREAM},
    "docs/security.md": {"": SECURITY},
    "docs/pipeline-jobs.md": {
        'spark.read.format("rocketmq-store").option("cluster"': BUCKET_TABLE,
        "spark.read": "tests/spark/test_job_docs.py::test_the_table_of_the_page",
        "python -m trimq.pipeline rebuild": JOBS,
        "python -m trimq.pipeline audit s3": BUCKET_TABLE,
    },
    "docs/sdk/consume.md": {"": GUIDES},
    "docs/sdk/logging.md": {"": GUIDES},
    "docs/sdk/migrating-from-kafka-python.md": {"": GUIDES},
    "docs/sdk/migrating-from-rocketmq-client-python.md": {"": GUIDES},
    "docs/sdk/order.md": {"": GUIDES},
    "docs/sdk/performance.md": {"": GUIDES},
    "docs/sdk/produce.md": {"": GUIDES},
    "docs/sdk/testing.md": {
        "pytest_plugins": "tests/client/test_guides.py::test_the_suite_of_the_testing_guide",
        "[pytest]": "tests/client/test_guides.py::test_the_suite_of_the_testing_guide",
        "": GUIDES,
    },
    "docs/sdk/request-reply.md": {"": GUIDES},
    "docs/sdk/tracing.md": {"": GUIDES},
    "docs/sdk/transactions.md": {"": GUIDES},
    "docs/sql92.md": {"condition ": NOT_RUN + "a grammar; the page's tables are run by tests/protocol/test_sql92.py"},
    "tests/interop/README.md": {"make test-clients": TARGETS},
    "tests/spark/README.md": {"make test-spark": TARGETS},
}
"""Page to first words of an example to the test that runs it. The first match counts; "" matches all."""
