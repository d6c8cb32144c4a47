"""What `[launcher_options]` of a fleet file may have, for each launcher; defaults are the launchers' own.

What is malformed or unknown is refused before anything starts: a Pod with the port "8000" would be launched, and found
wrong, again and again.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engines.validation_errors import first_mistake

_DAY_S = 86_400  # Ray cannot wait for much longer
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LocalOptions(BaseModel):
    """None: devices and logs are set in the file itself."""

    model_config = _STRICT


class RayOptions(BaseModel):
    """Arguments of `RayLauncher`."""

    model_config = _STRICT

    address: str | None = Field(None, min_length=1)
    across_nodes: bool | None = None
    log_dir: str | None = Field(None, min_length=1)
    reserve_timeout_s: float | None = Field(None, gt=0, le=_DAY_S)


class KubernetesOptions(BaseModel):
    """Arguments of `KubernetesLauncher`, with the path of its template."""

    model_config = _STRICT

    template: str | None = Field(None, min_length=1)
    namespace: str | None = Field(None, min_length=1)
    kubeconfig: str | None = Field(None, min_length=1)
    context: str | None = Field(None, min_length=1)
    resource: str | None = Field(None, min_length=1)
    nodes: str | None = None
    port: int | None = Field(None, ge=1, le=65_535)
    owner: str | None = None
    confirm_timeout_s: float | None = Field(None, ge=0, le=_DAY_S)


_OPTIONS: dict[str, type[BaseModel]] = {"local": LocalOptions, "ray": RayOptions, "kubernetes": KubernetesOptions}


def check_options(launcher: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the option, if this launcher cannot have them."""
    model = _OPTIONS[launcher]
    try:
        model(**options)
    except ValidationError as error:
        name, said = first_mistake(error, model)
        raise ValueError(f"launcher_options.{name}: {said}") from None
