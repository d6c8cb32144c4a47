"""The file that describes a fleet: `fleet.toml`. What is malformed or unknown stops the start with one line."""

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.launcher_options import check_options
from controller.restarts import RetryRule
from controller.spares import SpareRule
from engines.http import can_be_asked
from engines.keys import check_key
from engines.profiles import load_profile
from engines.sleep import SLEEP
from engines.validation_errors import first_mistake, numbers
from scheduling.cost import EngineProfile
from store import BadStoreUrl, StoreError, open_store

PIN_VARIABLE = "CUDA_VISIBLE_DEVICES"  # each engine's GPUs, on this machine and on Ray
_KUBERNETES_FILES = {"template", "kubeconfig"}  # launcher options that are paths
_DAY_S = 86_400  # the longest evacuation that the gateway accepts; Ray cannot wait for much longer ones


class FleetFileError(Exception):
    """The fleet file cannot be used; the message is one clear line."""


def _base_url(url: str) -> str:
    if not can_be_asked(url):
        if "@" in url:  # not shown: it may hold a password
            raise ValueError("must be without user and password, such as http://127.0.0.1:8080")
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8080")
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise ValueError(f"must be without /v1, which is added to it, not {url!r}")
    return url


def _redis_url(url: SecretStr | None) -> SecretStr | None:
    if url is not None:
        text = url.get_secret_value()
        try:
            if not text.startswith(("redis://", "rediss://")):
                raise BadStoreUrl
            open_store(text)
        except StoreError:
            raise ValueError("must be a URL such as redis://127.0.0.1:6379/0") from None
    return url


def _as_sent(key: SecretStr | None) -> SecretStr | None:
    if key:
        check_key(key.get_secret_value())
    return key


def _fleet_id(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise ValueError(f"must be up to 40 lower-case letters, digits and inner hyphens, not {text!r}")
    return text


def _device(name: str) -> str:
    """The name without blanks around it, which CUDA ignores: " 0" is the same GPU as "0"."""
    if not name.strip() or "," in name:
        raise ValueError(f"{name!r} is not one device, such as '0' or 'GPU-5a1b'")
    return name.strip()


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of an environment variable")
    return name


def _power_of_two(tp: int) -> int:
    if tp & (tp - 1):
        raise ValueError(f"TP {tp} is not a power of two")
    return tp


Tp = Annotated[int, Field(ge=1, le=1024), AfterValidator(_power_of_two)]
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineTable(BaseModel):
    """How an engine is launched."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    kind: Literal["vllm", "sglang", "sim"] = "vllm"
    program: tuple[str, ...] = Field((), description="What runs the server; the kind's own by default.")
    flags: tuple[str, ...] = Field((), description="Further flags of all engines, after Heddle's; the last wins.")
    flags_by_tp: dict[Tp, tuple[str, ...]] = Field({}, description="Further flags of one TP size.")
    environment: dict[Annotated[str, AfterValidator(_variable)], str] = Field(
        {}, description="Environment variables of every engine."
    )
    slots: int | None = Field(None, ge=1, le=65_536, description="Concurrent turns. Unset: the engine's default.")
    kv_bytes_by_tp: dict[Tp, Annotated[int, Field(gt=0)]] = Field(
        {},
        description="KV cache of each GPU in bytes, by TP size. The engine then skips profiling, which saves seconds.",
    )
    profiles: dict[Tp, str] = Field({}, description="Engine profile of each TP size; plans need them.")
    kv_transfer: Literal["nixl"] | None = Field(
        None, description="vLLM: KV follows trajectories when the fleet changes; needs the nixl package there."
    )
    kv_tier: Path | None = Field(None, description="Folder that all engines share: KV outlives its engine there.")
    kv_tier_host_bytes: int = Field(
        2**34, gt=0, description="vLLM: bytes of /dev/shm for each engine; 40K tokens of a 14B model are 6.5 GB."
    )
    is_fast_start: bool = Field(True, description="What makes a relaunch faster and changes nothing else.")


class Sleeping(BaseModel):
    """Which engines are put to sleep, instead of stopped, when the fleet changes."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    tp_sizes: tuple[Tp, ...] = Field((), description="Sizes that may sleep. None: changes stop and launch.")
    is_ahead: bool = Field(True, description="Start sleepers on each block of GPUs before the first fleet.")
    level: Literal[1, 2] = Field(1, description="1: weights stay in host memory; 2: are read again. SGLang: 1.")
    weight_bytes: int | None = Field(None, gt=0, description="Of the whole model; level 1 keeps them for each engine.")
    host_bytes: int | None = Field(
        None, gt=0, description="Host memory for all sleepers; more would push the engines out."
    )

    def check(self, kind: str, tp_sizes: tuple[int, ...], num_devices: int) -> None:
        """Raises ValueError if these engines cannot sleep this way."""
        if unknown := set(self.tp_sizes) - set(tp_sizes):
            raise ValueError(f"sleep.tp_sizes: TP {min(unknown)} is not among tp_sizes")
        if self.level not in SLEEP[engine_kind(kind)].levels:
            raise ValueError(f"sleep.level: {kind} has no level {self.level}")
        if not self.tp_sizes or self.level == 2 or kind == "sim":
            return
        if self.weight_bytes is None or self.host_bytes is None:
            raise ValueError("sleep.level 1 keeps weights in host memory: set sleep.weight_bytes and sleep.host_bytes")
        num_engines = sum(num_devices // tp for tp in self.tp_sizes)
        if num_engines * self.weight_bytes > self.host_bytes:
            needs = f"{num_engines} x {self.weight_bytes:,} bytes"
            sizes = list(self.tp_sizes)
            raise ValueError(f"sleep: TP {sizes} may keep {needs}, more than sleep.host_bytes ({self.host_bytes:,})")


class WarmUp(BaseModel):
    """The request that a new engine serves before its first turn; it triggers late compilation."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    prompt: str = "Say hello."
    max_tokens: int = Field(8, ge=0, le=4096, description="0: no request.")
    timeout_s: float = Field(120.0, gt=0, description="A first compilation takes a minute.")


class Limits(BaseModel):
    """Limits on what the controller waits for and repeats."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    start_timeout_s: float = Field(900.0, gt=0, description="Longest start; large weights over a network take 10 min.")
    max_tries: int = Field(3, ge=1, description="Starts of one server; one that fails three times fails for a reason.")
    back_off_s: float = Field(5.0, ge=0, description="Pause before the second start; it doubles each time.")
    max_back_off_s: float = Field(300.0, ge=0, description="Longest pause between starts.")
    min_serving_s: float = Field(
        600.0,
        gt=0,
        description="Time of serving after which earlier tries no longer count; too little memory shows sooner.",
    )
    stop_grace_s: float = Field(
        20.0, ge=0, le=_DAY_S, description="Time between SIGTERM and SIGKILL; vLLM ends within 10 s."
    )
    max_starting: int = Field(8, ge=1, description="Servers that start concurrently; they share disks and cores.")
    min_engines: int = Field(0, ge=0, description="Engines that keep serving during a change. 0: turns wait meanwhile.")
    sleep_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Longest time to fall asleep or to wake: 140 GB of weights take 10 s, from a disk a minute.",
    )
    move_timeout_s: float = Field(
        60.0, ge=0, le=_DAY_S, description="Longest time to move a server's KV; the rest is left."
    )
    drain_alarm_s: float = Field(1800.0, gt=0, description="A longer drain raises an alarm; nothing is killed.")
    observe_interval_s: float = Field(1.0, gt=0, description="Interval of observing launcher and gateway.")
    gateway_start_s: float = Field(
        10.0, ge=0, description="Until an absent gateway is an alarm at the start: both may have been started together."
    )
    max_log_bytes: int = Field(
        16 * 2**20,
        ge=64 * 2**10,
        description="Size of a local server's log; two are kept, also of the last 50 stopped servers.",
    )


class Planning(BaseModel):
    """When the fleet is reshaped without a request."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    is_automatic: bool = Field(False, description="Carry plans out; otherwise they are only shown.")
    interval_s: float = Field(30.0, gt=0, description="Interval of plans.")
    min_gain_share: float = Field(
        0.15,
        ge=0,
        le=1,
        description="Least gain, as a share of the time left, relaunch included; less did harm in the study.",
    )
    min_correlation: float = Field(
        0.9, ge=0, le=1, description="Least log-Pearson that the predictor must have shown; the study's bound."
    )
    min_trajectories: int = Field(2, ge=1, description="With fewer trajectories, nothing is planned.")


class DemandTable(BaseModel):
    """Where the controller gets the demand from."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    redis: Annotated[SecretStr | None, AfterValidator(_redis_url)] = Field(
        None, description="The gateway's store, redis://...; when unset, the gateway itself is asked."
    )
    namespace: str = Field("heddle:", min_length=1, description="The gateway's store_namespace.")
    max_age_s: float = Field(
        30.0, gt=0, description="Older reports are not acted on; six times the gateway's demand_interval_s."
    )


class FleetFile(BaseModel):
    """All settings of a fleet."""

    model_config = _STRICT
    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    fleet: Annotated[str, AfterValidator(_fleet_id)] = Field(description="Its id; servers are named after it.")
    model: str = Field(min_length=1, description="The engine's `--model`.")
    served_name: str | None = Field(None, min_length=1, description="As clients call it; the model's name by default.")
    gateway: Annotated[str, AfterValidator(_base_url)] = "http://127.0.0.1:8080"
    listen: str = Field("127.0.0.1:8070", description="Where the controller itself answers.")
    state_dir: Path = Field(Path("heddle-fleet"), description="Journal, lease, local servers' logs, compile caches.")
    launcher: Literal["local", "ray", "kubernetes"] = "local"
    launcher_options: dict[str, Any] = Field({}, description="Options of Ray and Kubernetes; see docs/launchers.md.")
    gpus: int = Field(0, ge=0, le=4096, description="Number of GPUs of this machine: devices 0, 1, ...")
    devices: tuple[Annotated[str, AfterValidator(_device)], ...] = Field(
        (), description="Instead of `gpus`: which GPUs."
    )
    cpu_slots: int = Field(0, ge=0, le=4096, description="Instead of `gpus`: slots for engines without a GPU.")
    gpus_per_node: int = Field(8, ge=1, le=1024, description="GPUs of a node, and the largest TP size.")
    tp_sizes: tuple[Tp, ...] = Field((1,), min_length=1, description="TP sizes that engines may have.")
    first: tuple[Tp, ...] | None = Field(None, description="The first fleet. Unset: the smallest size on all devices.")
    engine: EngineTable = EngineTable()
    sleep: Sleeping = Sleeping()
    warm_up: WarmUp = WarmUp()
    limits: Limits = Limits()
    planning: Planning = Planning()
    demand: DemandTable = DemandTable()
    admin_key: Annotated[SecretStr | None, AfterValidator(_as_sent)] = Field(
        None, exclude=True, description=f"Only by {ADMIN_KEY_VARIABLE}."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> "FleetFile":
        check_options(self.launcher, self.launcher_options)
        said = [name for name in ("gpus", "devices", "cpu_slots") if getattr(self, name)]
        if self.launcher == "local" and len(said) != 1:
            raise ValueError(f"a local fleet needs one of gpus, devices and cpu_slots, not {said or 'none'}")
        if self.launcher != "local" and said:
            raise ValueError(f"{said[0]} is for local fleets only; {self.launcher} finds its devices itself")
        if PIN_VARIABLE in self.engine.environment and not (self.cpu_slots or self.launcher == "kubernetes"):
            where = "; name the fleet's in `devices`" if self.launcher == "local" else ""
            raise ValueError(f"engine.environment: {PIN_VARIABLE} is set for each engine, to its own GPUs{where}")
        devices = self.local_devices
        if len(set(devices)) < len(devices):
            raise ValueError(f"devices: one is listed twice in {list(devices)}")
        if self.launcher == "local" and min(self.tp_sizes) > len(devices):
            raise ValueError(
                f"no engine fits: the smallest of tp_sizes is {min(self.tp_sizes)}, and devices are {len(devices)}"
            )
        if (too_large := [tp for tp in self.tp_sizes if tp > self.gpus_per_node]) and not self.spans_nodes:
            raise ValueError(
                f"tp_sizes: TP {too_large[0]} is more than the {self.gpus_per_node} GPUs of a node (gpus_per_node)"
            )
        if unknown := set(self.first or ()) - set(self.tp_sizes):
            raise ValueError(f"first: TP {min(unknown)} is not among tp_sizes")
        for name in ("flags_by_tp", "kv_bytes_by_tp"):
            if unknown := set(getattr(self.engine, name)) - set(self.tp_sizes):
                raise ValueError(f"engine.{name}: TP {min(unknown)} is not among tp_sizes")
        if self.planning.is_automatic and (missing := set(self.tp_sizes) - set(self.engine.profiles)):
            raise ValueError(f"planning.is_automatic needs a profile of TP {min(missing)} in engine.profiles")
        if self.sleep.tp_sizes and self.launcher != "local":
            raise ValueError(
                f"sleep: {self.launcher} gives each GPU to one engine only, so no engine can sleep beside another"
            )
        if self.engine.kv_transfer and self.engine.kind == "sglang":
            raise ValueError("engine.kv_transfer: SGLang cannot transfer KV; its engines can share a kv_tier")
        tier = self.engine.kv_tier
        if tier is not None and not tier.is_absolute():
            raise ValueError(
                f"engine.kv_tier: must be an absolute path, which means the same to all engines, not {str(tier)!r}"
            )
        if self.sleep.tp_sizes and tier and self.engine.kind != "sim":
            raise ValueError("sleep: never tried together with engine.kv_tier; use one of the two")
        if self.sleep.tp_sizes and self.engine.kv_transfer and self.engine.kind != "sim" and not self.cpu_slots:
            raise ValueError(
                "sleep: engines wake with their KV where NIXL does not expect it; use sleep or engine.kv_transfer"
            )
        self.sleep.check(self.engine.kind, self.tp_sizes, len(self.local_devices))
        for tp, name in self.engine.profiles.items():
            if load_profile(name).tp != tp:
                raise ValueError(f"engine.profiles.{tp}: {name} is a profile of TP {load_profile(name).tp}, not {tp}")
        host, colon, port = self.listen.rpartition(":")
        if not (host and colon and port.isdecimal() and int(port) < 65_536):
            raise ValueError(f"listen: {self.listen!r} is not HOST:PORT")
        return self

    @property
    def local_devices(self) -> tuple[str, ...]:
        """Devices of a local fleet."""
        if self.cpu_slots:
            return tuple(f"cpu{number}" for number in range(self.cpu_slots))
        return self.devices or tuple(str(number) for number in range(self.gpus))

    @property
    def spans_nodes(self) -> bool:
        """Whether an engine may be split over nodes."""
        return self.launcher == "ray" and bool(self.launcher_options.get("across_nodes"))

    @property
    def spare_rule(self) -> SpareRule:
        return SpareRule(frozenset(self.sleep.tp_sizes), self.sleep.is_ahead)

    @property
    def retry_rule(self) -> RetryRule:
        limits = self.limits
        return RetryRule(limits.max_tries, limits.back_off_s, limits.max_back_off_s, limits.min_serving_s)

    def profiles(self) -> dict[int, EngineProfile]:
        """The profile of each TP size that has one, with the slots that engines are launched with."""
        named = {tp: load_profile(self.engine.profiles[tp]) for tp in self.tp_sizes if tp in self.engine.profiles}
        return {tp: replace(profile, slots=self.engine.slots or profile.slots) for tp, profile in named.items()}


def engine_kind(kind: str) -> str:
    """The kind whose control routes an engine of the file has: simulated ones are launched as vLLM."""
    return "vllm" if kind == "sim" else kind


def load_fleet_file(path: str | Path) -> FleetFile:
    """The fleet of a file; relative paths in it are relative to the file, and `~` is the user's folder. The admin key
    comes from the environment.

    Raises:
        FleetFileError: it cannot be read, or something in it is wrong.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise FleetFileError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise FleetFileError(f"{path} is not TOML: {error}") from None
    if "admin_key" in content:
        raise FleetFileError(f"{path}: admin_key must not be in a file; set {ADMIN_KEY_VARIABLE} in the environment")
    for name, text in _texts(content):
        if "\0" in text:  # neither a path nor an argument of a program can have one
            raise FleetFileError(f"{path}: {name}: must not have a NUL byte")
    try:
        fleet = FleetFile(**content, admin_key=os.environ.get(ADMIN_KEY_VARIABLE) or None)
    except ValidationError as error:
        name, said = first_mistake(error, FleetFile)
        raise FleetFileError(f"{path}: {f'{name}: ' if name else ''}{said}") from None
    options = dict(fleet.launcher_options)
    if fleet.launcher == "kubernetes":
        for name in _KUBERNETES_FILES & options.keys():
            options[name] = _found(path.parent, options[name], is_list=name == "kubeconfig")
    state_dir = Path(_found(path.parent, str(fleet.state_dir)))
    return fleet.model_copy(update={"state_dir": state_dir, "launcher_options": options})


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """All strings of a TOML value, each with its place; a table's keys are not among them."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict | list):
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{name}.{step}" if name else str(step))


def _found(folder: Path, said: str, is_list: bool = False) -> str:
    """Where a path of the file leads; of a list, as kubeconfig may be one, each."""
    parts = filter(None, said.split(os.pathsep)) if is_list else (said,)
    return os.pathsep.join(str((folder / os.path.expanduser(part)).absolute()) for part in parts)
