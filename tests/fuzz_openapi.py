"""`make fuzz`: schemathesis against a server of a tiny model, over the document that it gives of itself.

What the document allows must be answered in the form that it promises, what it forbids must be refused with a 4xx, and
nothing may be a 5xx. The server is asked one thing at a time; what many at once do to it, the soak finds out.
"""

import argparse
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from serving import ALPHABET, make_engine, serve, writes  # noqa: E402

SECONDS = 600  # the most
ONE_ANSWER = 20  # seconds
LEFT_OUT = {
    # a document of types cannot say what the engine refuses: stream_options without stream, ids beyond the vocabulary
    "positive_data_acceptance",
    # there is nothing here that a client makes or deletes
    "use_after_free",
    "ensure_resource_availability",
    "object_level_authorization",
}
RUN = "from schemathesis.cli import schemathesis; schemathesis()"
OPTIONS = ("--checks", "all", "--exclude-checks", ",".join(sorted(LEFT_OUT)), "--continue-on-failure")
QUIET = (
    "--no-color",
    "--generation-database",
    "none",
    "--suppress-health-check",
    "filter_too_much",
    "--request-timeout",
    str(ONE_ANSWER),
)


class Errors(logging.Handler):
    """Keeps what the server logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=300, help="of one operation, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if importlib.util.find_spec("schemathesis") is None:
        print("schemathesis is not there: pip install -c constraints.txt schemathesis", file=sys.stderr)
        return 2
    errors = Errors()
    logging.getLogger().addHandler(errors)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    bounds = ("--phases", "examples,coverage,fuzzing", "-n", str(options.examples), "--seed", str(options.seed))
    with serve(make_engine(writes(ALPHABET), max_len=64)) as served:
        document = f"{served.url}/openapi.json"
        command = [sys.executable, "-c", RUN, "run", document, *OPTIONS, *QUIET, *bounds]
        code = subprocess.run(command, check=False, timeout=SECONDS).returncode
        served.assert_well()
        with served.client() as client:
            answers = [
                line
                for line in client.get("/metrics").text.splitlines()
                if "requests_refused_total{" in line or "request_success_total{" in line
            ]
    faults = [line for line in answers if 'status="5' in line or '"error"' in line]
    for line in (*answers, *errors.lines):
        print(line)
    failed = bool(code or faults or errors.lines)
    print("FAILED" if failed else "No 5xx, no error in the log, and all is as the document says.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
