"""Settings from a file and from the environment are read alike, and refused with the reason."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args

import httpx
import pytest
from annotated_types import Le

from engines.simulated.server import serve_engine
from engines.simulated.settings import SimulatedEngineSettings
from gateway.config import ConfigError, Settings, load_settings
from scheduling.limits import Limits
from tests.support.gateway import running_gateway

# Values that are not the default, for settings to which the rule of `other` does not apply.
OTHERS = {
    "host": "0.0.0.0",
    "engines": ["http://a:1", "sglang+http://b:2"],
    "policy": "verl",
    "predictor": "siblings",
    "predictor_model": "model",
    "text_predictor": "text.pt",
    "store": "memory:",
    "store_namespace": "other:",
    "event_log": "events.jsonl",
    "log_level": "debug",
    "api_keys": ["one", "two"],
    "admin_key": "three",
    "agent_keys": ["four", "five"],
    "default_slots": 64,
    "cors_origins": ["https://a.example", "http://b.example:3000"],
    "token_legs": "auto",
    "stale": "restart",
    "max_staleness": 3,
    "kv_watermark": 0.5,
    "in_tool_lease_s": 5.0,
    "entry_patience_s": 5.0,
    "byte_workers": 2,
}


NUMBERS = [
    name
    for name, field in Settings.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)}
]


def largest(name: str) -> int:
    """The largest value that this number may have."""
    own = [limit.le for limit in Settings.model_fields[name].metadata if isinstance(limit, Le)]
    return int(own[0]) if own else 10**15  # type: ignore[call-overload]


def other(name: str) -> object:
    """A valid value of this setting that is not its default."""
    default = Settings.model_fields[name].default
    if name in OTHERS:
        return OTHERS[name]
    return not default if isinstance(default, bool) else default + 1


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_setting_is_the_same_from_file_and_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/operating.md states: a key of the TOML file, or HEDDLE_ and its name in capitals, lists with commas."""
    value = other(name)
    file = tmp_path / "heddle.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n")
    from_file = load_settings(str(file))
    monkeypatch.setenv(f"HEDDLE_{name.upper()}", ",".join(value) if isinstance(value, list) else str(value))
    assert getattr(load_settings(), name) == getattr(from_file, name) != Settings.model_fields[name].default


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('host = "a\\u0000"', "setting host: must not have a NUL byte$"),
        ('store = "sqlite:a\\u0000"', "setting store: must not have a NUL byte$"),
        ('event_log = "a\\u0000"', "setting event_log: must not have a NUL byte$"),
        ("prot = 1", "setting prot: unknown, did you mean port? `heddle serve --settings` lists all$"),
        ("server = 1", "setting server: unknown; `heddle serve --settings` lists all$"),
        ("engines = 5", "setting engines: must be a list"),
        ('[[engines]]\nurl = "http://a:1"\nslot = 3', "setting engines.0.slot: unknown, did you mean slots?"),
        ('[[engines]]\nurl = "http://a:1"\nslots = 0', "setting engines.0.slots: must be at least 1, not 0$"),
        (
            f'[[engines]]\nurl = "http://a:1"\nkv_capacity_tokens = {2**54}',
            f"setting engines.0.kv_capacity_tokens: must be at most {2**53}, not {2**54}$",
        ),
        ('engines = ["a:1"]', "'a:1' is not a base URL"),
        ('engines = ["http://a b:1"]', "'http://a b:1' is not a base URL"),
        ('engines = ["http://日本:1"]', "'http://日本:1' is not a base URL"),
        (f'engines = ["http://{"a" * 64}:1"]', "' is not a base URL"),
        ('engines = ["http://[::1"]', r"'http://\[::1' is not a base URL"),
        ('engines = ["http://user:secret@a:1"]', "setting engines.url: must be a base URL without user and password; "),
        ('policy = "hedle"', "setting policy: no policy 'hedle', did you mean heddle? Known: heddle, "),
        ('predictor = "tabula"', "setting predictor: no predictor 'tabula', did you mean tabular? Known: tabular, "),
        ("kv_watermark = 7", "setting kv_watermark: must be at most 1, not 7$"),
        ("shutdown_timeout_s = inf", "setting shutdown_timeout_s: must be a finite number, not inf$"),
        ("port = ", "heddle.toml is not TOML: Invalid value"),
        ("admin_key = 5", r"setting admin_key: must be a string$"),
        ('admin_key = "k\\n"', r"setting admin_key: must be printable ASCII, without spaces or line ends around it$"),
        ('api_keys = ""', r"setting api_keys: must not be empty; leave it unset to let anybody use the gateway$"),
        ('agent_keys = ""', r"setting agent_keys: must not be empty; leave it unset to have none$"),
        (
            'api_keys = ["secret-a"]\nagent_keys = ["b", "secret-a"]',
            r"setting agent_keys: must not be keys of clients or the admin key too: agents would have their rights$",
        ),
        ('admin_key = "secret-a"\nagent_keys = ["secret-a"]', r"setting agent_keys: must not be keys of clients or "),
        ('agent_keys = ["secret-a\\n"]', r"setting agent_keys.0: must be printable ASCII, without spaces or line ends"),
        ('api_keys = ["one", ""]', r"setting api_keys.1: must not be empty$"),
        (
            'engines = [{url = "http://a:1", api_key = "k\\r\\nx: y"}]',
            r"setting engines.0.api_key: must be printable ASCII",
        ),
        ("max_attempts = true", "setting max_attempts: must be a number, not true$"),
        ("in_tool_lease_s = false", "setting in_tool_lease_s: must be a number, not false$"),
        ("policy = true", "setting policy: must be a string, not true$"),
        ('engines = [{url = "http://a:1", slots = true}]', "setting engines.0.slots: must be a number, not true$"),
        ('host = ""', "setting host: must not be empty, not ''$"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_name(tmp_path: Path, toml: str, message: str) -> None:
    """In one line: which setting, what is allowed, and what it was, unless it is a key."""
    file = tmp_path / "heddle.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as refused:
        load_settings(str(file))
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize("setting", ["api_keys", "agent_keys", "cors_origins"])
def test_a_list_in_json_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be one key of that text, which nobody sends."""
    monkeypatch.setenv(f"HEDDLE_{setting.upper()}", '["secret-a", "secret-b"]')
    with pytest.raises(ConfigError, match=rf"^setting {setting}: must be separated by commas, without brackets$"):
        load_settings()


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
@pytest.mark.parametrize(
    ("setting", "unset"), [("api_keys", "let anybody use the gateway"), ("agent_keys", "have none")]
)
def test_empty_keys_in_the_environment_stop_the_start(
    setting: str, unset: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compose file or a secret that was not filled in gives an empty variable; it used to open the gateway to all."""
    monkeypatch.setenv(f"HEDDLE_{setting.upper()}", value)
    with pytest.raises(ConfigError, match=rf"^setting {setting}: must not be empty; leave it unset to {unset}$"):
        load_settings()


def test_every_limit_of_the_scheduler_is_a_setting_with_the_same_default() -> None:
    """A limit that is fixed in the code could not be changed where it does not fit."""
    assert load_settings().limits() == Limits()
    changed = {limit.name: other(limit.name) for limit in fields(Limits)}
    assert asdict(load_settings(**changed).limits()) == changed


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_an_upper_limit(name: str) -> None:
    """The event log and the store hold 64-bit integers, and Python itself does not accept every count."""
    with pytest.raises(ConfigError, match=f"^setting {name}: must be at most {largest(name)}, not 1"):
        load_settings(**{name: 10**30})


async def test_turns_are_served_with_every_number_at_its_limit(tmp_path: Path) -> None:
    """Nothing overflows: with 10**12 tokens for a second of waiting, each turn used to be a 500."""
    files = {"store": f"sqlite:{tmp_path / 'heddle.sqlite3'}", "event_log": str(tmp_path / "events.jsonl")}
    limits = {name: largest(name) for name in NUMBERS if name != "port"}
    body = {"model": "simulated", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    async with (
        serve_engine(SimulatedEngineSettings(speed_up=50.0)) as engine,
        running_gateway(engine, token_legs="auto", **files, **limits) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60.0) as client,
    ):
        for stream in (False, True):
            answer = await client.post("/t/one/v1/chat/completions", json=body | {"stream": stream})
            assert answer.status_code == 200 and "error" not in answer.text, answer.text
        turns = (await client.get("/v1/trajectories/one")).json()["turns"]
        assert [turn["outcome"] for turn in turns] == ["finished", "finished"]


def test_an_unknown_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in a service's environment is not ignored."""
    monkeypatch.setenv("HEDDLE_PROT", "9000")
    with pytest.raises(ConfigError, match="HEDDLE_PROT, did you mean HEDDLE_PORT"):
        load_settings()


def test_an_unknown_variable_that_resembles_no_setting_is_refused_without_a_suggestion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What all names begin with does not make two alike: for HEDDLE_FOO it said HEDDLE_PORT."""
    monkeypatch.setenv("HEDDLE_FOO", "1")
    with pytest.raises(ConfigError, match=r"^unknown setting in the environment: HEDDLE_FOO; `heddle serve --settings"):
        load_settings()


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Some editors begin a file with one."""
    file = tmp_path / "heddle.toml"
    file.write_text("\ufeffport = 8090\n", encoding="utf-8")
    assert load_settings(str(file)).port == 8090


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with other variables, such as of a compose file: "cannot read the configuration file : there is none"."""
    monkeypatch.setenv("HEDDLE_CONFIG", "")
    assert load_settings().toml == {}


def test_settings_may_come_from_a_pipe() -> None:
    """As from a shell's `--config <(decrypt heddle.toml)`, which was refused: there was no such file."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"port = 8090\n")
        os.close(writer)
        assert load_settings(f"/dev/fd/{reader}").port == 8090
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("path", "why"),
    [("absent.toml", "there is no such file"), (".", "it is a folder"), ("/proc/self/mem", "Input/output error")],
)
def test_an_unreadable_file_is_reported_with_the_reason(path: str, why: str) -> None:
    """Another user's file, too, whose first byte cannot be read, does not end in a traceback."""
    with pytest.raises(ConfigError, match=f"^cannot read the configuration file {path}: {why}$"):
        load_settings(path)
