"""One engine of the gateway's settings; each field says what it means to those who set it."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator

from engines.http import can_be_asked
from engines.keys import check_key
from engines.profiles import load_profile
from engines.validation_errors import numbers


def _as_sent(key: SecretStr) -> SecretStr:
    check_key(key.get_secret_value())
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

    url: str = Field(
        description="Base URL. `vllm+http://` or `sglang+http://` names the kind; otherwise the engine is asked."
    )
    kind: Literal["vllm", "sglang"] | None = Field(
        None, description="`vllm` or `sglang`; asked of the engine when unset."
    )
    slots: int | None = Field(None, ge=1, le=65_536, description="Concurrent turns; asked of the engine when unset.")
    kv_capacity_tokens: int | None = Field(
        None, ge=1, le=2**53, description="Tokens that its KV cache holds; asked of the engine when unset."
    )
    tp: int = Field(1, ge=1, le=1024, description="Tensor-parallel size.")
    profile: Annotated[str | None, AfterValidator(_known_profile)] = Field(
        None, description="Profile of its speed; `heddle sim-engine --profile list` names the profiles."
    )
    kv_transfer: Literal["nixl", "none"] | None = Field(
        None, description="How it hands KV to other engines. Asked of the engine when unset; few report it."
    )
    kv_tier: str | None = Field(
        None,
        max_length=4096,
        description="KV tier that engines of the same name share. Asked of the engine when unset; few report it.",
    )
    api_key: Key | None = Field(None, description="Sent to this engine as its bearer token.")

    _numbers = field_validator("*", mode="before")(classmethod(numbers))

    @classmethod
    def parse(cls, text: str) -> "EngineSettings":
        """The settings for a URL such as `http://host:8000` or `sglang+http://host:30000`."""
        kind, plus, rest = text.partition("+")
        return cls(url=rest, kind=kind) if plus and "://" not in kind else cls(url=text)

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        if not can_be_asked(url):
            if "@" in url:  # not shown: it may hold a password
                raise ValueError("must be a base URL without user and password; an engine's key is its api_key")
            raise ValueError(f"{url!r} is not a base URL such as http://host:8000")
        return url.rstrip("/").removesuffix("/v1")

    @property
    def address(self) -> str:
        """Host, port and path of the URL, from which its id is made; alike in all spellings of the URL."""
        parts = urlsplit(self.url)
        server = parts.netloc.rpartition("@")[2].lower().removesuffix(":443" if parts.scheme == "https" else ":80")
        return server + parts.path.replace("/", "-")
