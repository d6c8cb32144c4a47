"""The gateway's settings: from the command line, the environment (`HEDDLE_...`), a TOML file, or the defaults, in this
order. Each field has its unit in its name and the reason for its default beside it. An unknown setting stops the start.
"""

import os
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engines.http import can_be_asked
from engines.profiles import load_profile
from gateway.mistakes import in_words, meant
from gateway.tokens.book import TokenLimits
from predictor.named import PREDICTORS
from scheduling.limits import Limits
from scheduling.policy import CMLFQ, POLICIES


class ConfigError(Exception):
    """The settings are not usable; the message is one clear line."""


def _as_sent(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError("a key is printable ASCII without blanks at its ends")
    return key


Key = Annotated[SecretStr, AfterValidator(_as_sent)]
"""A key as it is sent in a header; one that ends in a newline, as read from a file, would never match."""


def _known_profile(name: str | None) -> str | None:
    if name is not None:
        load_profile(name)
    return name


class EngineSettings(BaseModel):
    """One engine, as configured or as added at run time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="Base URL; `vllm+http://` and `sglang+http://` say the kind, else it is probed.")
    kind: Literal["vllm", "sglang"] | None = None
    slots: int | None = Field(None, ge=1, le=65_536, description="Turns at once; asked of the engine when absent.")
    kv_capacity_tokens: int | None = Field(None, ge=1, description="Asked of the engine when absent.")
    tp: int = Field(1, ge=1, le=1024)
    profile: Annotated[str | None, AfterValidator(_known_profile)] = Field(
        None, description="Name of the engine profile that tells how long it takes."
    )
    kv_transfer: Literal["nixl", "none"] | None = Field(
        None, description="How it hands KV to others; asked of the engine when absent, of which few tell."
    )
    kv_tier: str | None = Field(
        None,
        max_length=4096,
        description="KV tier that it shares with all that have the same; asked of it when absent, and few tell.",
    )
    api_key: Key | None = Field(None, description="Sent to this engine as its bearer token.")

    @classmethod
    def parse(cls, text: str) -> "EngineSettings":
        """The settings for a URL such as `http://host:8000` or `sglang+http://host:30000`."""
        kind, plus, rest = text.partition("+")
        return cls(url=rest, kind=kind) if plus and "://" not in kind else cls(url=text)

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        if not can_be_asked(url):
            raise ValueError(f"{url!r} is not a base URL such as http://host:8000")
        return url.rstrip("/").removesuffix("/v1")


# Read elsewhere: the file's name below, the others by the scripts in deploy/ and by the tests.
_OTHERS = frozenset({"HEDDLE_CONFIG", "HEDDLE_WORK", "HEDDLE_VLLM_VENV", "HEDDLE_REDIS_FROM"})


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}{meant(name, POLICIES)}; known: {', '.join(POLICIES)}")
    return name


def _known_predictor(name: str) -> str:
    if name not in PREDICTORS:
        raise ValueError(f"unknown predictor {name!r}{meant(name, PREDICTORS)}; known: {', '.join(PREDICTORS)}")
    return name


def _origin(text: str) -> str:
    if not re.fullmatch(r"\*|https?://[^/\s]+", text):
        raise ValueError(f"{text!r} is no origin such as https://dashboard.example:3000")
    return text


class Settings(BaseSettings):
    """Every setting of the gateway process."""

    model_config = SettingsConfigDict(env_prefix="HEDDLE_", extra="forbid", frozen=True, allow_inf_nan=False)
    toml_file: ClassVar[str | None] = None

    host: str = Field(
        "127.0.0.1", min_length=1, description="Loopback, because a gateway without keys must not face a network."
    )
    port: int = Field(8080, ge=0, le=65_535)
    engines: Annotated[tuple[EngineSettings, ...], NoDecode] = Field((), description="The fleet at start.")
    policy: Annotated[str, AfterValidator(_known_policy)] = "heddle"
    predictor: Annotated[str, AfterValidator(_known_predictor)] = Field(
        "tabular", description='Of a trajectory\'s work; with `policy = "cmlfq"` it is `tree` unless told.'
    )
    predictor_model: str | None = Field(None, description="What it begins with: a file of `heddle predictor train`.")
    text_predictor: str | None = Field(
        None, description="What reads conversations while tools run: a file of `heddle predictor train --text`."
    )
    store: str = Field("sqlite:heddle.sqlite3", description="`sqlite:PATH`, `redis://host:port/db` or `memory:`.")
    store_namespace: str = Field("heddle:", min_length=1, description="Redis keys begin with it; one for each fleet.")
    demand_interval_s: float = Field(
        5.0, gt=0, description="Between words to the controller by a Redis store; 6,400 trajectories take 35 ms."
    )
    event_log: str | None = Field(None, description="JSONL file of events and actions; none by default.")
    event_log_max_bytes: int = Field(256 * 2**20, ge=2**16, description="Then it is rotated once; two files are kept.")

    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="`info` has a line per turn.")

    api_keys: Annotated[tuple[Annotated[Key, Field(min_length=1)], ...], NoDecode] = Field(
        (), description="Client keys; none leaves it open."
    )
    admin_key: Key | None = Field(None, description="For what changes the fleet; without it, that is refused.")
    cors_origins: Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode] = Field(
        (), description="Whose pages may ask from a browser, `*` for all; none, for agents are no browsers."
    )

    max_body_bytes: int = Field(
        64 * 2**20, ge=1024, description="A 1M-token context is about 5 MB of JSON; images more."
    )
    max_header_bytes: int = Field(64 * 1024, ge=1024, description="As nginx's large_client_header_buffers, 4 x 16 KB.")
    max_answer_bytes: int = Field(64 * 2**20, ge=1024, description="Of one non-streamed answer; bounds memory.")
    max_kept_answer_bytes: int = Field(64 * 2**20, ge=0, description="Last answers of trajectories, for retries.")
    max_stored_answer_bytes: int = Field(64 * 2**10, ge=0, description="A longer answer is not kept over a restart.")
    body_timeout_s: float = Field(60.0, gt=0, description="Longest silence of a client that sends its request.")
    turn_timeout_s: float = Field(
        14_400.0, gt=0, description="Until a first byte; a whole answer of 40K tokens at 3 tokens/s, as in vime#350."
    )
    silence_timeout_s: float = Field(
        600.0,
        gt=0,
        description="A stream that began and says nothing more is broken; and who takes nothing of an answer has left.",
    )
    heartbeat_s: float = Field(10.0, gt=0, description="SSE comments while a stream waits; proxies cut at 60 s.")
    max_turns_per_key: int = Field(20_000, ge=1, description="Of one client key at once; more get 429.")

    byte_workers: int | None = Field(
        None, ge=0, le=256, description="Processes that pass streams on; unset: a core each but one, 4 at most."
    )
    byte_worker_turns: int = Field(
        64, ge=0, description="Turns at once from which on streams go to them; fewer are no work for a core."
    )
    byte_worker_loan_bytes: int = Field(
        64 * 2**10, ge=1024, description="Of a stream that a worker keeps, some 250 events; then it is lent anew."
    )
    byte_worker_timeout_s: float = Field(
        10.0, gt=0, description="A worker answers in milliseconds; one that does not is killed, with its streams."
    )

    token_legs: Literal["auto", "off"] = Field(
        "off", description="Where engines have token routes, turns go on from their last token elsewhere."
    )
    save_tokens_s: float = Field(
        1.0, gt=0, description="How much of a turn a killed gateway may lose; a write is a few KB a turn."
    )

    kept_leg_bytes: int = Field(
        4 * 2**20, ge=64 * 2**10, description="Of a response that outlives the gateway: 10,000 tokens of vLLM's."
    )
    kept_leg_s: float = Field(
        60.0, gt=0, description="So long it waits for its turn to be asked for again; retries of SDKs take less."
    )

    max_waiting_turns: int = Field(20_000, ge=0, description="Above any rollout known (6,400); more get 429.")
    queue_timeout_s: float = Field(1_800.0, gt=0, description="A rollout's step, not a client's patience.")
    max_attempts: int = Field(3, ge=1, le=100, description="Legs that one turn may lose to engines.")
    retry_pause_s: float = Field(2.0, ge=0, description="Before a turn goes back to an engine that failed it.")
    preempt_after_s: float = Field(5.0, ge=0, description="A leg runs so long before a turn takes its slot.")
    preempt_margin_tokens: float = Field(
        4_000.0, ge=0, description="More urgent by so much predicted work; for less, two prefills are too dear."
    )
    trajectory_ttl_s: float = Field(3_600.0, gt=0, description="Idle that long, a trajectory is over.")
    retention_s: float = Field(3_600.0, gt=0, description="An ended trajectory can be looked at that long.")
    max_trajectories: int = Field(200_000, ge=1, description="Some 8 KB each in memory, and 1 KB a turn.")
    max_turns_kept: int = Field(1_000, ge=1, description="History of one trajectory; the newest are kept.")
    keep_tokens: bool = Field(True, description="Of turns at token level, for splicing the next one and for trainers.")
    keep_logprobs: bool = Field(True, description="With kept tokens; engines compute them for every token then.")
    max_token_memory_bytes: int = Field(
        512 * 2**20, ge=0, description="2,200 trajectories of 32K tokens at 7.3 bytes; more is read from the store."
    )
    max_stored_token_bytes: int = Field(
        4 * 2**30,
        ge=0,
        description="Two rollouts of 6,400 trajectories of 40K tokens at 7.3 bytes; then the oldest go.",
    )
    max_token_age_s: float = Field(14_400.0, gt=0, description="Since a trajectory's last turn; no trainer is so late.")
    kv_watermark: float = Field(0.9, gt=0, le=1, description="Share of KV up to which trajectories enter an engine.")
    in_tool_lease_s: float | None = Field(
        None, ge=0, description="KV is kept for a tool call that long against others; unset: what a refill costs."
    )
    entry_patience_s: float = Field(300.0, ge=0, description="After it, a waiting turn takes any idle claim.")
    ageing_tokens_per_s: float = Field(100.0, ge=0, description="What a second of waiting counts against work.")

    kv_move_min_tokens: int = Field(
        1_000, ge=0, description="Of KV that follows a trajectory to another engine; less is prefilled as fast."
    )
    kv_move_timeout_s: float = Field(
        10.0, gt=0, le=25, description="For each; 40K tokens take 0.2 to 0.7 s. Less than the engines' lease of 30 s."
    )
    kv_moves_at_once: int = Field(8, ge=1, description="In tool calls; more only share the network.")
    max_kept_request_bytes: int = Field(
        256 * 2**20, ge=0, description="Last requests of trajectories, from which their KV is moved in a tool call."
    )

    weight_pause_timeout_s: float = Field(60.0, gt=0, description="A pause waits for one step: a long prefill.")
    weight_load_timeout_s: float = Field(1_800.0, gt=0, description="A checkpoint of 700 GB from a shared disk.")
    weight_loads_at_once: int = Field(16, ge=1, description="Engines that read the same checkpoint from disk together.")
    max_staleness: int | None = Field(
        None, ge=0, description="Versions by which a trajectory's oldest token may be behind; none by default."
    )
    stale: Literal["refuse", "restart"] = Field(
        "refuse", description="Beyond it: refuse its turns, or only make those that run anew."
    )

    default_slots: int = Field(
        128, ge=1, description="vLLM's own default of max_num_seqs, for engines that do not tell."
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="An engine on the same network accepts in milliseconds.")
    max_connections_per_engine: int = Field(4096, ge=1, description="Twice the largest max_num_seqs in use.")
    max_conversations: int = Field(20_000, ge=1, description="Clients without an id that are known again; 1 KB each.")
    observe_interval_s: float = Field(1.0, gt=0, description="Between looks at an engine's metrics.")
    observe_timeout_s: float = Field(
        5.0, gt=0, description="A metrics page takes milliseconds; a busy CPU engine, 1 s."
    )
    faults_to_open: int = Field(3, ge=1, description="Connection faults in a row that open an engine's circuit.")
    stall_timeout_s: float = Field(
        120.0, gt=0, description="Turns run and no token comes: a hung engine. Above a long prefill."
    )
    start_timeout_s: float = Field(5.0, ge=0, description="How long the start waits for engines before it serves.")
    store_start_timeout_s: float = Field(
        10.0, ge=0, description="A store restarted beside the gateway is back by then."
    )
    settle_timeout_s: float = Field(0.05, ge=0, description="How long an answer's end waits for the store's ack.")
    shutdown_timeout_s: float = Field(30.0, ge=0, description="Turns under way may end within this at SIGTERM.")

    @field_validator("engines", mode="before")
    @classmethod
    def _parse_engines(cls, value: Any) -> Any:
        texts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise ValueError("a list of URLs or tables is wanted")
        return tuple(EngineSettings.parse(item) if isinstance(item, str) else item for item in texts)

    @field_validator("engines")
    @classmethod
    def _each_engine_once(cls, engines: tuple[EngineSettings, ...]) -> tuple[EngineSettings, ...]:
        urls = [engine.url for engine in engines]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"{twice} is there twice")
        return engines

    @field_validator("api_keys", "cors_origins", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

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
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, cls.toml_file))

    @property
    def predictor_name(self) -> str:
        """The predictor to use: for Libra's buckets, its trees of tool outcomes unless another is set."""
        is_told = "predictor" in self.model_fields_set
        return "tree" if self.policy == CMLFQ.name and not is_told else self.predictor

    def token_limits(self) -> TokenLimits:
        """The settings of the token book."""
        return TokenLimits(
            keep=self.keep_tokens,
            memory_bytes=self.max_token_memory_bytes,
            stored_bytes=self.max_stored_token_bytes,
            age_s=self.max_token_age_s,
        )

    def limits(self) -> Limits:
        """The settings of the scheduler."""
        return Limits(
            kv_watermark=self.kv_watermark,
            in_tool_lease_s=self.in_tool_lease_s,
            entry_patience_s=self.entry_patience_s,
            ageing_tokens_per_s=self.ageing_tokens_per_s,
            max_waiting_turns=self.max_waiting_turns,
            queue_timeout_s=self.queue_timeout_s,
            max_attempts=self.max_attempts,
            retry_pause_s=self.retry_pause_s,
            preempt_after_s=self.preempt_after_s,
            preempt_margin_tokens=self.preempt_margin_tokens,
            trajectory_ttl_s=self.trajectory_ttl_s,
            retention_s=self.retention_s,
            max_trajectories=self.max_trajectories,
        )


def load_settings(config_file: str | None = None, **overrides: Any) -> Settings:
    """The settings of this process.

    Args:
        config_file: a TOML file; by default the one that HEDDLE_CONFIG names. Every key is a field's name.
        overrides: from the command line; None means not given.

    Raises:
        ConfigError: a value is malformed or a key unknown; one line says which.
    """
    config_file = config_file or os.environ.get("HEDDLE_CONFIG")
    if config_file is not None and not os.path.isfile(config_file):
        raise ConfigError(f"no such configuration file: {config_file}")
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith("HEDDLE_") and name not in _OTHERS and name[7:].lower() not in Settings.model_fields
    )
    if unknown:
        known = [f"HEDDLE_{name.upper()}" for name in Settings.model_fields]
        raise ConfigError(f"unknown setting in the environment: {unknown[0]}{meant(unknown[0], known)}")
    sourced = type("Settings", (Settings,), {"toml_file": config_file, "__doc__": Settings.__doc__})
    try:
        settings = sourced(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(in_words(error, Settings.model_fields, EngineSettings.model_fields)) from None
    except ValueError as error:
        raise ConfigError(f"configuration file {config_file}: {error}") from None
    assert isinstance(settings, Settings)
    return settings
