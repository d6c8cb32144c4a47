"""The gateway's settings: from the command line, the environment (`HEDDLE_...`), a TOML file, or the defaults, in this
order. Each field has its unit in its name and the reason for its default beside it. An unknown setting stops the start.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engines.validation_errors import first_mistake, meant, numbers
from gateway.engine_settings import EngineSettings, Key
from gateway.tokens.book import TokenLimits
from predictor.named import PREDICTORS
from scheduling.limits import Limits
from scheduling.policy import CMLFQ, POLICIES


class ConfigError(Exception):
    """The settings are not usable; the message is one clear line."""


_PREFIX = "HEDDLE_"
_SEE_ALL = "`heddle serve --settings` lists all"
# Read elsewhere: the file's name below, the others by the scripts in deploy/ and by the tests.
_OTHERS = frozenset({"HEDDLE_CONFIG", "HEDDLE_WORK", "HEDDLE_VLLM_VENV", "HEDDLE_REDIS_FROM"})

# Of settings without a limit of their own: 30 million years, or a petabyte. The event log and the store hold integers
# of 64 bits.
_MAX_NUMBER = 10**15


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}{_choices(name, POLICIES)}")
    return name


def _known_predictor(name: str) -> str:
    if name not in PREDICTORS:
        raise ValueError(f"no predictor {name!r}{_choices(name, PREDICTORS)}")
    return name


def _choices(name: str, known: Iterable[str]) -> str:
    """After a name that is not known: the one that was meant, and all that there are."""
    near = meant(name, known)
    return f"{near} Known: {', '.join(known)}" if near else f"; known: {', '.join(known)}"


def _origin(text: str) -> str:
    if not re.fullmatch(r"\*|https?://[^/\s]+", text):
        raise ValueError(f"{text!r} is neither * nor an origin such as https://dashboard.example:3000")
    return text


class Settings(BaseSettings):
    """Every setting of the gateway process."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True, allow_inf_nan=False)
    toml: ClassVar[dict[str, Any]] = {}

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. Loopback, because a gateway without keys must not face a network.",
    )
    port: int = Field(8080, ge=0, le=65_535, description="Port to listen on; 0 takes any free one.")
    engines: Annotated[tuple[EngineSettings, ...], NoDecode] = Field(
        (), description="The fleet at start: URLs, or `[[engines]]` tables with the fields listed at the end."
    )
    policy: Annotated[str, AfterValidator(_known_policy)] = Field(
        "heddle",
        description="How turns are scheduled: `heddle`, or one of the policies that `heddle simulate` compares.",
    )
    predictor: Annotated[str, AfterValidator(_known_predictor)] = Field(
        "tabular",
        description='Predicts the work of a trajectory; with `policy = "cmlfq"` it is `tree` unless set here.',
    )
    predictor_model: str | None = Field(None, description="Start from this file, made by `heddle predictor train`.")
    text_predictor: str | None = Field(
        None, description="Model that reads conversations during tool calls, made by `heddle predictor train --text`."
    )
    store: str = Field("sqlite:heddle.sqlite3", description="`sqlite:PATH`, `redis://host:port/db` or `memory:`.")
    store_namespace: str = Field(
        "heddle:", min_length=1, description="Prefix of the keys in Redis; each fleet needs its own."
    )
    demand_interval_s: float = Field(
        5.0,
        gt=0,
        description="Interval of reports to the controller over Redis; one on 6,400 trajectories takes 35 ms.",
    )
    event_log: str | None = Field(None, description="JSONL file of the scheduler's events and actions.")
    event_log_max_bytes: int = Field(
        256 * 2**20, ge=2**16, description="At this size the event log is rotated; the last two files are kept."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="`info` logs one line per turn."
    )

    api_keys: Annotated[tuple[Annotated[Key, Field(min_length=1)], ...], NoDecode] = Field(
        (), description="Keys that clients must send; without these and `agent_keys`, anybody may use the gateway."
    )
    admin_key: Key | None = Field(None, description="Required to change the fleet; without one, changes are refused.")
    agent_keys: Annotated[tuple[Annotated[Key, Field(min_length=1)], ...], NoDecode] = Field(
        (),
        description="Keys with which agents may only ask for turns, because they run what a policy in training wrote.",
    )
    cors_origins: Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode] = Field(
        (),
        description="Web origins whose pages may call the gateway, `*` for all. None, because agents are not browsers.",
    )

    max_body_bytes: int = Field(
        64 * 2**20,
        ge=1024,
        description="Largest request body. A context of 1M tokens is about 5 MB of JSON; images add more.",
    )
    max_header_bytes: int = Field(
        64 * 1024,
        ge=1024,
        description="Largest request header. The same as nginx's large_client_header_buffers, 4 x 16 KB.",
    )
    max_answer_bytes: int = Field(
        64 * 2**20,
        ge=1024,
        description="Largest answer that is not streamed; bounds memory. A longer stream passes, but is not kept.",
    )
    max_running_answer_bytes: int = Field(
        2**30,
        ge=0,
        description="Memory for the answers of running turns, which repeated requests join: 4M tokens of streams. "
        "Beyond it, the longest are passed on and not kept.",
    )
    max_kept_answer_bytes: int = Field(
        64 * 2**20, ge=0, description="Memory for the last answers of trajectories, which are sent again to retries."
    )
    max_stored_answer_bytes: int = Field(64 * 2**10, ge=0, description="A longer answer does not survive a restart.")
    body_timeout_s: float = Field(60.0, gt=0, description="Longest pause of a client while it sends a request.")
    turn_timeout_s: float = Field(
        14_400.0,
        gt=0,
        description="Longest wait for an engine's first byte: a whole answer of 40K tokens at 3 tokens/s (vime#350).",
    )
    silence_timeout_s: float = Field(
        600.0,
        gt=0,
        description="An engine's stream that pauses longer is broken; a client that reads nothing for longer has left.",
    )
    heartbeat_s: float = Field(
        10.0, gt=0, description="Interval of SSE comments while a stream waits; proxies cut idle connections at 60 s."
    )
    max_turns_per_key: int = Field(20_000, ge=1, description="Concurrent turns of one client key; more get 429.")

    byte_workers: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Processes that pass streams on (Linux only). Unset: one per core except one, at most 4.",
    )
    byte_worker_turns: int = Field(
        64, ge=0, description="Streams go to byte workers from this many concurrent turns on; fewer do not fill a core."
    )
    byte_worker_loan_bytes: int = Field(
        64 * 2**10,
        ge=1024,
        description="Bytes of a stream that a byte worker passes on in one loan: some 250 events.",
    )
    byte_worker_timeout_s: float = Field(
        10.0,
        gt=0,
        description="A byte worker answers in milliseconds; one that takes longer is killed with its streams.",
    )

    token_legs: Literal["auto", "off"] = Field(
        "off",
        description="`auto`: with token routes, an interrupted turn continues on another engine from its last token.",
    )
    save_tokens_s: float = Field(
        1.0,
        gt=0,
        description="A killed gateway loses at most this much of a running turn; each write is a few KB per turn.",
    )

    kept_leg_bytes: int = Field(
        4 * 2**20, ge=64 * 2**10, description="How much of a response may outlive the gateway: 10,000 tokens from vLLM."
    )
    kept_leg_s: float = Field(
        60.0, gt=0, description="How long such a response waits until its turn is asked for again; SDKs retry sooner."
    )

    max_waiting_turns: int = Field(
        20_000, ge=0, description="Turns in the queue; more get 429. Above any known rollout (6,400)."
    )
    queue_timeout_s: float = Field(
        1_800.0, gt=0, description="Longest wait in the queue: the length of a rollout's step, not a client's patience."
    )
    max_attempts: int = Field(
        3, ge=1, le=100, description="Legs that a turn may lose to failing engines before its client gets the error."
    )
    max_killed_engines: int = Field(
        2,
        ge=1,
        le=100,
        description="Engines that may die under a turn before its first token: some requests kill every engine.",
    )
    retry_pause_s: float = Field(2.0, ge=0, description="Pause before a turn goes back to an engine that failed it.")
    preempt_after_s: float = Field(
        5.0, ge=0, description="A leg runs at least this long before another turn may take its slot."
    )
    preempt_margin_tokens: float = Field(
        4_000.0,
        ge=0,
        description="Predicted tokens by which a turn must be more urgent to take a slot; a swap costs two prefills.",
    )
    gather_max_s: float = Field(
        0.25, ge=0, description="Longest that a turn waits to be prefilled with others; only with a measured profile."
    )
    sends_ahead: bool = Field(
        True,
        description="Send a few turns before a slot is free: as many as end while a request is on its way to the "
        "engine's steps and back. Not if `slots` is below what the engine runs.",
    )
    trajectory_ttl_s: float = Field(3_600.0, gt=0, description="A trajectory that is idle this long has ended.")
    retention_s: float = Field(
        3_600.0,
        gt=0,
        description="How long an ended trajectory can still be read, from the end of its rollout if it has one.",
    )
    max_trajectories: int = Field(
        200_000, ge=1, description="Trajectories in memory: some 8 KB each, and 1 KB per turn."
    )
    max_turns_kept: int = Field(1_000, ge=1, description="Turns in the history of one trajectory; the newest are kept.")
    keep_tokens: bool = Field(
        True, description="Keep the tokens of turns at token level, to splice the next turn and for trainers."
    )
    keep_logprobs: bool = Field(
        True, description="Keep their log-probabilities too, which engines then compute for every token."
    )
    max_token_memory_bytes: int = Field(
        512 * 2**20,
        ge=0,
        description="Memory for tokens: 2,200 trajectories of 32K at 7.3 bytes. The rest is read from the store. "
        "Trajectories whose turns run on engines stay in memory, also above it.",
    )
    max_stored_token_bytes: int = Field(
        4 * 2**30,
        ge=0,
        description="Stored tokens: two rollouts of 6,400 trajectories of 40K at 7.3 bytes. The oldest go first.",
    )
    max_token_age_s: float = Field(
        14_400.0,
        gt=0,
        description="Tokens are dropped this long after a trajectory's last turn; no trainer reads them later. An "
        "ended trajectory is forgotten then even if its rollout goes on.",
    )
    kv_watermark: float = Field(
        0.9, gt=0, le=1, description="Share of an engine's KV up to which trajectories may enter."
    )
    answer_tokens: int = Field(
        500,
        ge=0,
        description="Expected answer of a turn, claimed in advance until its trajectory's own are known.",
    )
    in_tool_lease_s: float | None = Field(
        None,
        ge=0,
        description="Lease of a trajectory's claim during a tool call. Unset: learned from the tool calls before.",
    )
    entry_patience_s: float | None = Field(
        None,
        ge=0,
        description="A turn that has waited this long may take the KV of any trajectory in a tool call. Unset: half of "
        "queue_timeout_s.",
    )
    ageing_tokens_per_s: float = Field(
        100.0,
        ge=0,
        le=1_000_000,
        description="Predicted tokens that one second of waiting is worth; 1,000,000 is first come, first served.",
    )

    kv_move_min_tokens: int = Field(
        1_000, ge=0, description="Least KV that follows a trajectory to another engine; less is prefilled as fast."
    )
    kv_move_timeout_s: float = Field(
        10.0,
        gt=0,
        le=25,
        description="Longest fetch of a move, and then longest prefill in its place; 40K tokens are fetched in 0.2 to "
        "0.7 s. Must be below the engines' lease of 30 s.",
    )
    kv_moves_at_once: int = Field(
        8, ge=1, description="Concurrent KV moves in tool calls; more only share the network."
    )
    max_kept_request_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="Memory for the last requests of trajectories, from which their KV is moved in a tool call.",
    )

    weight_pause_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Longest wait for an engine to pause for weights; it finishes one step, at worst a long prefill.",
    )
    weight_load_timeout_s: float = Field(
        1_800.0, gt=0, description="Longest load of new weights by an engine; 700 GB from a shared disk take this."
    )
    weight_loads_at_once: int = Field(16, ge=1, description="Engines that read the same checkpoint from disk at once.")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Versions by which a trajectory's oldest token may lag behind the weights. Unset: no limit.",
    )
    stale: Literal["refuse", "restart"] = Field(
        "refuse",
        description="Beyond `max_staleness`: `refuse` a trajectory's turns, or `restart` only a turn that is running.",
    )

    default_slots: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="Slots of an engine that does not report them (vLLM, unless in development mode). Unset: they are "
        "searched for, from 128 on, as long as nothing waits in the engine.",
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, description="Longest wait to connect to an engine; one on the same network accepts in milliseconds."
    )
    max_connections_per_engine: int = Field(
        4096, ge=1, description="Connections to one engine; twice the largest max_num_seqs in use."
    )
    max_conversations: int = Field(
        20_000,
        ge=1,
        description="Conversations whose next request is read from where the last one ended, and by which trajectories "
        "without an id are recognised; 1 to 5 KB each.",
    )
    collect_interval_s: float = Field(
        0.1,
        gt=0,
        description="Interval of collecting young garbage: with 10,000 live trajectories, each takes 1 to 3 ms.",
    )
    observe_interval_s: float = Field(1.0, gt=0, description="Interval of reads of an engine's metrics.")
    models_interval_s: float = Field(
        5.0, gt=0, description="Interval of reads of an engine's models: LoRA adapters come and go while it runs."
    )
    observe_timeout_s: float = Field(
        5.0, gt=0, description="Longest read of an engine's metrics: milliseconds, or 1 s on a busy CPU engine."
    )
    faults_to_open: int = Field(3, ge=1, description="Connection faults in a row after which an engine is lost.")
    stall_timeout_s: float = Field(
        120.0,
        gt=0,
        description="An engine that runs turns but produces no token for this long is hung. Above a long prefill.",
    )
    start_timeout_s: float = Field(
        5.0, ge=0, description="How long the start waits for engines before the gateway serves without them."
    )
    store_start_timeout_s: float = Field(
        10.0,
        ge=0,
        description="How long the start waits for the store; one restarted beside the gateway is back by then.",
    )
    settle_timeout_s: float = Field(
        0.05, ge=0, description="How long answers that changed the record wait for the store to acknowledge it."
    )
    shutdown_timeout_s: float = Field(30.0, ge=0, description="How long running turns may take to end after SIGTERM.")

    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    @field_validator("*")
    @classmethod
    def _is_within_max_number(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value > _MAX_NUMBER:
            raise ValueError(f"must be at most {_MAX_NUMBER}, not {value}")
        return value

    @field_validator("host", "store", "event_log")
    @classmethod
    def _can_be_opened(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("must not have a NUL byte")
        if value is not None and (info.field_name == "event_log" or value.startswith("sqlite:")):
            try:
                os.fsencode(value)
            except UnicodeEncodeError:
                encoding = sys.getfilesystemencoding()
                raise ValueError(
                    f"is no path in this locale, whose encoding is {encoding}; try LC_ALL=C.UTF-8"
                ) from None
        return value

    @field_validator("engines", mode="before")
    @classmethod
    def _parse_engines(cls, value: Any) -> Any:
        texts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise ValueError("must be a list of URLs or [[engines]] tables")
        return tuple(EngineSettings.parse(item) if isinstance(item, str) else item for item in texts)

    @field_validator("engines")
    @classmethod
    def _each_engine_once(cls, engines: tuple[EngineSettings, ...]) -> tuple[EngineSettings, ...]:
        addresses = [engine.address for engine in engines]
        if twice := next((engine.url for engine in engines if addresses.count(engine.address) > 1), None):
            raise ValueError(f"{twice} is listed twice")
        return engines

    @field_validator("api_keys", "agent_keys", "cors_origins", mode="before")
    @classmethod
    def _parse_list(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        parts = tuple(part.strip() for part in value.split(",") if part.strip())
        if info.field_name != "cors_origins" and not parts:  # a variable that a deployment meant to fill, and did not
            unset = "let anybody use the gateway" if info.field_name == "api_keys" else "have none"
            raise ValueError(f"must not be empty; leave it unset to {unset}")
        if value.lstrip().startswith("["):  # as other programs take a list in a variable
            raise ValueError("must be separated by commas, without brackets")
        return parts

    @field_validator("agent_keys")
    @classmethod
    def _are_of_agents_only(cls, keys: tuple[Key, ...], info: ValidationInfo) -> tuple[Key, ...]:
        if not {*info.data.get("api_keys", ()), info.data.get("admin_key")}.isdisjoint(keys):
            raise ValueError("must not be keys of clients or the admin key too: agents would have their rights")
        return keys

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line over environment over file."""
        return (init_settings, env_settings, InitSettingsSource(settings_cls, cls.toml))

    @property
    def predictor_name(self) -> str:
        """The predictor to use: for Libra's buckets, its trees of tool outcomes unless another is set."""
        is_set = "predictor" in self.model_fields_set
        return "tree" if self.policy == CMLFQ.name and not is_set else self.predictor

    @property
    def has_token_legs(self) -> bool:
        """Whether turns are served at token level where engines can."""
        return self.token_legs != "off"

    def token_limits(self) -> TokenLimits:
        """The settings of the token book."""
        return TokenLimits(
            keep=self.keep_tokens,
            memory_bytes=self.max_token_memory_bytes,
            stored_bytes=self.max_stored_token_bytes,
            age_s=self.max_token_age_s,
        )

    def limits(self) -> Limits:
        """The settings of the scheduler: each of its limits is one, of the same name."""
        return Limits(**{limit.name: getattr(self, limit.name) for limit in fields(Limits)})


def load_settings(config_file: str | None = None, **overrides: Any) -> Settings:
    """The settings of this process.

    Args:
        config_file: a TOML file; by default the one that HEDDLE_CONFIG names. Every key is a field's name.
        overrides: from the command line; None means not given.

    Raises:
        ConfigError: a value is malformed or a key unknown; one line says which.
    """
    config_file = config_file or os.environ.get("HEDDLE_CONFIG") or None
    # A pipe may be read, such as the output of a program that decrypts the file.
    if config_file is not None and (os.path.isdir(config_file) or not os.path.exists(config_file)):
        why = "it is a folder" if os.path.isdir(config_file) else "there is no such file"
        raise ConfigError(f"cannot read the configuration file {config_file}: {why}")
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(_PREFIX)
        and name not in _OTHERS
        and name[len(_PREFIX) :].lower() not in Settings.model_fields
    )
    if unknown:
        near = meant(unknown[0][len(_PREFIX) :], [name.upper() for name in Settings.model_fields], _PREFIX)
        raise ConfigError(f"unknown setting in the environment: {unknown[0]}{near or f'; {_SEE_ALL}'}")
    sourced: Any = Settings
    if config_file is not None:
        sourced = type("Settings", (Settings,), {"toml": _read(config_file), "__doc__": Settings.__doc__})
    try:
        settings = sourced(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        name, said = first_mistake(error, Settings)
        if said.startswith("unknown"):
            said += f"{'' if said.endswith('?') else ';'} {_SEE_ALL}"
        raise ConfigError(f"setting {name}: {said}") from None
    assert isinstance(settings, Settings)
    return settings


def _read(config_file: str) -> dict[str, Any]:
    """The content of a TOML file; some editors begin one with a byte-order mark."""
    try:
        return tomllib.loads(Path(config_file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {config_file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"configuration file {config_file} is not TOML: {error}") from None
