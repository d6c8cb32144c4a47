"""The status of tool results as real agents' tools write them: success, failure or timeout."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.status import status_of

TRACEBACK = (
    "collected 3 rows\nTraceback (most recent call last):\n"
    "  File \"/app/run.py\", line 9, in <module>\n    main()\nKeyError: 'id'\n"
)

FAILURES = {
    "a shell agent's return code": "<returncode>2</returncode>\n<output>\nls: cannot access 'src'\n</output>",
    "an exit code below the output": "cc -c a.c\na.c:3: expected ';'\n[The command completed with exit code 1.]",
    "an exit code above the output": "Exit code: 1\nWall time: 0.2 seconds\nOutput:\nmake: *** [all] Error 2",
    "a process's status": "building\nProcess exited with code 101",
    "JSON in a string with its exit code": json.dumps(
        {"output": "fatal: bad object", "metadata": {"exit_code": 128, "duration_seconds": 0.1}}
    ),
    "a JSON error": '{"error": "No results for query"}',
    "a JSON success that is false": '{"success": false, "message": "selector is not there"}',
    "a sandbox's report": '{"status": "Failed", "run_result": {"status": "Finished", "return_code": 1, "stderr": "x"}}',
    "an MCP result": '{"content": [{"type": "text", "text": "no such table"}], "isError": true}',
    "a shell's outcome item": [{"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 127}}],
    "a leading Error": "Error: file not found: src/main.rs",
    "a named exception": "FileNotFoundError: [Errno 2] No such file or directory: 'a.txt'",
    "an exception's repr": "Error: ToolException('quota')\n Please fix your mistakes.",
    "a framework's sentence": "An error occurred while running the tool. Please try again. Error: bad id",
    "a framework's other sentence": "Error executing tool read_file: path is outside of the workspace",
    "a tagged tool error": "<tool_use_error>File has not been read yet.</tool_use_error>",
    "git": "fatal: not a git repository (or any of the parent directories): .git",
    "a protocol error": "MCP error -32602: Invalid arguments for tool search",
    "a shell": "bash: line 1: pyhton: command not found",
    "a traceback at the end": "x = 1\n" * 3_000 + TRACEBACK,
    "a traceback at the begin": TRACEBACK,
    "failed tests": "....F\n" + "=" * 20 + " 1 failed, 4 passed in 0.12s " + "=" * 20,
}
TIMEOUTS = {
    "GNU timeout": '{"output": "", "exit_code": 124}',
    "a shell agent": "The last command <command>pytest -x</command> timed out and has been killed.",
    "an agent's shell": "Command timed out after 2m 0.0s",
    "a JSON flag": '{"stdout": "", "timed_out": true, "exit_code": -1}',
    "a JSON error": '{"error": "Request timed out after 30 s"}',
    "an exception": "TimeoutError: page.goto: Timeout 30000ms exceeded.",
    "a protocol error": "MCP error -32001: Request timed out",
    "a shell's outcome item": [{"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}],
    "a judge": '{"status": "TimeLimitExceeded", "return_code": null}',
}
SUCCESSES = {
    "nothing": "",
    "a page about errors": "# Error handling\n\nError: the base of all. Exceptions, timeouts: a request timed out.\n"
    * 9,
    "a source file": "import sys\n\n\nclass ParseError(Exception):\n    pass\n\n\ndef fail() -> None:\n"
    "    raise ParseError('error: exit code 1')\n" * 40,
    "a numbered source file": "     1\tTraceback (most recent call last):\n     2\tError: no\n",
    "search hits": "log.py:12:Traceback (most recent call last):\napi.py:3:    error = None\n",
    "an exit code of 0": "<returncode>0</returncode>\n<output>\nError: this line is in the log\n</output>",
    "an exit code of 0 below": TRACEBACK + "[The command completed with exit code 0.]",
    "JSON without errors": '{"error": null, "exception": "", "errors_found": 3, "exit_code": 0}',
    "JSON that echoes its timeout": '{"timeout": 30, "rows": [["error", 1]]}',
    "JSON rows": '[{"level": "error count", "n": 3}, {"level": "ok", "n": 9}]',
    "prose on exit codes": "The tool is documented.\nIt returns exit code 1 where nothing matches.\nSee also: grep.",
    "passed tests": "..... [100%]\n5 passed in 0.03s",
    "a log that mentions timeouts": "retry 1: upstream timed out\nretry 2: ok\nfetched 300 rows",
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_found(case: str) -> None:
    """Exit codes, JSON fields, tracebacks and leading errors are recognised."""
    assert status_of(FAILURES[case]) == "failure"


@pytest.mark.parametrize("case", TIMEOUTS)
def test_a_timeout_is_told_from_a_failure(case: str) -> None:
    """Tools report timeouts in many words and codes."""
    assert status_of(TIMEOUTS[case]) == "timeout"


@pytest.mark.parametrize("case", SUCCESSES)
def test_a_mention_of_an_error_is_not_a_failure(case: str) -> None:
    """Files, logs, pages and search hits are full of the word. An exit code of 0 outranks them all."""
    assert status_of(SUCCESSES[case]) == "success"


def test_is_error_rules_out_success() -> None:
    """`is_error` makes any text a failure, or a timeout if the text says so."""
    assert status_of("Not now", is_error=True) == "failure"
    assert status_of("Exit code 0\nfine", is_error=True) == "failure"
    assert status_of("Error: Exit code 143\nCommand timed out after 10s", is_error=True) == "timeout"


def test_only_the_ends_of_a_long_text_are_read() -> None:
    """An exit code in the middle of a megabyte belongs to a file; the last line counts."""
    middle = "line of a log\n" * 40_000
    assert status_of(middle + "Error: in the middle\nexit code: 3\n" + middle) == "success"
    assert status_of(middle + middle + "exit code: 3\n") == "failure"


@pytest.mark.parametrize(("begin", "end"), [('{"result": ', "}"), ("[", "]")])
def test_a_report_is_read_down_to_its_second_level(begin: str, end: str) -> None:
    """A tool may nest its result as deep as JSON goes, which is deeper than Python recurs."""
    assert status_of(begin * 2 + '{"exit_code": 1}' + end * 2) == "failure"
    assert status_of(begin * 900 + '{"exit_code": 1}' + end * 900) == "success"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(
            st.sampled_from(["error", "exit_code", "status", "result", "timed_out", "x"]), values, max_size=4
        )
    ),
    max_leaves=12,
)


@given(st.text() | json_values | json_values.map(lambda value: json.dumps(value)), st.booleans())
def test_any_result_has_a_status(result: object, is_error: bool) -> None:
    """Any text and any data have one of three statuses, and a flagged result is never a success."""
    status = status_of(result, is_error)
    assert status in ("success", "failure", "timeout")
    assert not (is_error and status == "success")
